"""The losses once more, dense and slow, straight from their formulas: no shard, no layout, no code shared with the package.

Whole [B, S, V] float64 logits, loops over sequences, masked tokens never touched. Every function gives (loss, metrics).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

Result = tuple[Tensor, dict[str, float]]


def logprobs_and_entropy(logits: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """[B, S] each, token-aligned: column t is of token t, predicted by the logits at t − 1; column 0 is 0."""
    log_p = torch.log_softmax(logits[:, :-1], -1)
    picked = log_p.gather(-1, ids[:, 1:, None])[..., 0]
    entropy = -(log_p.exp() * log_p).sum(-1)
    zero = logits.new_zeros(len(ids), 1)
    return torch.cat([zero, picked], 1), torch.cat([zero, entropy], 1)


def valid(data: dict[str, Tensor], column_0: bool = False) -> list[tuple[int, Tensor]]:
    """(row, indices of its valid tokens) of rows with sample_mask; column 0 has no predictor."""
    first = 0 if column_0 else 1
    rows = [i for i in range(len(data["sample_mask"])) if data["sample_mask"][i] != 0]
    return [(i, first + data["token_mask"][i, first:].nonzero()[:, 0]) for i in rows]


def counts(data: dict[str, Tensor]) -> tuple[int, int]:
    rows = valid(data)
    return max(len(rows), 1), max(sum(len(t) for _, t in rows), 1)


def weights(config: dict, data: dict[str, Tensor], rows: list[tuple[int, Tensor]]) -> Tensor:
    """[B, S] the weight of each token of `rows` (see `valid`), by what the aggregation calls a unit."""
    mode, (n_seq, n_tok) = config.get("aggregation", "token-mean"), counts(data)
    found, units = torch.zeros(data["input_ids"].shape, dtype=torch.float64), {}  # unit: its tokens
    for i, columns in rows:
        tokens = [(i, t) for t in columns.tolist()]
        if mode in ("prompt-mean", "trajectory-mean"):
            name = int(data["group_ids" if mode == "prompt-mean" else "run_ids"][i])
            units.setdefault(name, []).extend(tokens)
        elif mode == "turn-mean":
            for place in tokens:
                units.setdefault((i, int(data["segment_ids"][place])), []).append(place)
        for place in tokens:
            by_row = {"seq-mean-token-mean": 1 / (n_seq * len(tokens)), "seq-mean-token-sum": 1 / n_seq}
            found[place] = by_row.get(mode, 1 / n_tok)
    for tokens in units.values():
        for place in tokens:
            found[place] = 1 / (len(units) * len(tokens))
    return found


def nll(logits: Tensor, data: dict[str, Tensor], config: dict) -> Result:
    logp, _ = logprobs_and_entropy(logits, data["input_ids"])
    rows, loss = valid(data), logits.new_zeros(())
    weight = weights(config, data, rows).to(logits.dtype)
    cutoff = config.get("cutoff_prob", 1.0)
    for i, t in rows:
        p = logp[i, t].detach().exp()
        capped = torch.where(p > cutoff, math.log(cutoff), logp[i, t])
        terms = {"none": logp[i, t], "probability": p * logp[i, t], "phi": p * (1 - p) * capped}
        loss = loss - (weight[i, t] * terms[config.get("weighting", "none")]).sum()
    unmasked = float(sum(len(t) for _, t in rows))
    return loss, {"loss": loss.item(), "num_unmasked_tokens": unmasked, "num_valid_samples": float(len(rows))}


def clipped_pg(logits: Tensor, data: dict[str, Tensor], config: dict) -> Result:
    """Token by token over Python lists of sequences."""
    get = lambda key, default: config.get(key, default)  # noqa: E731
    logp, entropy = logprobs_and_entropy(logits, data["input_ids"])
    n_seq, n_tok = counts(data)
    rows = valid(data)
    beta = 0.0 if get("use_kl_in_reward", False) else get("reference_policy_kl_penalty", 0.01)
    kl_in, kl_out = get("kl_input_clamp_value", 20.0), get("kl_output_clamp_value", 10.0)
    low, high = 1 - get("ratio_clip_min", 0.2), 1 + get("ratio_clip_max", 0.2)
    kind, bound = get("truncated_importance_sampling_type", None), get("truncated_importance_sampling_ratio", None)
    floor = get("truncated_importance_sampling_ratio_min", None) or 0.0
    positives = sum(len(t) for i, t in rows if "rewards" in data and data["rewards"][i] > 0)

    def k(x: Tensor, ref: Tensor) -> Tensor:
        d = ref - x
        return {"k1": -d, "k2": d * d / 2, "k3": torch.exp(d) - 1 - d}[get("reference_policy_kl_type", "k3")]

    total = {"actor": 0.0, "kl": 0.0, "nll": 0.0}
    sums: dict[str, float] = {}
    extremes: dict[str, list[Tensor]] = {"probs_ratio": [], "probs_ratio_clamped": []}

    def add(name: str, value: Tensor | float, count: int) -> None:
        sums[name] = sums.get(name, 0.0) + float(torch.as_tensor(value).detach().sum()) / count

    for i, t in rows:
        cur, adv, beh = logp[i, t], data["advantages"][i, t], data["generation_logprobs"][i, t]
        old = cur.detach() if get("force_on_policy_ratio", False) else data["prev_logprobs"][i, t]
        n_i = max(len(t), 1)
        weight = 1 / n_tok if get("token_level_loss", True) else 1 / (n_seq * n_i)
        # the ratio and its clip
        if get("force_on_policy_ratio", False):
            ratio = clipped = torch.exp(cur - cur.detach())
        elif get("disable_ppo_ratio", False):
            ratio = clipped = cur
        else:
            log_ratio = (
                (cur - old).sum() / n_i + 0 * cur if get("sequence_level_importance_ratios", False) else cur - old
            )
            ratio = torch.exp(log_ratio)
            clipped = torch.clamp(ratio, low, high)
        x = -adv * clipped.detach() * cur if get("use_cispo", False) else torch.maximum(-adv * ratio, -adv * clipped)
        if get("ratio_clip_c", None):
            x = torch.where(adv < 0, torch.minimum(x, -adv * config["ratio_clip_c"]), x)
        # the off-policy weight
        if get("sequence_level_importance_ratios", False):
            w = torch.exp((old - beh).sum()) * torch.ones_like(cur)
        else:
            w = torch.exp(old - beh)
        w = w.detach()
        if kind == "tis":
            add("is_oob_ratio", ((w > bound) | (w < floor)).double(), n_tok)
            w = torch.clamp(w, floor, bound)
        elif kind == "icepop":
            add("is_oob_ratio", ((w > bound) | (w < floor)).double(), n_tok)
            w = torch.where((w > bound) | (w < floor), torch.zeros_like(w), w)
        elif kind == "seq-mask-tis":
            geometric = math.exp((old - beh).sum().item() / n_i)
            kept = floor <= geometric <= bound
            add("is_oob_ratio", 0.0 if kept else 1.0, n_seq)
            w = w * (1.0 if kept else 0.0)
        if get("sequence_level_importance_ratios", False):
            per_sequence = w[0] if len(t) else torch.ones(())
            add("sampling_importance_ratio", per_sequence, n_seq)
        else:
            add("sampling_importance_ratio", w, n_tok)
        total["actor"] = (
            total["actor"] + ((w if get("use_importance_sampling_correction", False) else 1.0) * x).sum() * weight
        )
        # the KL to the reference
        if beta:
            ref = data["reference_policy_logprobs"][i, t]
            base = beh if get("use_on_policy_kl_approximation", False) else cur.detach()
            kappa = torch.exp(cur - base)
            d = ref - cur
            if kl_in is not None:
                kappa = torch.where(d.abs() > kl_in, kappa.detach(), kappa)
                d = torch.clamp(d, -kl_in, kl_in)
            value = kappa * k(torch.zeros_like(d), d)
            value = value if kl_out is None else torch.clamp(value, -kl_out, kl_out)
            total["kl"] = total["kl"] + value.sum() * weight
        if get("positive_example_nll_weight", 0.0) and data["rewards"][i] > 0:
            total["nll"] = total["nll"] - cur.sum() / max(positives, 1)
        mixture = torch.log(0.5 * torch.exp(old) + 0.5 * torch.exp(beh))
        js = sum(0.5 * (torch.exp(mixture - p) - (mixture - p) - 1) for p in (old, beh))
        add("probs_ratio", ratio, n_tok)
        add("probs_ratio_clamped", clipped, n_tok)
        add("clip_fraction_low", (ratio < clipped).double(), n_tok)
        add("clip_fraction_high", (ratio > clipped).double(), n_tok)
        add("token_mult_prob_error", torch.exp((beh - old).abs()), n_tok)
        add("gen_kl_error", k(beh, old), n_tok)
        add("policy_kl_error", k(old, beh), n_tok)
        add("js_divergence_error", js, n_tok)
        add("approx_entropy", -torch.exp(cur - beh) * cur, n_tok)
        add("entropy", entropy[i, t], n_tok)
        add("num_valid_samples", 1.0, 1)
        add("overflow_tokens", (cur - old > 80).double(), 1)
        extremes["probs_ratio"].append(ratio)
        extremes["probs_ratio_clamped"].append(clipped)

    for name, values in extremes.items():
        flat = torch.cat(values) if values else torch.empty(0)
        sums[f"{name}_min"] = flat.min().item() if flat.numel() else math.inf
        sums[f"{name}_max"] = flat.max().item() if flat.numel() else -math.inf
    loss = total["actor"] + beta * total["kl"] + get("positive_example_nll_weight", 0.0) * total["nll"]
    return loss, sums | {
        "loss": torch.as_tensor(loss).item(),
        "kl_penalty": torch.as_tensor(total["kl"]).item(),
        "positive_nll_loss": torch.as_tensor(total["nll"]).item(),
    }
