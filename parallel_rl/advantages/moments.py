"""Mean and deviation of the valid tokens of all data ranks, and whitening by them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple

import torch

from parallel_rl.agreement import communication_device
from parallel_rl.groups import all_gather, group_size

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup

Whitening = Literal["none", "center", "population", "unbiased"]
_EPS = 1e-8


class Moments(NamedTuple):
    """Count, mean, Σ(x − mean)², minimum and maximum of n numbers; 0-dim float64."""

    number: Tensor
    mean: Tensor
    square: Tensor
    low: Tensor
    high: Tensor

    def variance(self, correction: int = 0) -> Tensor:
        """Return Σ(x − mean)²/(n − correction); 0 where that is undefined."""
        return self.square / (self.number - correction).clamp(min=1)


def moments(x: Tensor, mask: Tensor, group: ProcessGroup | None = None) -> Moments:
    """Compute the moments of the valid x of all ranks of `group`, which all call this, in one all-gather.

    >>> step = moments(torch.tensor([1.0, 3.0, 9.0]), torch.tensor([1, 1, 0]))
    >>> float(step.mean), float(step.variance())
    (2.0, 1.0)
    """
    value, keep = x.detach().double(), mask.bool()
    count = keep.sum().double()
    mean = torch.where(keep, value, 0.0).sum() / count.clamp(min=1)
    square = torch.where(keep, value - mean, 0.0).square().sum()
    infinity = value.new_full((1,), torch.inf)
    low = torch.cat([torch.where(keep, value, torch.inf).flatten(), infinity]).amin()
    high = torch.cat([torch.where(keep, value, -torch.inf).flatten(), -infinity]).amax()
    local = torch.stack([count, mean, square, low, high])
    parts = all_gather(local.to(communication_device(group, local.device)), group).to(local.device)
    return _merge(*parts.unbind(1)) if group_size(group) > 1 else Moments(*local.unbind())


def _merge(count: Tensor, mean: Tensor, square: Tensor, low: Tensor, high: Tensor) -> Moments:
    """Pool the moments [ranks] without a difference of large squares (Chan, Golub and LeVeque)."""
    total = count.sum()
    pooled = (count * mean).sum() / total.clamp(min=1)
    return Moments(total, pooled, (square + count * (mean - pooled).square()).sum(), low.amin(), high.amax())


def whiten(
    x: Tensor,
    mask: Tensor,
    mode: Whitening = "population",
    group: ProcessGroup | None = None,
    *,
    keep_mean: bool = False,
) -> Tensor:
    """Whiten x over the valid entries of all ranks (mean 0, deviation 1); 0 outside `mask`.

    >>> whiten(torch.tensor([1.0, 3.0, 9.0]), torch.tensor([1, 1, 0]))
    tensor([-1.,  1.,  0.])

        center:     x − mean
        population: (x − mean) / √max(Σ(x − mean)²/n, ε)            as OpenRLHF, LightRFT, NeMo-RL
        unbiased:   (x − mean) / √(Σ(x − mean)²/(n − 1) + ε)        as verl, Trinity-RFT

    ε is 1e-8. Entries that are all equal become exactly 0.

    Args:
        x, mask: one shape, any; masked entries may be NaN.
        mode: see above; "none" leaves valid entries as they are.
        group: data ranks, which all call this; None is one process.
        keep_mean: add the mean again.
    """
    if mode not in ("none", "center", "population", "unbiased"):
        raise ValueError(f"whitening = {mode!r} is not valid; choose none, center, population or unbiased")
    if x.shape != mask.shape:
        raise ValueError(f"the mask of a whitening must be {list(x.shape)} like its numbers, got {list(mask.shape)}")
    keep = mask.bool()
    if mode == "none":
        return torch.where(keep, x, 0.0)
    step = moments(x, keep, group)
    value = torch.where(step.low == step.high, 0.0, x.double() - step.mean)
    if mode == "population":
        value = value * step.variance().clamp(min=_EPS).rsqrt()
    elif mode == "unbiased":
        value = value * (step.variance(1) + _EPS).rsqrt()
    value = value + step.mean if keep_mean else value
    return torch.where(keep, value, 0.0).to(x.dtype)
