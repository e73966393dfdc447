"""Global valid counts of any masks, and the token weights that divide by them."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from parallel_rl import ValidCounts, count_valid
from parallel_rl.counts import token_weights
from parallel_rl.layout import valid_tokens
from parallel_rl.validation import validation
from tests.watch import Operators


def masks(rows: list[list[int]], sample: list[int], dtype: torch.dtype = torch.int64) -> dict[str, Tensor]:
    return {"token_mask": torch.tensor(rows, dtype=dtype), "sample_mask": torch.tensor(sample, dtype=dtype)}


def counted(batches: list[dict[str, Tensor]]) -> tuple[int, int]:
    seqs = toks = 0
    for data in batches:
        for row, sample in zip(data["token_mask"].tolist(), data["sample_mask"].tolist(), strict=True):
            seqs += bool(sample)
            toks += sum(bool(t) for t in row[1:]) if sample else 0
    return max(seqs, 1), max(toks, 1)


FIRST = masks([[1, 1, 0, 1], [1, 0, 0, 0], [1, 1, 1, 1]], [1, 1, 0])  # a row with column 0 only, a masked row
SECOND = masks([[0, 1, 1, 1]], [1])
EMPTY = masks([[1, 1, 1, 1]], [0])


@pytest.mark.parametrize("dtype", [torch.int64, torch.float32, torch.bool])
def test_what_is_counted(dtype: torch.dtype) -> None:
    data = {name: value.to(dtype) for name, value in FIRST.items()}
    counts = count_valid(data)
    assert (counts.seqs.item(), counts.toks.item()) == (2, 2)
    assert counts.seqs.dtype == counts.toks.dtype == torch.int64 and counts.seqs.dim() == counts.toks.dim() == 0
    assert valid_tokens(data).tolist() == [
        [False, True, False, True],
        [False, False, False, False],
        [False, False, False, False],
    ]


def test_micro_batches_add_up_and_nothing_counts_as_one() -> None:
    assert tuple(map(int, count_valid([FIRST, SECOND, EMPTY]))) == (3, 5) == counted([FIRST, SECOND, EMPTY])
    assert tuple(map(int, count_valid(EMPTY))) == (1, 1)
    assert tuple(map(int, count_valid([]))) == (1, 1)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.lists(st.integers(0, 1), min_size=5, max_size=5), st.integers(0, 1)), min_size=1))
def test_any_masks(rows: list[tuple[list[int], int]]) -> None:
    batches = [masks([row], [sample]) for row, sample in rows]
    together = masks([row for row, _ in rows], [sample for _, sample in rows])
    assert tuple(map(int, count_valid(batches))) == tuple(map(int, count_valid(together))) == counted(batches)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"sample_mask": torch.ones(2)}, "data lacks the field 'token_mask'"),
        ({"token_mask": torch.ones(2, 3)}, "data lacks the field 'sample_mask'"),
        (
            {"token_mask": torch.ones(6), "sample_mask": torch.ones(2)},
            r"token_mask must be a tensor \[B, S\], got \[6\]",
        ),
        ({"token_mask": torch.ones(2, 3), "sample_mask": [1, 1]}, r"sample_mask must be a tensor \[B\], got list"),
        ({"token_mask": torch.ones(2, 3), "sample_mask": torch.ones(3)}, "sample_mask has 3 rows, token_mask 2"),
    ],
)
def test_masks_that_do_not_fit(data: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        count_valid([SECOND, data])


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("sample_mask", 0.5, r"sample_mask = 0.5 at \[1\] must be 0 or 1; weights of tokens or samples belong in"),
        ("token_mask", 2.0, r"token_mask = 2 at \[1, 0\] must be 0 or 1"),
        ("sample_mask", math.nan, r"sample_mask = nan at \[1\] must be 0 or 1"),
    ],
)
def test_masks_that_are_weights(name: str, value: float, message: str) -> None:
    """A multiplier of samples, as NeMo-RL's sample_mask is, counted as 1 and weighed as 1, without a word."""
    data = masks([[1, 1, 0], [1, 1, 1]], [1, 1], torch.float32)
    data[name][1] = value
    with pytest.raises(ValueError, match=message):
        count_valid([SECOND, data])
    with validation("never"):
        assert count_valid(data).seqs == 2


def test_masks_on_a_device_are_looked_at_without_a_sync() -> None:
    """One more number of the one all-reduce, which an assertion on the device reads."""
    meta = {name: value.to("meta") for name, value in masks([[1, 1]], [1]).items()}
    for mode, asserts in (("auto", 1), ("never", 0)):
        with validation(mode), Operators() as seen:  # type: ignore[arg-type]
            count_valid(meta)
        assert sum("_assert_async" in name for name in seen.names) == asserts
        assert not any("_local_scalar_dense" in name for name in seen.names)


# Weights.

N_I = [3, 0, 5]
COUNTS = ValidCounts(torch.tensor(4), torch.tensor(20))


@pytest.mark.parametrize(
    ("mode", "max_length", "want"),
    [
        ("token-mean", None, [1 / 20 for _ in N_I]),
        ("seq-mean-token-mean", None, [1 / (4 * n) if n else 1 / 4 for n in N_I]),
        ("seq-mean-token-sum", None, [1 / 4 for _ in N_I]),
        ("constant-length", 50, [1 / (4 * 50) for _ in N_I]),
    ],
)
def test_token_weights(mode: str, max_length: int | None, want: list[float]) -> None:
    weights = token_weights(mode, torch.tensor(N_I), COUNTS, max_length)  # type: ignore[arg-type]
    assert weights.dtype == torch.float64
    assert weights.tolist() == pytest.approx(want, rel=1e-15)


def test_aggregations_that_do_not_exist() -> None:
    with pytest.raises(ValueError, match=r"aggregation = 'mean' is not valid; choose token-mean, seq-mean-token-mean"):
        token_weights("mean", torch.tensor(N_I), COUNTS)  # type: ignore[arg-type]
    for length in (None, 0):
        with pytest.raises(ValueError, match=f"max_length = {length} must be a positive number of tokens"):
            token_weights("constant-length", torch.tensor(N_I), COUNTS, length)
