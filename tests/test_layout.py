"""`SequenceLayout` against positions cut with Python lists, in one process and over real context ranks."""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from parallel_rl import SequenceLayout
from parallel_rl.testing.pool import preload, run_world
from parallel_rl.validation import validation

preload("tests.test_layout")

CPLayout = Literal["zigzag", "contiguous"]


class Row(NamedTuple):
    """True lengths, the room of each sequence in the packed row, and the width S of the data; room None: padded rows."""

    lengths: list[int]
    room: list[int] | None
    width: int

    def layout(self, cp: int, rank: int, cp_layout: CPLayout) -> SequenceLayout:
        place = {"cp_size": cp, "cp_rank": rank, "cp_layout": cp_layout}
        if self.room is None:
            return SequenceLayout.padded(len(self.lengths), self.width, **place)  # type: ignore[arg-type]
        true, padded = (torch.tensor([0, *sizes]).cumsum(0).to(torch.int32) for sizes in (self.lengths, self.room))
        total = sum(self.room)
        same = self.room == self.lengths
        return SequenceLayout.packed(true, None if same else padded, seq_len=self.width, total=total, **place)  # type: ignore[arg-type]

    def places(self, cp: int, rank: int, cp_layout: CPLayout) -> list[tuple[int, int]]:
        """(sequence, position) of each local position, by cutting lists."""
        room = self.room or [self.width] * len(self.lengths)
        whole = [[(i, t) for t in range(size)] for i, size in enumerate(room)]
        if self.room is not None and cp_layout == "contiguous":
            whole = [[place for sequence in whole for place in sequence]]
        return [place for piece in whole for place in cut(piece, cp, rank, cp_layout)]

    def sharded(
        self, field: Tensor, places: list[tuple[int, int]], shift: bool, fill: float
    ) -> list[float | int | bool]:
        ends = [min(length, self.width) for length in self.lengths]
        return [field[i, t + shift].item() if t + shift < ends[i] else fill for i, t in places]


def cut(piece: list, cp: int, rank: int, cp_layout: CPLayout) -> list:
    """This rank's part of a list: one of cp parts, or chunks r and 2·cp − 1 − r of 2·cp."""
    if cp == 1:
        return piece
    parts = 2 * cp if cp_layout == "zigzag" else cp
    size = len(piece) // parts
    chunks = [piece[k * size : (k + 1) * size] for k in range(parts)]
    return chunks[rank] + chunks[-1 - rank] if cp_layout == "zigzag" else chunks[rank]


ROWS = {
    "padded": Row([16, 16, 16], None, 16),
    "packed": Row([8, 16, 24], [8, 16, 24], 24),
    "packed with padding": Row([5, 8, 1, 13], [8, 8, 8, 16], 13),
    "the last sequence holds the alignment": Row([5, 3], [8, 32], 8),
    "the last sequence is longer than the data": Row([8, 24], [8, 24], 11),
    "an empty sequence": Row([4, 0, 6], [8, 8, 8], 9),
}
UNEVEN = Row([3, 5, 1, 7], [3, 5, 1, 7], 7)  # contiguous parts cut through sequences
CUTS: list[tuple[str, Row, CPLayout]] = [
    (name, row, cp_layout) for name, row in ROWS.items() for cp_layout in ("zigzag", "contiguous")
] + [("uneven", UNEVEN, "contiguous"), ("unpadded", Row([5, 2, 9], [5, 2, 9], 9), "contiguous")]
FIELDS = {
    "float": lambda shape, g: torch.randn(shape, generator=g, dtype=torch.float64),
    "int": lambda shape, g: torch.randint(1, 99, shape, generator=g),
    "bool": lambda shape, g: torch.rand(shape, generator=g) < 0.5,
}


def random_field(row: Row, kind: str = "float", seed: int = 0) -> Tensor:
    return FIELDS[kind]((len(row.lengths), row.width), torch.Generator().manual_seed(seed))


