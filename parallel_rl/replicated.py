"""Fields and numbers that ranks must hold alike, compared by one checksum; errors name the field that differs."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import isclose
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor
    from typing_extensions import Buffer

_MASKS = ("token_mask", "sample_mask")
_CLOSE = 1e-3  # relative; GPUs may differ in a field's last bits
_TINY = 1e-6
_PERIOD = 997  # prime period of the positions' weights: swapped or moved rows differ
_LARGE = 1e4  # in place of an infinite value
_ROWS, _COLUMNS = 4, 1024  # compared part of a shard
#: for the tensor group and the context group
_ADVICE = (
    "tensor ranks compute one loss: give all of them the same data and counts",
    "context ranks share rows: give each of them the same whole data and counts; the loss cuts the rows",
)

Sums = Mapping[str, float]  # an int is compared exactly


@dataclass(frozen=True, eq=False)
class Replicated:
    """Data that the ranks of each group of an agreement must hold alike, see `raise_on_all_ranks`.

    >>> Replicated([{"input_ids": torch.tensor([[1, 2]])}], ["input_ids"]).checksum()
    16178617

    Attributes:
        batches: micro-batches; only tensors are compared.
        names: fields that are compared; masked places may differ, and floats by rounding.
        numbers: numbers that are compared, by name.
        whole: names of integer fields whose masked places count too.
        advice: the end of the message for each group of the agreement.
        shards: this rank's columns of logits [..., V/tp], which must differ within the first group.
    """

    batches: Sequence[Mapping[str, object]] = ()
    names: Sequence[str] = ()
    numbers: Mapping[str, float] = field(default_factory=dict)
    whole: Sequence[str] = ()
    advice: Sequence[str] = _ADVICE
    shards: Tensor | None = None

    def checksum(self) -> int:
        """Compute the CRC-32 of the bytes of all numbers and fields."""
        crc = zlib.crc32(repr(sorted(self.numbers.items())).encode()) if self.numbers else 0
        for data in self.batches:
            for name in self.names:
                values = data.get(name)
                if type(values) is torch.Tensor:
                    crc = zlib.crc32(_bytes(values), crc)
        return crc

    def shard_checksum(self) -> int:
        """Compute the CRC-32 of a few rows of the shard; 0 if it is missing, constant or not finite."""
        if self.shards is None or self.shards.dim() < 2 or not self.shards.numel():
            return 0
        rows = self.shards.detach().flatten(0, -2)
        few = rows[:: max(1, len(rows) // _ROWS), :_COLUMNS]
        speaks = bool(few.isfinite().all()) and not bool((few == few[:, :1]).all())
        return zlib.crc32(_bytes(few)) if speaks else 0

    def sums(self) -> dict[str, float]:
        """Sum each number and field; equal (floats: close) if all valid places agree."""
        sums = dict(self.numbers)
        for index, data in enumerate(self.batches):
            place = f" of micro-batch {index}" if len(self.batches) > 1 else ""
            valid = _valid(*(data.get(name) for name in _MASKS))
            for name in self.names:
                values = data.get(name)
                if type(values) is torch.Tensor:
                    values = values.detach().cpu().bool() if name in _MASKS else values.detach().cpu()
                    sums[f"{name}{place}"] = _sum(values, None if name in self.whole else valid)
        return sums

    def difference(self, of_ranks: Sequence[Sums], ranks: Sequence[int], group: int) -> str:
        """Name the first number or field in which ranks of the group differ; "" if none does."""
        for name in of_ranks[0]:
            for (one, mine), (other, theirs) in pairwise(zip(ranks, of_ranks, strict=True)):
                if name not in mine or name not in theirs:
                    continue
                a, b = mine[name], theirs[name]
                exact = name in self.numbers or isinstance(a, int) or isinstance(b, int)
                if a != b and (exact or not isclose(a, b, rel_tol=_CLOSE, abs_tol=_TINY)):
                    values = f": {a:g} and {b:g}" if name in self.numbers else ""
                    return f"{name} differs between rank {one} and rank {other}{values}; {self.advice[group]}"
        return ""


def _bytes(x: Tensor) -> Buffer:
    return x.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()  # type: ignore[return-value]


def _valid(token_mask: object, sample_mask: object) -> tuple[Tensor, Tensor] | None:
    """([B, S], [B]) bool: valid tokens and rows; None without masks of these shapes."""
    if not isinstance(token_mask, torch.Tensor) or not isinstance(sample_mask, torch.Tensor):
        return None
    if token_mask.dim() != 2 or sample_mask.shape != token_mask.shape[:1]:
        return None
    rows = sample_mask.detach().cpu() > 0
    return (token_mask.detach().cpu() > 0) & rows[:, None], rows


def _sum(x: Tensor, valid: tuple[Tensor, Tensor] | None) -> float:
    """Σ of floats at valid places, weighted by position; of integers a checksum."""
    if valid is not None:
        mask = valid[0] if x.dim() > 1 else valid[1]
        if mask.shape == x.shape[: mask.dim()]:
            x = torch.where(mask.view(*mask.shape, *[1] * (x.dim() - mask.dim())), x, torch.zeros((), dtype=x.dtype))
    if not x.is_floating_point():
        return zlib.crc32(_bytes(x.to(torch.int64)))
    flat = x.reshape(-1).double().nan_to_num(0.0, _LARGE, -_LARGE)
    return float(flat.dot((torch.arange(len(flat)) % _PERIOD + 1).double() / _PERIOD))
