"""Selection of the most uncertain tokens."""

from __future__ import annotations

import torch
from torch import Tensor


def highest_per_row(scores: Tensor, counts: Tensor) -> Tensor:
    """Mark each row's `counts[i]` largest scores, [N, S] bool from [N, S] and [N]; ties go to the first.

    >>> highest_per_row(torch.tensor([[3.0, 1.0, 2.0]]), torch.tensor([2]))
    tensor([[ True, False,  True]])
    """
    order = scores.argsort(dim=1, descending=True, stable=True)
    rank = torch.empty_like(order).scatter_(
        1, order, torch.arange(scores.shape[1], device=scores.device).expand_as(order)
    )
    return rank < counts[:, None]