@pytest.mark.slow
@pytest.mark.parametrize("cp", [1, 2, 4])
@pytest.mark.parametrize(("name", "row", "cp_layout"), CUTS, ids=lambda value: str(value) if len(value) < 50 else "row")
def test_positions_are_those_of_cut_lists(name: str, row: Row, cp_layout: CPLayout, cp: int) -> None:
    seen = []
    for rank in range(cp):
        layout, places = row.layout(cp, rank, cp_layout), row.places(cp, rank, cp_layout)
        assert list(zip(layout.sequence_ids.tolist(), layout.positions.tolist(), strict=True)) == places
        lead = (len(row.lengths), row.width // cp) if row.room is None else (1, sum(row.room) // cp)
        assert layout.local_shape == lead and math.prod(lead) == len(places)
        assert layout.shape == (len(row.lengths), row.width) and layout.cp_size == cp
        assert layout.lengths.tolist() == row.lengths
        counts = [sum(i == sequence for sequence, _ in places) for i in range(len(row.lengths))]
        assert layout.offsets.tolist() == [sum(counts[:i]) for i in range(len(counts) + 1)]
        seen += places
    assert sorted(seen) == sorted(row.places(1, 0, cp_layout))  # every position on one rank, none on two


@pytest.mark.parametrize("shift", [True, False])
@pytest.mark.parametrize(("kind", "fill"), [("float", -1.5), ("int", -7), ("bool", False)])
def test_shard_takes_what_stands_there_or_the_fill(kind: str, fill: float, shift: bool) -> None:
    for _, row, cp_layout in CUTS:
        field = random_field(row, kind)
        for cp in (1, 2, 4):
            for rank in range(cp):
                got = row.layout(cp, rank, cp_layout).shard(field, shift=shift, fill=fill)
                assert got.dtype == field.dtype
                assert got.tolist() == row.sharded(field, row.places(cp, rank, cp_layout), shift, fill)


def test_the_fill_hides_nan_and_stops_the_gradient() -> None:
    row = ROWS["packed with padding"]
    field = random_field(row)
    for i, length in enumerate(row.lengths):
        field[i, length:] = math.nan
    field[:, 0] = math.nan
    field.requires_grad_()
    local = row.layout(2, 1, "zigzag").shard(field)
    assert not local.isnan().any()
    local.sum().backward()
    taken = torch.zeros_like(field)
    for i, t in row.places(2, 1, "zigzag"):
        if t + 1 < row.lengths[i]:
            taken[i, t + 1] = 1
    assert_close(field.grad, taken, rtol=0, atol=0)


lengths_and_room = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 2)), min_size=1, max_size=6)


