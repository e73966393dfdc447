"""Masks that drop the tokens with A < 0 that would change the policy's entropy most (arXiv 2602.03392)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from parallel_rl.advantages.moments import moments

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup


def entropy_signal(logprobs: Tensor, entropy: Tensor, mask: Tensor) -> Tensor:
    """Compute S = p·(H + log p) of the sampled token, its effect on the entropy; 0 if masked."""
    keep = mask.bool()
    safe, h = torch.where(keep, logprobs, 0.0), torch.where(keep, entropy, 0.0)
    return torch.where(keep, safe.exp() * (h + safe), 0.0)


def clip_by_batch(
    advantages: Tensor, signal: Tensor, mask: Tensor, mu: float = 2.5, group: ProcessGroup | None = None
) -> Tensor:
    """Keep tokens by CLIP-B: all with A ≥ 0, and those with S − mean ≥ −μ·std over the step's tokens.

    Args:
        advantages, signal, mask: one shape; `signal` from `entropy_signal`, its std is the population's.
        mu: μ ≥ 0.
        group: the data ranks, which all call this; None is one process.
    """
    if not advantages.shape == signal.shape == mask.shape:
        shapes = [list(x.shape) for x in (advantages, signal, mask)]
        raise ValueError(f"advantages, signal and mask must be of one shape, got {shapes}")
    if not mu >= 0:
        raise ValueError(f"mu = {mu} must be at least 0")
    keep = mask.bool()
    step = moments(signal, keep, group)
    below = signal.double() - step.mean < -mu * step.variance().sqrt()
    return keep & ~(below & (torch.where(keep, advantages, 0.0) < 0))
