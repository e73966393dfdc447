"""Which tokens are the uncertain ones."""

from __future__ import annotations

import torch
from torch import Tensor


def highest_per_row(scores: Tensor, counts: Tensor) -> Tensor:
    """[N, S] bool: each row's `counts[i]` largest scores; of equal ones the first."""
    order = scores.argsort(dim=1, descending=True, stable=True)
    rank = torch.empty_like(order).scatter_(
        1, order, torch.arange(scores.shape[1], device=scores.device).expand_as(order)
    )
    return rank < counts[:, None]
