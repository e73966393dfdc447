"""Masks that leave out negative tokens which would change the policy's entropy most (arXiv 2602.03392)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from parallel_rl.advantages.moments import moments
from parallel_rl.agreement import communication_device
from parallel_rl.groups import all_gather

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
    _check(advantages, signal, mask, mu)
    keep = mask.bool()
    found = moments(signal, keep, group)
    below = signal.double() - found.mean < -mu * found.variance().sqrt()
    return keep & ~(below & (torch.where(keep, advantages, 0.0) < 0))


def clip_by_vocabulary(
    advantages: Tensor,
    signal: Tensor,
    expected: Tensor,
    mask: Tensor,
    mu: float = 8.5,
    max_fraction: float = 1e-4,
    group: ProcessGroup | None = None,
) -> Tensor:
    """CLIP-V: tokens with A < 0 stay iff D = expected − S ≤ μ·std(D); of those that do not, the largest D leave, few of them.

    Args:
        advantages, signal, mask: see `clip_by_batch`.
        expected: what S is compared with at each token: its expectation over the vocabulary.
        mu: μ ≥ 0.
        max_fraction: of the step's valid tokens, the most that leave (but always one).
        group: the data ranks, each of which calls it; None is one process.

    Returns:
        The mask of what stays.

    Raises:
        ValueError: shapes that differ, μ below 0, or a fraction outside (0, 1].
    """
    _check(advantages, signal, mask, mu)
    if expected.shape != signal.shape:
        raise ValueError(f"expected must be {list(signal.shape)} like the signal, got {list(expected.shape)}")
    if not 0 < max_fraction <= 1:
        raise ValueError(f"max_fraction = {max_fraction} must lie in (0, 1]")
    keep = mask.bool()
    distance = torch.where(keep, expected - signal, 0.0).double()
    found = moments(distance, keep, group)
    far = keep & (torch.where(keep, advantages, 0.0) < 0) & (distance > mu * found.variance().sqrt())
    most = max(int(found.number * max_fraction), 1)
    scores = torch.where(far, distance, -torch.inf).flatten()
    own = torch.cat([scores, scores.new_full((most,), -torch.inf)]).topk(most).values
    device = communication_device(group, own.device)
    threshold = all_gather(own.to(device), group).flatten().topk(most).values[-1].to(own.device)
    return keep & ~(far & (distance >= threshold))


def _check(advantages: Tensor, signal: Tensor, mask: Tensor, mu: float) -> None:
    if not advantages.shape == signal.shape == mask.shape:
        shapes = [list(x.shape) for x in (advantages, signal, mask)]
        raise ValueError(f"advantages, signal and mask must be of one shape, got {shapes}")
    if not mu >= 0:
        raise ValueError(f"mu = {mu} must be at least 0")