@settings(max_examples=60, deadline=None)
@given(
    sizes=lengths_and_room,
    cp=st.sampled_from([1, 2, 3, 4]),
    cp_layout=st.sampled_from(["zigzag", "contiguous"]),
    shift=st.booleans(),
    extra=st.integers(-3, 3),
)
def test_any_lengths(sizes: list[tuple[int, int]], cp: int, cp_layout: CPLayout, shift: bool, extra: int) -> None:
    """Cutting is that of lists, the ranks' parts put together are the whole, and local sums add up to the dense ones."""
    parts = 2 * cp
    lengths = [length for length, _ in sizes]
    room = [max(-(-length // parts) * parts, parts) + more * parts for length, more in sizes]
    row = Row(lengths, room, max(max(lengths) + extra, 1))
    field = random_field(row, seed=len(sizes))
    whole, sums = torch.zeros_like(field), torch.zeros(len(lengths), dtype=torch.float64)
    for rank in range(cp):
        layout, places = row.layout(cp, rank, cp_layout), row.places(cp, rank, cp_layout)
        assert list(zip(layout.sequence_ids.tolist(), layout.positions.tolist(), strict=True)) == places
        local = layout.shard(field, shift=shift)
        whole += layout.unshard(local, shift=shift)
        sums += layout.segment_sum(local)
        assert layout.expand(torch.arange(len(lengths))).tolist() == [i for i, _ in places]
    column = torch.arange(row.width)
    there = (column < torch.tensor(lengths)[:, None]) & (column >= shift)
    dense = torch.where(there, field, 0)
    assert torch.equal(whole, dense)
    assert_close(sums, dense.sum(1), rtol=1e-12, atol=1e-12)


def test_sums_and_expansion_have_each_others_gradient() -> None:
    layout = ROWS["an empty sequence"].layout(2, 1, "zigzag")
    g = torch.Generator().manual_seed(1)
    tokens = torch.randn(layout.sequence_ids.numel(), generator=g, dtype=torch.float64, requires_grad=True)
    sequences = torch.randn(3, generator=g, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(layout.segment_sum, tokens)
    assert torch.autograd.gradcheck(layout.expand, sequences)
    assert torch.autograd.gradgradcheck(layout.segment_sum, tokens)

    def both(x: Tensor, s: Tensor) -> Tensor:
        return layout.expand(layout.segment_sum(x * layout.expand(s)).square())

    assert torch.autograd.gradcheck(both, (tokens, sequences))


def test_sums_of_low_precision_run_in_float64_and_repeat_their_bits() -> None:
    row = Row([4096, 3000], [4096, 4096], 4096)
    layout = row.layout(1, 0, "zigzag")
    x = random_field(row).flatten().float() * 1e3
    first = layout.segment_sum(x)
    assert first.dtype == torch.float32
    assert torch.equal(first, x.double().view(2, -1).sum(1).float())
    assert all(torch.equal(layout.segment_sum(x), first) for _ in range(5))
    grads = []
    for _ in range(3):
        leaf = torch.zeros(2, requires_grad=True)
        grads.append(torch.autograd.grad((layout.expand(leaf) * x).sum(), leaf)[0])
    assert torch.equal(grads[0], grads[1]) and torch.equal(grads[0], grads[2])


# Over real context ranks.


def token_term(x: Tensor, s: Tensor, w: Tensor) -> Tensor:
    """A term of a token that uses its sequence's sum."""
    return (s / 9).sin() * x.exp() * w


def over_context(rank: int, cp: int) -> list[tuple[Tensor, Tensor, Tensor, Tensor, float]]:
    """For each cut: what was put together (shifted and not), the sums, this rank's share of a loss and its gradient."""
    results = []
    for _, row, cp_layout in CUTS:
        layout, group = row.layout(cp, rank, cp_layout), dist.group.WORLD
        field, weight = random_field(row).requires_grad_(), random_field(row, seed=2)
        x, w = layout.shard(field), layout.shard(weight)
        sums = layout.segment_sum(x, group)
        loss = token_term(x, layout.expand(sums), w).sum() + sums.square().sum() / cp
        loss.backward()
        with torch.no_grad():
            whole = layout.unshard(x, group)
            unshifted = layout.unshard(layout.shard(field, shift=False), group, shift=False)
        assert field.grad is not None
        results.append((whole, unshifted, sums.detach(), field.grad, loss.item()))
    return results


def dense(row: Row) -> tuple[Tensor, Tensor, Tensor, Tensor, float]:
    field, weight = random_field(row).requires_grad_(), random_field(row, seed=2)
    inside = torch.arange(row.width) < torch.tensor(row.lengths)[:, None]
    shifted = inside & (torch.arange(row.width) > 0)
    x = torch.where(shifted, field, 0)
    sums = x.sum(1)
    term = token_term(x, sums[:, None].expand_as(x), torch.where(shifted, weight, 0))
    loss = term.sum() + sums.square().sum()
    loss.backward()
    assert field.grad is not None
    return x.detach(), torch.where(inside, field.detach(), 0), sums.detach(), field.grad, loss.item()


@pytest.mark.parametrize("cp", [2, 4])
def test_over_context_ranks(cp: int) -> None:
    per_rank = run_world(cp, over_context, cp, timeout=60)
    for k, (name, row, cp_layout) in enumerate(CUTS):
        whole, unshifted, sums, gradient, loss = dense(row)
        mine = [results[k] for results in per_rank]
        for got in mine:
            assert torch.equal(got[0], whole) and torch.equal(got[1], unshifted), f"{name} {cp_layout}"
            assert torch.equal(got[2], mine[0][2]), "ranks hold different bits of a sum"
            assert_close(got[2], sums, rtol=1e-12, atol=1e-12)
        assert_close(sum(got[3] for got in mine), gradient, rtol=1e-11, atol=1e-12)
        assert sum(got[4] for got in mine) == pytest.approx(loss, rel=1e-12)


@pytest.mark.parametrize("cp_layout", ["zigzag", "contiguous"])
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("declared", [True, False])
def test_a_tail_belongs_to_no_sequence(cp_layout: CPLayout, rank: int, declared: bool) -> None:
    """The alignment padding that slime and Megatron's packers make a segment of its own; zigzag cuts it as one.

    Where bounds are not looked at, an undeclared one once gave context rank 1 a second copy of the last sequence's tokens.
    """
    place: dict = {"seq_len": 8, "total": 24, "cp_size": 2, "cp_rank": rank, "cp_layout": cp_layout}
    with validation("auto" if declared else "never"):
        layout = SequenceLayout.packed(torch.tensor([0, 8, 16]), tail=8 if declared else 0, **place)
    third = SequenceLayout.packed(torch.tensor([0, 8, 16, 24]), **place)
    field = torch.arange(1.0, 17.0).view(2, 8)
    padding = torch.cat([field, torch.zeros(1, 8)])
    for shift in (True, False):
        assert_close(layout.shard(field, shift), third.shard(padding, shift))
    ones = layout.held[1].double()
    assert_close(layout.segment_sum(ones), third.segment_sum(third.held[1].double() * (third.sequence_ids < 2))[:2])
    assert layout.held[1].sum() == (8 if cp_layout == "zigzag" else (12, 4)[rank])
