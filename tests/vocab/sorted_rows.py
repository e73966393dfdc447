"""Which words top-k and top-p keep, by sorting whole rows in float64."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def kept_by_sorting(
    z: Tensor, top_k: int | None = None, top_p: float | None = None, temperature: float = 1.0
) -> Tensor:
    """[T, V] bool: row by row over sorted values; a word stays where all larger ones, of those that top-k left, hold < p."""
    keep = torch.zeros_like(z, dtype=torch.bool)
    for row, mine in zip(z.double(), keep, strict=True):
        falling = row.sort(descending=True).values.tolist()
        if top_k is not None:
            falling = [x for x in falling if x >= falling[top_k - 1]]
        masses = [math.exp((x - falling[0]) / temperature) if x > -math.inf else 0.0 for x in falling]
        last, total = falling[0], math.fsum(masses)
        for i, x in enumerate(falling):
            above = math.fsum(masses[: next(j for j in range(i + 1) if falling[j] == x)])
            if top_p is None or above / total < top_p:
                last = x
        mine |= row >= last
    return keep
