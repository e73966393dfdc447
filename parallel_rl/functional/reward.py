"""Losses of reward models: pairs of scores, and classes at the steps of a process reward model."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid


def log_sigmoid(chosen: Tensor, rejected: Tensor, margin: Tensor | float = 0.0) -> Tensor:
    """Compute Bradley-Terry with margin m: −log σ(r_w − r_l − m), [n]; m is a number or [n].

    Papers: Bradley & Terry 1952; arXiv 2203.02155; margins: arXiv 2307.09288.

    >>> log_sigmoid(torch.tensor([1.0, 1.0]), torch.tensor([1.0, 0.0]), margin=torch.tensor([0.0, 1.0]))
    tensor([0.6931, 0.6931])
    """
    return -logsigmoid(chosen - rejected - margin)


def log_exp(chosen: Tensor, rejected: Tensor) -> Tensor:
    """Compute log(1 + e^{r_l − r_w}), [n]: `log_sigmoid` without margin, as in arXiv 2204.05862.

    >>> log_exp(torch.tensor([1.0, 3.0]), torch.tensor([1.0, 0.0]))
    tensor([0.6931, 0.0486])
    """
    return -logsigmoid(chosen - rejected)


def hps(chosen: Tensor, rejected: Tensor, temperature: float = 1.0) -> Tensor:
    """Compute the human preference score, cross-entropy of softmax((r_w, r_l)/T) with the first, [n].

    It is `log_sigmoid` of r/T without a margin. Paper: arXiv 2303.14420.

    >>> hps(torch.tensor([1.0, 3.0]), torch.tensor([1.0, 0.0]), temperature=2.0)
    tensor([0.6931, 0.2014])
    """
    return -logsigmoid((chosen - rejected) / temperature)


def cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    """Compute −Σ_k q_k·log softmax(z)_k, [n], from logits and target probabilities [n, K].

    >>> cross_entropy(torch.zeros(1, 2), torch.tensor([[1.0, 0.0]]))
    tensor([0.6931])
    """
    return -torch.where(target == 0, 0, target * logits.log_softmax(-1)).sum(-1)
