"""Losses of preference pairs, one number a pair."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import logsigmoid


def bradley_terry(chosen: Tensor, rejected: Tensor, beta: float = 1.0) -> Tensor:
    """−log σ(β·(r_chosen − r_rejected)), [P] from two [P]. Paper: Bradley & Terry 1952; DPO arXiv 2305.18290."""
    return -logsigmoid(beta * (chosen - rejected))
