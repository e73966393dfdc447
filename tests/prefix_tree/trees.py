"""Random sequences that share prefixes."""

from __future__ import annotations

import random

import torch
from torch import Tensor

PAD = 0


def random_sequences(seed: int, *, count: int = 8, longest: int = 12, vocabulary: int = 16) -> list[list[int]]:
    """Sequences of two trees: depth of three and more, one inside another, two equal ones, a branch of one token."""
    rng = random.Random(seed)

    def tokens(least: int, most: int) -> list[int]:
        return [rng.randrange(1, vocabulary) for _ in range(rng.randint(least, most))]

    rows = []
    for root in (1, 2):
        trunk = [root, *tokens(1, 3)]
        for _ in range(2):
            branch = trunk + tokens(1, 3)
            rows += [branch + tokens(1, longest - len(branch)) for _ in range(2)]
    rows = rows[: count - 3]
    rows.append(list(rows[0]))  # an equal one
    rows.append(rows[1][:-1] or rows[1])  # one that ends inside
    rows.append([*rows[2][:2], vocabulary - 1])  # a branch of one token
    rng.shuffle(rows)
    return rows


def padded(rows: list[list[int]], width: int | None = None) -> tuple[Tensor, Tensor]:
    """Ids [B, S] and lengths [B]."""
    width = width or max(map(len, rows))
    ids = torch.full((len(rows), width), PAD)
    for place, row in enumerate(rows):
        ids[place, : len(row)] = torch.tensor(row)
    return ids, torch.tensor([len(row) for row in rows])
