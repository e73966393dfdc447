"""Undo the factors that hosts apply to a loss behind the caller's back."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from parallel_rl.groups import group_sum

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup

    from parallel_rl.metrics import Metrics


def averaged(share: Tensor, ranks: int, micro_batches: int = 1) -> Tensor:
    """Multiply a local loss by the ranks and micro-batches that a host (DDP, FSDP) averages over.

    >>> averaged(torch.tensor(0.25), ranks=2, micro_batches=4).item()
    2.0
    """
    for name, number in (("ranks", ranks), ("micro_batches", micro_batches)):
        if number < 1:
            raise ValueError(f"{name} = {number} must be at least 1")
    return share * (ranks * micro_batches)


def whole_over_context(share: Tensor, group: ProcessGroup | None) -> Tensor:
    """Sum local losses over context ranks, for a host that logs the sum; the gradient stays local.

    >>> whole_over_context(torch.tensor(0.25), None).item()
    0.25
    """
    return share + (group_sum(share.detach(), group) - share.detach())


def floats(metrics: Metrics) -> dict[str, float]:
    """Copy this rank's numbers to the host, in one transfer.

    >>> from parallel_rl.metrics import Metric, Metrics
    >>> floats(Metrics({"loss": Metric("share", torch.tensor(0.5))}))
    {'loss': 0.5}
    """
    if not metrics:
        return {}
    return dict(zip(metrics, torch.stack([x.double() for x in metrics.values()]).tolist(), strict=True))


def numerator_denominator(metrics: Metrics, calls: int) -> dict[str, Tensor]:
    """Map name → [numerator, denominator], which a host (Megatron-LM) sums over all calls, then divides.

    `calls`: micro-batches × data ranks × context ranks, at least 1. A share or count is `calls` times its value over 1, so the
    quotient is its sum. Extrema and squared ratios have no such form and are left out.

    >>> from parallel_rl.metrics import Metric, Metrics
    >>> pair = numerator_denominator(Metrics({"loss": Metric("share", torch.tensor(0.5))}), calls=4)["loss"]
    >>> pair.tolist()
    [2.0, 1.0]
    """
    if calls < 1:
        raise ValueError(f"calls = {calls} must be at least 1")
    pairs = {}
    for name in metrics:
        part = metrics.parts(name)
        value = part.value.double()
        if part.kind == "ratio" and part.denominator is not None:
            pairs[name] = torch.stack([value, part.denominator.double()])
        elif part.kind in ("share", "count"):
            pairs[name] = torch.stack([calls * value, torch.ones_like(value)])
    return pairs
