"""Distillation once more, dense and slow, straight from the formulas: probabilities and loops over tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.reference import Result, valid, weights


def kl(a: Tensor, b: Tensor) -> Tensor:
    return (a * (a / b).log()).sum(-1)


def divergence(options: dict, teacher: Tensor, student: Tensor) -> Tensor:
    """[..., V] logits of both to [...]."""
    p, q = teacher.softmax(-1), student.softmax(-1)
    beta, alpha = options.get("beta", 0.5), options.get("alpha", 0.1)
    m = beta * p + (1 - beta) * q
    return {
        "forward_kl": lambda: kl(p, q),
        "reverse_kl": lambda: kl(q, p),
        "cross_entropy": lambda: -(p * q.log()).sum(-1),
        "finite_cross_entropy": lambda: -(p * q.log()).sum(-1),
        "jsd": lambda: {0: kl(p, q), 1: kl(q, p)}.get(beta, beta * kl(p, m) + (1 - beta) * kl(q, m)),
        "skew_forward_kl": lambda: kl(p, alpha * p + (1 - alpha) * q),
        "skew_reverse_kl": lambda: kl(q, alpha * q + (1 - alpha) * p),
    }[options["name"]]()


def topk(config: dict, teacher: Tensor, ids: Tensor, lse: Tensor | None, student: Tensor) -> Tensor:
    """One position: the teacher's logits [K] at `ids`, its log-sum-exp over the whole vocabulary, the student's logits [V]."""
    p, whole = teacher.softmax(-1), student.softmax(-1)
    q = whole[ids]
    if config.get("bucket_tail"):
        assert lse is not None
        p = (teacher - lse).exp()
        p, q = torch.cat([p, 1 - p.sum()[None]]), torch.cat([q, 1 - q.sum()[None]])
    elif not config.get("zero_outside_topk"):
        q = q / q.sum()
    forward, reverse = kl(p, q), kl(q, p)
    if config.get("zero_outside_topk"):
        rest = torch.ones(len(whole), dtype=torch.bool)
        rest[ids] = False
        reverse = reverse + (whole[rest] * (whole[rest].log() + 100)).sum()
    weight = {"forward": 1.0, "reverse": 0.0, "mixed": config.get("mixed_kl_weight", 0.5)}[
        config.get("kl_type", "mixed")
    ]
    return weight * forward + (1 - weight) * reverse


def _aggregated(rows: list[tuple[int, list[Tensor]]], data: dict[str, Tensor], config: dict) -> Result:
    """The mean of (row, losses of its valid tokens)."""
    weight, at = weights(config, data, valid(data)), dict(valid(data))
    loss = sum(weight[i, t].to(x.dtype) * x for i, losses in rows for t, x in zip(at[i], losses, strict=True))
    return loss, {"loss": torch.as_tensor(loss).item(), "num_valid_samples": float(len(rows))}  # type: ignore[return-value]


def full_distillation(logits: Tensor, data: dict[str, Tensor], config: dict) -> Result:
    """`teacher_logits` [B, S, V] at the positions that predict."""
    options = config.get("divergence", "forward_kl")
    options = {"name": options} if isinstance(options, str) else options
    teacher = data["teacher_logits"] / config.get("teacher_temperature", 1.0)
    rows = [(i, [divergence(options, teacher[i, t - 1], logits[i, t - 1]) for t in at]) for i, at in valid(data)]
    return _aggregated(rows, data, config)


def distillation(logits: Tensor, data: dict[str, Tensor], config: dict) -> Result:
    back = 1 if config.get("topk_alignment") == "predictor" else 0
    rows = []
    for i, at in valid(data):
        fields = [
            (data["teacher_topk_logits"][i, t - back], data["teacher_topk_indices"][i, t - back], logits[i, t - 1], t)
            for t in at
        ]
        lse = data["teacher_logsumexp"]
        temperature = config.get("teacher_temperature", 1.0)
        rows.append((i, [topk(config, z / temperature, ids, lse[i, t - back], q) for z, ids, q, t in fields]))
    return _aggregated(rows, data, config)
