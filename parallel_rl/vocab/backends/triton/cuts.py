"""How the passes over the logits are cut into programs, by card."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Cut(NamedTuple):
    """How a pass is cut for a card: lanes of a tile, warps of a program, and the programs a multiprocessor is to have.

    Where there are fewer rows than `programs` × multiprocessors, a row is split over several programs.
    """

    lanes: int
    warps: int
    programs: int


#: of (pass, compute capability); another card has 9.0's. Four loads of 16 bytes in flight for a thread that reads, two for one
#: that reads and writes. Counted on machine code; `make gpu-check` sweeps them
CUTS = {("stats", (9, 0)): Cut(512, 4, 32), ("gradient", (9, 0)): Cut(512, 8, 32)}
# of a threshold's: more to do for a logit than to load it
CUTS |= {("bins", (9, 0)): Cut(512, 4, 32), ("weigh", (9, 0)): Cut(128, 4, 32), ("held", (9, 0)): Cut(128, 4, 32)}

#: columns of kept logits that share a top: a warp's, of float32 logits, so that they meet without a barrier
PER_TOP = 128


def tops_of(columns: int) -> int:
    """Numbers that a row of so many kept logits is distances from."""
    return -(-columns // PER_TOP)


def cut(name: str, device: torch.device) -> Cut:
    """The cut of pass `name` on a device."""
    card = torch.cuda.get_device_capability(device) if device.type == "cuda" else (9, 0)
    return CUTS.get((name, card), CUTS[name, (9, 0)])


class Tiling(NamedTuple):
    """Division of a row: tiles of `lanes` × `per_lane` columns, `splits` programs of `warps` warps and `columns` columns."""

    lanes: int
    per_lane: int
    columns: int
    splits: int
    warps: int

    def aligns(self, *numbers: int) -> bool:
        """Whether these many columns are whole lanes, which are loaded and stored at once."""
        return all(number % self.per_lane == 0 for number in numbers)

    def aligns_rows(self, *tensors: Tensor | None) -> bool:
        """Whether every row of these begins at 16 bytes, by its stride and by where the first one lies."""
        return all(x is None or (self.aligns(x.stride(0)) and x.data_ptr() % 16 == 0) for x in tensors)


def tiling(tokens: int, width: int, itemsize: int, processors: int, cut: Cut) -> Tiling:
    """Tiles for a shard [tokens, width]; rows are split where there are too few of them to fill the device."""
    per_lane, lanes = 16 // itemsize, cut.lanes
    while lanes > 32 and (lanes // 2) * per_lane >= width:
        lanes //= 2
    block = lanes * per_lane
    blocks = max(1, -(-width // block))
    wanted = -(-cut.programs * processors // max(tokens, 1))
    columns = -(-blocks // min(blocks, max(1, wanted))) * block
    return Tiling(lanes, per_lane, columns, max(1, -(-width // columns)), max(1, min(cut.warps, lanes // 32)))
