"""A random batch of the policy loss, its dense log-probs and valid tokens, and options that several tests name."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from parallel_rl import PolicyLossFn, count_valid
from parallel_rl.testing.cases import step_statistics

TOKEN, SEQ, SUM = "token-mean", "seq-mean-token-mean", "seq-mean-token-sum"
DUAL = {"name": "ppo", "dual_clip": 3.0}
GSPO = {"ratio_level": "sequence-mean", "ratio_gradient": "token"}


def rec(mode: str, **options: object) -> dict[str, Any]:
    return {"surrogate": {"name": "rec", "clip_mode": mode, **options}}


def run(config: dict, logits: Tensor, data: dict[str, Tensor]) -> Tensor:
    loss_fn, counts = PolicyLossFn(config), count_valid(data)
    statistics = step_statistics([(loss_fn, (logits, data, *counts))])
    loss, metrics = loss_fn(logits, data, *counts, statistics=statistics)
    assert metrics["loss"].item() == loss.item()
    return loss


B, S, V = 7, 12, 9


def random_batch(seed: int = 0) -> tuple[Tensor, dict[str, Tensor]]:
    """Ragged rows with holes, one row without tokens, advantages that vary in a sequence."""
    g = torch.Generator().manual_seed(seed)
    logits = torch.randn(B, S, V, generator=g, dtype=torch.float64)
    ids = torch.randint(0, V, (B, S), generator=g)
    mask = (torch.rand(B, S, generator=g) < 0.7).long()
    mask[2] = 0
    logp = dense_logprobs(logits, ids)
    near = [logp + scale * torch.randn(B, S, generator=g).double() for scale in (0.4, 0.5, 0.3)]
    names = ("prev_logprobs", "generation_logprobs", "reference_policy_logprobs")
    return logits.requires_grad_(), {
        "input_ids": ids,
        "token_mask": mask,
        "sample_mask": torch.tensor([1, 1, 1, 1, 0, 1, 1]),
        "sample_ids": torch.randperm(100, generator=g)[:B],
        "advantages": torch.randn(B, S, generator=g).double(),
        "rewards": torch.randn(B, generator=g).double(),
        **dict(zip(names, near, strict=True)),
    }


def dense_logprobs(logits: Tensor, ids: Tensor) -> Tensor:
    """Token-aligned [B, S], column 0 is 0."""
    logp = logits.log_softmax(-1)[:, :-1].gather(-1, ids[:, 1:, None])[..., 0]
    return torch.cat([torch.zeros(B, 1).double(), logp], 1)


def dense_valid(data: dict[str, Tensor]) -> Tensor:
    mask = data["token_mask"].bool() & data["sample_mask"].bool()[:, None]
    return torch.cat([torch.zeros(B, 1, dtype=torch.bool), mask[:, 1:]], 1)
