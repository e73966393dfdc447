"""Losses of the benchmarks: GRPO and its kin on one input, as calls that give loss and gradient; and GRPO in plain PyTorch."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from parallel_rl import ClippedPGLossFn, PolicyLossFn, SequencePackingLossWrapper, count_valid, token_stats
from parallel_rl.losses.core.base import LossFn

MAX_ERROR = 1e-5  # relative, of loss and gradient (float32)
GRPO: dict[str, Any] = {"surrogate": {"name": "ppo", "clip_high": 0.28}, "kl": {"coefficient": 0.01}}
GRPO_FIELDS = ("advantages", "prev_logprobs", "reference_policy_logprobs")
LOSSES: dict[str, Callable[[], LossFn]] = {
    "GRPO": lambda: PolicyLossFn(GRPO),
    "GSPO": lambda: PolicyLossFn({**GRPO, "ratio_level": "sequence-mean", "aggregation": "seq-mean-token-mean"}),
    "ClippedPG, importance sampling": lambda: ClippedPGLossFn({"use_importance_sampling_correction": True}),
}

Call = Callable[[], tuple[Tensor, Tensor]]


def make_data(tokens: int, vocab: int, sequences: int, device: str = "cpu") -> dict[str, Tensor]:
    """[B, S] fields of B sequences with S = tokens / B, every fourth token masked."""
    generator = torch.Generator().manual_seed(0)
    shape = sequences, tokens // sequences

    def noise() -> Tensor:
        return torch.randn(shape, generator=generator)

    policy = -math.log(vocab) + noise()  # what random logits give, nearly
    data = {
        "input_ids": torch.randint(vocab, shape, generator=generator),
        "token_mask": (torch.arange(tokens).view(shape) % 4 != 0).long(),
        "sample_mask": torch.ones(sequences),
        "advantages": noise(),
        "prev_logprobs": policy.clamp(max=0),
        "generation_logprobs": (policy + 0.05 * noise()).clamp(max=0),
        "reference_policy_logprobs": (policy + 0.05 * noise()).clamp(max=0),
    }
    return {name: value.to(device) for name, value in data.items()}


def make_logits(data: Mapping[str, Tensor], vocab: int) -> Tensor:
    """[B, S, V]."""
    ids = data["input_ids"]
    return torch.randn(*ids.shape, vocab, generator=torch.Generator().manual_seed(1)).to(ids.device)


def make_call(loss_fn: LossFn, data: dict[str, Tensor], vocab: int, packed: bool = True) -> Call:
    """A call that gives (loss, gradient), from `cu_seqlens` on: what a training step does for one packed row."""
    rows, width = data["input_ids"].shape
    logits = make_logits(data, vocab)
    logits = (logits.view(1, rows * width, vocab) if packed else logits).requires_grad_()
    counts = count_valid([data])
    bounds = torch.arange(rows + 1, dtype=torch.int32) * width

    def call() -> tuple[Tensor, Tensor]:
        function = SequencePackingLossWrapper(loss_fn, bounds) if packed else loss_fn
        loss, _ = function(logits, data, *counts)
        (gradient,) = torch.autograd.grad(loss, logits)
        return loss.detach(), gradient

    return call


def make_statistics(data: dict[str, Tensor], vocab: int, entropy: bool = True) -> Call:
    """Log-probs and entropy of the same logits, and their backward."""
    logits = make_logits(data, vocab).flatten(0, 1).requires_grad_()
    targets = data["input_ids"].flatten()

    def call() -> tuple[Tensor, Tensor]:
        stats = token_stats(logits, targets, entropy=entropy)
        (gradient,) = torch.autograd.grad(stats.logprobs.sum(), logits)
        return stats.logprobs, gradient

    return call


def grpo_terms(logprobs: Tensor, advantages: Tensor, prev: Tensor, reference: Tensor) -> Tensor:
    """`GRPO` above of each token, as one would write it."""
    ratio = (logprobs - prev).exp()
    actor = -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.28) * advantages)
    d = reference - logprobs
    kl = (logprobs - logprobs.detach()).exp() * (d.exp() - 1 - d)
    return actor + 0.01 * kl


def plain_grpo(
    logits: Tensor, data: Mapping[str, Tensor], tokens: Tensor, entropy: bool = True
) -> tuple[Tensor, Tensor | None]:
    """`GRPO` above in plain PyTorch: whole float32 log-softmax, padded rows. (loss, mean entropy, as ours logs it)."""
    log_p = torch.log_softmax(logits[:, :-1].float(), -1)
    logprobs = log_p.gather(-1, data["input_ids"][:, 1:, None])[..., 0]
    mask = (data["token_mask"][:, 1:] * data["sample_mask"][:, None]).to(logprobs.dtype)
    loss = (grpo_terms(logprobs, *(data[field][:, 1:] for field in GRPO_FIELDS)) * mask).sum() / tokens
    if not entropy:
        return loss, None
    with torch.no_grad():
        return loss, (-(log_p.exp() * log_p).sum(-1) * mask).sum() / tokens


def agree(name: str, got: tuple[Tensor, Tensor], want: tuple[Tensor, Tensor]) -> None:
    """Raises RuntimeError where two results differ, so that the time says nothing."""
    difference = (got[1].view_as(want[1]) - want[1]).norm() / want[1].norm()
    if not max(difference.item(), (got[0] / want[0] - 1).abs().item()) <= MAX_ERROR:
        raise RuntimeError(f"{name} is wrong: {got[0]} and {want[0]}, gradients differ by {difference:.1e}")
