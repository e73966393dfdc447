"""The losses of scalar heads and of process reward models once more, dense and slow; see `tests.reference`."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tests.reference import Result, counts, valid, weights
from tests.reference_preference import mean_of_pairs


def preference(logits: Tensor, data: dict[str, Tensor], config: dict) -> Result:
    """`logits` [B, S, 1]; the reward of a row is at its last token of the mask, column 0 included."""
    rewards = {}
    for i in range(len(logits)):
        places = data["token_mask"][i].nonzero()[:, 0]
        if data["sample_mask"][i] != 0:
            rewards[i] = logits[i, places[-1], 0] if len(places) else logits.new_zeros(())

    def of_pair(chosen: Tensor, rejected: Tensor, row: int) -> Tensor:
        margin = config.get("margin", 0.0) + (data["preference_margins"][row] if config.get("pair_margins") else 0.0)
        return torch.log1p(torch.exp((rejected - chosen) / config.get("score_temperature", 1.0) + margin))

    loss, metrics = mean_of_pairs(rewards, counts(data)[0], of_pair)
    return loss, metrics | {"loss": loss.item()}


def value(logits: Tensor, data: dict[str, Tensor], config: dict) -> Result:
    """`logits` [B, S, 1], the head's output at t − 1 against column t, or at t."""
    by_token, clip = config.get("head_position") == "token", config.get("cliprange")
    _, n_tok = counts(data)
    weight = weights(config, data, valid(data, column_0=by_token)).to(logits.dtype)
    loss, sums, seen = torch.zeros(()), {}, []
    for i, t in valid(data, column_0=by_token):
        v, target = logits[i, t if by_token else t - 1, 0], data["returns"][i, t]
        plain = error = (v - target) ** 2
        if clip is not None:
            old = data["values"][i, t]
            error = torch.maximum(plain, (torch.minimum(torch.maximum(v, old - clip), old + clip) - target) ** 2)
        loss = loss + 0.5 * config.get("scale", 1.0) * (weight[i, t] * error).sum()
        seen.append(v.detach())
        for name, x in (
            ("vf_clipfrac", (error > plain).double()),
            ("returns_mean", target),
            ("values_mean", v),
            ("returns_sq_mean", target**2),
            ("residual_sq_mean", plain),
        ):
            sums[name] = sums.get(name, 0.0) + x.sum().item() / n_tok
    flat = torch.cat(seen) if seen else torch.empty(0)
    sums["values_min"] = flat.min().item() if flat.numel() else math.inf
    sums["values_max"] = flat.max().item() if flat.numel() else -math.inf
    return loss, sums | {"loss": loss.item(), "num_valid_samples": float(len(seen))}


def prm(logits: Tensor, data: dict[str, Tensor], config: dict) -> Result:
    ids, losses, correct = config.get("reward_token_ids"), [], 0
    for i, columns in valid(data, column_0=True):
        for t in columns.tolist():
            label = data["reward_labels"][i, t].item()
            if data["input_ids"][i, t] != config["placeholder_token_id"] or label == config.get("ignore_index", -100):
                continue
            z = logits[i, t] if ids is None else logits[i, t, list(ids)]
            p = torch.softmax(z, 0)
            if config.get("soft_labels"):
                losses.append(-label * torch.log(p[0]) - (1 - label) * torch.log(p[1]))
                correct += int(p.argmax() == (0 if label >= 0.5 else 1))
            else:
                place = label if ids is None else list(ids).index(label)
                losses.append(-torch.log(p[place]))
                correct += int(p.argmax() == place)
    loss = torch.stack(losses).mean() if losses else 0 * logits.sum()
    steps = len(losses)
    return loss, {"loss": loss.item(), "accuracy": correct / max(steps, 1), "num_steps": float(steps)}
