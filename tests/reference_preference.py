"""The losses on preferences once more, dense and slow, straight from their formulas; see `tests.reference`."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from tests.reference import Result, counts, logprobs_and_entropy, valid


def _log_sigmoid(x: Tensor) -> Tensor:
    return -torch.log(1 + torch.exp(-x))


def _smoothed(h: Tensor, eps: float) -> Tensor:
    return -(1 - eps) * _log_sigmoid(h) - eps * _log_sigmoid(-h)


def _kl_to_smoothed(h: Tensor, eps: float) -> Tensor:
    q = torch.sigmoid(h)
    return q * (torch.log(q) - math.log(1 - eps)) + (1 - q) * (torch.log(1 - q) - math.log(eps))


def _discopop(h: Tensor) -> Tensor:
    gate = torch.sigmoid(h / 0.05)
    return -(1 - gate) * _log_sigmoid(h) + gate * torch.exp(-h)


#: (β·D_w, β·D_l, β, ε) → the loss of a pair
KINDS: dict[str, Callable[[Tensor, Tensor, float, float], Tensor]] = {
    "sigmoid": lambda w, r, beta, eps: _smoothed(w - r, eps),
    "robust": lambda w, r, beta, eps: (-(1 - eps) * _log_sigmoid(w - r) + eps * _log_sigmoid(r - w)) / (1 - 2 * eps),
    "ipo": lambda w, r, beta, eps: ((w - r) / beta - 0.5 / beta) ** 2,
    "hinge": lambda w, r, beta, eps: torch.clamp(1 - (w - r), min=0),
    "exo": lambda w, r, beta, eps: _kl_to_smoothed(w - r, eps),
    "nca": lambda w, r, beta, eps: -_log_sigmoid(w) - 0.5 * _log_sigmoid(-w) - 0.5 * _log_sigmoid(-r),
    "bco": lambda w, r, beta, eps: -_log_sigmoid(w) - _log_sigmoid(-r),
    "sppo-hard": lambda w, r, beta, eps: ((w - 0.5) / beta) ** 2 + ((r + 0.5) / beta) ** 2,
    "apo-zero": lambda w, r, beta, eps: 1 - torch.sigmoid(w) + torch.sigmoid(r),
    "apo-down": lambda w, r, beta, eps: torch.sigmoid(w) + 1 - torch.sigmoid(w - r),
    "discopop": lambda w, r, beta, eps: _discopop(w - r),
}


def mean_of_pairs(
    rewards: dict[int, Tensor], n_seq: int, of_pair: Callable[[Tensor, Tensor, int], Tensor]
) -> tuple[Tensor, dict[str, float]]:
    """Σ of_pair(chosen, rejected, row of the chosen) / (N_seq / 2) over pairs whose rows both have a reward; and metrics."""
    loss, metrics = torch.zeros(()), {"accuracy": 0.0, "rewards_chosen_mean": 0.0, "rewards_rejected_mean": 0.0}
    pairs = n_seq / 2
    for i in range(0, max(rewards, default=-1) + 1, 2):
        if i in rewards and i + 1 in rewards:
            chosen, rejected = rewards[i], rewards[i + 1]
            loss = loss + of_pair(chosen, rejected, i) / pairs
            metrics["accuracy"] += float(chosen > rejected) / pairs
            metrics["rewards_chosen_mean"] += chosen.item() / pairs
            metrics["rewards_rejected_mean"] += rejected.item() / pairs
    return loss, metrics | {"num_valid_samples": len(rewards) / 2}


def _nll_of_chosen(logp: Tensor, data: dict[str, Tensor], average: bool) -> Tensor:
    rows, total = dict(valid(data)), torch.zeros(())
    for i, t in rows.items():
        if i % 2 == 0 and i + 1 in rows:
            total = total - logp[i, t].sum() / (max(len(t), 1) if average else 1) / (counts(data)[0] / 2)
    return total


def _with_nll(preferred: Tensor, weight: float, nll: Tensor, of_nll: float, metrics: dict[str, float]) -> Result:
    total = weight * preferred + of_nll * nll
    values = {"loss": total.item(), "preference_loss": preferred.item(), "sft_loss": nll.item()}
    return total, metrics | values


def dpo(logits: Tensor, data: dict[str, Tensor], config: dict) -> Result:
    logp, _ = logprobs_and_entropy(logits, data["input_ids"])
    reference = data["reference_policy_logprobs"]
    if config.get("reference_logprobs_alignment") == "predictor":
        reference = torch.cat([torch.zeros_like(reference[:, :1]), reference[:, :-1]], 1)
    rewards, rows, alpha = {}, dict(valid(data)), config.get("length_desensitization")
    for i, t in rows.items():
        ratio = logp[i, t] - reference[i, t]
        partner = rows.get(i ^ 1)
        if alpha is not None and partner is not None:
            shared = min(len(t), len(partner))
            ratio = torch.cat([ratio[:shared], alpha * ratio[shared:]])
        rewards[i] = ratio.sum() / (max(len(t), 1) if config.get("preference_average_log_probs") else 1)
    infinite = {"overflow_tokens": float(sum(torch.isinf(reference[i, t]).sum() for i, t in rows.items()))}
    beta, eps = config.get("reference_policy_kl_penalty", 0.05), config.get("label_smoothing", 0.0)
    of_kind = KINDS[config.get("kind", "sigmoid")]
    preferred, metrics = mean_of_pairs(rewards, counts(data)[0], lambda w, r, i: of_kind(beta * w, beta * r, beta, eps))
    of_nll = config.get("sft_loss_weight", 0.0)
    nll = _nll_of_chosen(logp, data, config.get("sft_average_log_probs", False)) if of_nll else torch.zeros(())
    return _with_nll(preferred, config.get("preference_loss_weight", 1.0), nll, of_nll, metrics | infinite)


def _of_rows(logits: Tensor, data: dict[str, Tensor], average: bool) -> tuple[Tensor, dict[int, Tensor]]:
    logp, _ = logprobs_and_entropy(logits, data["input_ids"])
    return logp, {i: logp[i, t].sum() / (max(len(t), 1) if average else 1) for i, t in valid(data)}


def simpo(logits: Tensor, data: dict[str, Tensor], config: dict) -> Result:
    beta, gamma, eps = config.get("beta", 2.0), config.get("gamma", 1.0), config.get("label_smoothing", 0.0)
    _, rewards = _of_rows(logits, data, average=True)
    loss, metrics = mean_of_pairs(rewards, counts(data)[0], lambda w, r, i: _smoothed(beta * (w - r) - gamma, eps))
    return loss, metrics | {"loss": loss.item()}


def cpo(logits: Tensor, data: dict[str, Tensor], config: dict) -> Result:
    beta, eps = config.get("beta", 0.1), config.get("label_smoothing", 0.0)
    logp, rewards = _of_rows(logits, data, average=False)
    preferred, metrics = mean_of_pairs(rewards, counts(data)[0], lambda w, r, i: _smoothed(beta * (w - r), eps))
    nll = _nll_of_chosen(logp, data, config.get("sft_average_log_probs", False))
    return _with_nll(preferred, 1.0, nll, config.get("sft_loss_weight", 1.0), metrics)


def orpo(logits: Tensor, data: dict[str, Tensor], config: dict, eps: float = torch.finfo(torch.float64).eps) -> Result:
    logp, rewards = _of_rows(logits, data, average=True)

    def odds(a: Tensor) -> Tensor:
        a = torch.clamp(a, max=-eps)  # a response without a token is infinitely likely
        return a - torch.log(-torch.expm1(a))

    beta = config.get("beta", 0.1)
    preferred, metrics = mean_of_pairs(
        rewards, counts(data)[0], lambda w, r, i: -beta * _log_sigmoid(odds(w.double()) - odds(r.double()))
    )
    return _with_nll(preferred, 1.0, _nll_of_chosen(logp, data, True), 1.0, metrics)


def kto(logits: Tensor, data: dict[str, Tensor], config: dict) -> Result:
    logp, _ = logprobs_and_entropy(logits, data["input_ids"])
    sides: dict[str, list[Tensor]] = {"desirable": [], "undesirable": [], "mismatched": []}
    names = {1.0: "desirable", -1.0: "undesirable", 0.0: "mismatched"}
    for i, t in valid(data):
        ratio = (logp[i, t] - data["reference_policy_logprobs"][i, t]).sum()
        sides[names[data["preference_labels"][i].item()]].append(ratio)

    def mean(side: str) -> float:
        values = [ratio.item() for ratio in sides[side]]
        return sum(values) / max(len(values), 1)

    baseline, beta = config.get("baseline", "mismatched"), config.get("beta", 0.1)
    sources = {"mismatched": ("mismatched",) * 2, "opposite-class": ("undesirable", "desirable"), "none": None}[
        baseline
    ]
    z = [0.0, 0.0] if sources is None else [max(0.0, mean(side)) for side in sources]
    losses = [config.get("desirable_weight", 1.0) * (1 - torch.sigmoid(beta * (d - z[0]))) for d in sides["desirable"]]
    losses += [
        config.get("undesirable_weight", 1.0) * (1 - torch.sigmoid(beta * (z[1] - d))) for d in sides["undesirable"]
    ]
    loss = torch.stack(losses).mean() if losses else 0 * logits.sum()
    metrics = {f"num_{side}": float(len(rows)) for side, rows in sides.items()}
    infinite = [torch.isinf(data["reference_policy_logprobs"][i, t]).sum() for i, t in valid(data)]
    return loss, metrics | {
        "loss": loss.item(),
        "overflow_tokens": float(sum(infinite)),
        "kl_desirable": z[0],
        "kl_undesirable": z[1],
        "rewards_desirable_mean": mean("desirable"),
        "rewards_undesirable_mean": mean("undesirable"),
    }
