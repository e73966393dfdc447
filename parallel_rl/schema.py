"""Numbers by name, gathered from all ranks; ranks without numbers do not know the names."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple
from zlib import crc32

import torch
from torch.nn.functional import pad

from parallel_rl.groups import all_gather
from parallel_rl.validation import checks_values

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup

_WORDS = 512  # of the first collective: 4 KiB take no longer than the numbers alone
_HEAD = 3  # K, words of the names, their checksum


class Gathered(NamedTuple):
    """The numbers of all ranks of a group.

    Attributes:
        names: K of them, the same on every rank.
        rows: [ranks, K] float64, 0 on a rank without numbers. there: [ranks] bool, which ranks have numbers.
    """

    names: list[str]
    rows: Tensor
    there: Tensor


def gather_named(names: Sequence[str], values: Tensor, group: ProcessGroup | None) -> Gathered:
    """Gather K named numbers from the ranks that have them, to all ranks of `group`.

    One all-gather of 4 KiB, and a second one for longer data. The host waits only on a rank without numbers, for their names.

    >>> gather_named(["a", "b"], torch.tensor([1.0, 2.0], dtype=torch.float64), None)
    Gathered(names=['a', 'b'], rows=tensor([[1., 2.]], dtype=torch.float64), there=tensor([True]))

    Args:
        names, values: of this rank, [K] float64 on a device that the group takes; both empty where it has none.

    Raises:
        ValueError: ranks with different names, on all ranks where values are checked.
    """
    head = _head(tuple(names), values.device)
    mine = torch.cat([head, values.contiguous().view(torch.int64)])
    rows = all_gather(pad(mine, (0, max(0, _WORDS - len(mine))))[:_WORDS], group)
    number, words = len(names), len(head) - _HEAD
    if not names or checks_values(rows):
        heads = rows[:, :_HEAD].tolist()
        number, words = _agreed(heads, rows)
    total = _HEAD + words + number
    if total > _WORDS:
        rest = pad(mine, (0, max(0, total - len(mine))))[_WORDS:total]
        rows = torch.cat([rows, all_gather(rest, group)], 1)
    if not names and number:
        first = next(rank for rank, [k, *_] in enumerate(heads) if k)
        names = _names(rows[first, _HEAD : _HEAD + words])
    return Gathered(list(names), rows[:, total - number : total].view(torch.float64), rows[:, 0] > 0)


def _agreed(heads: list[list[int]], rows: Tensor) -> tuple[int, int]:
    """K and the number of words of the names, 0 where no rank has any."""
    different = {tuple(head): rank for rank, head in reversed([*enumerate(heads)]) if head[0]}
    if len(different) > 1:
        first, other = sorted(different.values())[:2]
        here, there = (_names(rows[rank, _HEAD : min(_HEAD + heads[rank][1], _WORDS)]) for rank in (first, other))
        apart = [sorted(set(a) - set(b)) for a, b in ((here, there), (there, here))]
        raise ValueError(
            f"ranks report different numbers: rank {first} of the group alone {apart[0]}, rank {other} alone {apart[1]}"
        )
    return next(((number, words) for number, words, _ in different), (0, 0))


@lru_cache(maxsize=64)
def _head(names: tuple[str, ...], device: torch.device) -> Tensor:
    """[3 + words] int64; made once, since a copy to a device waits for what runs there."""
    text = "\n".join(names).encode()
    text += b"\n" * (-len(text) % 8)
    words = [int.from_bytes(text[i : i + 8], "little", signed=True) for i in range(0, len(text), 8)]
    return torch.tensor([len(names), len(words), crc32(text), *words], device=device)


def _names(words: Tensor) -> list[str]:
    text = b"".join(word.to_bytes(8, "little", signed=True) for word in words.tolist())
    return text.decode(errors="replace").rstrip("\n").split("\n")
