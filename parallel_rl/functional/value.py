"""Losses of value heads, one number per token."""

from __future__ import annotations

import torch
from torch import Tensor


def squared_error(values: Tensor, returns: Tensor) -> Tensor:
    """Compute (V − R)², all of one shape.

    >>> squared_error(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 4.0]))
    tensor([0., 4.])
    """
    return (values - returns).square()


def clipped_squared_error(values: Tensor, returns: Tensor, old_values: Tensor, cliprange: float) -> Tensor:
    """Compute max((V − R)², (V_old + clamp(V − V_old, −c, c) − R)²), pessimistic like PPO; one shape.

    Papers: arXiv 1506.02438 (the trust region), 1707.06347, 2005.12729.

    >>> clipped_squared_error(torch.tensor([2.0]), torch.tensor([3.0]), old_values=torch.tensor([1.0]), cliprange=0.5)
    tensor([2.2500])
    """
    plain, moved = values - returns, values - old_values
    # V_old − R first: at V = 300 a float32 sum with V_old is off by more than 1e-5
    clipped = old_values - returns + moved.clamp(-cliprange, cliprange)
    clipped = torch.where(moved.abs() <= cliprange, plain, clipped)
    return torch.maximum(plain.square(), clipped.square())
