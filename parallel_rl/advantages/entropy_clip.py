"""Masks that leave out negative tokens which would change the policy's entropy most (arXiv 2602.03392)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from parallel_rl.advantages.moments import moments

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup


def entropy_signal(logprobs: Tensor, entropy: Tensor, mask: Tensor) -> Tensor:
    """S = p·(H + log p) of the sampled token, 0 outside the mask: how its probability moves the entropy.

    Args:
        logprobs, entropy, mask: one shape.
    """
    keep = mask.bool()
    safe, h = torch.where(keep, logprobs, 0.0), torch.where(keep, entropy, 0.0)
    return torch.where(keep, safe.exp() * (h + safe), 0.0)


def clip_by_batch(
    advantages: Tensor, signal: Tensor, mask: Tensor, mu: float = 2.5, group: ProcessGroup | None = None
) -> Tensor:
    """CLIP-B: tokens with A < 0 stay iff S − mean ≥ −μ·std, over the valid tokens of the step (population std).

    Args:
        advantages, signal, mask: one shape; `signal` as of `entropy_signal`.
        mu: μ ≥ 0.
        group: the data ranks, each of which calls it; None is one process.

    Returns:
        The mask of what stays.

    Raises:
        ValueError: shapes that differ, or μ below 0.
    """
    if not advantages.shape == signal.shape == mask.shape:
        shapes = [list(x.shape) for x in (advantages, signal, mask)]
        raise ValueError(f"advantages, signal and mask must be of one shape, got {shapes}")
    if not mu >= 0:
        raise ValueError(f"mu = {mu} must be at least 0")
    keep = mask.bool()
    found = moments(signal, keep, group)
    below = signal.double() - found.mean < -mu * found.variance().sqrt()
    return keep & ~(below & (torch.where(keep, advantages, 0.0) < 0))
