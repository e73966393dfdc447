"""Fields and bounds that do not fit a layout are refused, and the message says what does not."""

from __future__ import annotations

import pytest
import torch

from parallel_rl import SequenceLayout
from parallel_rl.validation import validation


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"cp_size": 2, "seq_len": 6}, r"sequence length 6 is not divisible by 4 \(2·cp = 4 chunks of the zigzag"),
        (
            {"cp_size": 2, "cp_layout": "contiguous", "seq_len": 5},
            r"length 5 is not divisible by 2 \(cp = 2 contiguous",
        ),
        ({"cp_layout": "ring"}, "cp_layout = 'ring' is not valid; choose 'zigzag' or 'contiguous'"),
        ({"cp_size": 2, "cp_rank": 2}, r"cp_rank = 2 must lie in \[0, cp_size = 2\)"),
        ({"cp_rank": -1}, r"cp_rank = -1 must lie in \[0, cp_size = 1\)"),
        ({"cp_size": 0}, r"cp_rank = 0 must lie in \[0, cp_size = 0\)"),
    ],
)
def test_padded_rows_that_do_not_fit(arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SequenceLayout.padded(2, **({"seq_len": 8} | arguments))


@pytest.mark.parametrize(
    ("cu", "padded", "arguments", "message"),
    [
        ([0, 4, 4, 3, 8], None, {}, r"cu_seqlens must start at 0 and increase, got \[0, 4, 4, 3, 8\]"),
        ([0, 4, 4, 8], None, {}, "cu_seqlens must start at 0 and increase"),  # no room for a position
        ([1, 4, 8], None, {}, r"cu_seqlens must start at 0 and increase, got \[1, 4, 8\]"),
        ([0, 4, 8], [4, 8, 12], {"total": 12}, r"cu_seqlens_padded must start at 0 and increase, got \[4, 8, 12\]"),
        ([0, 5, 8], [0, 4, 8], {}, r"longer than its padded length: cu_seqlens \[0, 5, 8\], padded \[0, 4, 8\]"),
        ([0, 4, 8], None, {"total": 16}, "cu_seqlens ends at 8; the packed row has 16 positions"),
        ([0, 3, 7], [0, 4, 8], {"total": 12}, "cu_seqlens_padded ends at 8; the packed row has 12 positions"),
        ([0, 6, 8], None, {"cp_size": 2}, r"padded lengths \[6, 2\] are not divisible by 4 \(2·cp = 4 chunks"),
        ([0, 4, 8], [0, 8], {}, "cu_seqlens_padded has 2 bounds, cu_seqlens 3"),
        ([0, 4, 9], None, {"total": 9, "cp_size": 2, "cp_layout": "contiguous"}, "9 positions, .* divisible by cp = 2"),
        ([0], None, {}, r"cu_seqlens must be integers \[B \+ 1\] with B ≥ 1, got torch.int64 \[1\]"),
        ([[0, 8]], None, {}, r"cu_seqlens must be integers \[B \+ 1\] .* got torch.int64 \[1, 2\]"),
        ([0.0, 8.0], None, {}, r"cu_seqlens must be integers .* got torch.float32 \[2\]"),
        ([0, 8], [0.0, 8.0], {}, "cu_seqlens_padded must be integers"),
        ([0, 8], None, {"cp_layout": "ring"}, "cp_layout = 'ring' is not valid"),
        ([0, 8], None, {"cp_size": 2, "cp_rank": 5}, "cp_rank = 5 must lie in"),
    ],
)
def test_packed_rows_that_do_not_fit(cu: list, padded: list | None, arguments: dict, message: str) -> None:
    bounds = None if padded is None else torch.tensor(padded)
    with pytest.raises(ValueError, match=message):
        SequenceLayout.packed(torch.tensor(cu), bounds, **({"seq_len": 8, "total": 8} | arguments))


def test_bounds_are_not_looked_at_where_validation_is_off() -> None:
    with validation("never"):
        SequenceLayout.packed(torch.tensor([0, 4, 8]), seq_len=8, total=16)
        with pytest.raises(ValueError, match="must be integers"):
            SequenceLayout.packed(torch.tensor([0.0, 8.0]), seq_len=8, total=8)


def test_a_field_of_another_shape() -> None:
    layout = SequenceLayout.padded(2, 8)
    with pytest.raises(ValueError, match=r"the field has shape \[2, 7\]; the layout has \[B, S\] = \[2, 8\]"):
        layout.shard(torch.zeros(2, 7))


def test_a_tail_that_does_not_fit() -> None:
    for tail in (4, -8):
        with pytest.raises(
            ValueError, match=f"cu_seqlens ends at 8; the packed row has 16 positions .* {tail} of them in its tail"
        ):
            SequenceLayout.packed(torch.tensor([0, 4, 8]), seq_len=8, total=16, tail=tail)
    with pytest.raises(ValueError, match="tail= says how many of them belong to no sequence"):
        SequenceLayout.packed(torch.tensor([0, 4, 8]), seq_len=8, total=16)
