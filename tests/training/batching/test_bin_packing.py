"""Every sequence is in one micro-batch of one data rank, none is too full, and what belongs together stays together."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from parallel_rl.experience import Samples
from parallel_rl.testing.pool import WorldError, run_world
from parallel_rl.training.batching.bin_packing import Capacity, deal, first_fit_decreasing, pack
from parallel_rl.training.config.load import load_config
from parallel_rl.training.config.sections import BatchConfig
from tests.training.helpers import DATA, run, train_rows

SIZES = [(1, 1), (2, 1), (1, 2), (2, 2), (4, 2), (8, 8)]  # tensor, context


@st.composite
def steps(draw: st.DrawFn) -> tuple[list[int], Capacity, int]:
    """Lengths that fit, a capacity, and how many stay together."""
    tensor, context = draw(st.sampled_from(SIZES))
    together = draw(st.integers(1, 3))
    longest = draw(st.integers(1, 300))
    lengths = draw(st.lists(st.integers(1, longest), max_size=60))
    lengths = lengths[: len(lengths) // together * together]
    least = Capacity.of_layout(10**6, tensor=tensor, context=context).padded(longest) * together
    unit = 2 * context * tensor
    tokens = -(-least // unit) * unit + draw(st.integers(0, 500))
    return lengths, Capacity.of_layout(tokens, tensor=tensor, context=context), together


def first_fit(sizes: list[int], capacity: int) -> list[list[int]]:
    """The textbook's loop."""
    bins: list[list[int]] = []
    for place in sorted(range(len(sizes)), key=lambda place: -sizes[place]):
        fits = (b for b in bins if sum(sizes[other] for other in b) + sizes[place] <= capacity)
        found = next(fits, None)
        if found is None:
            bins.append([place])
        else:
            found.append(place)
    return [sorted(places) for places in bins]


@settings(deadline=None)
@given(steps())
def test_every_unit_is_packed_once_and_no_row_is_too_long(step: tuple[list[int], Capacity, int]) -> None:
    lengths, capacity, together = step
    bins = pack(lengths, capacity, together)
    assert sorted(place for places in bins for place in places) == list(range(len(lengths)))
    for places in bins:
        units = [places[first : first + together] for first in range(0, len(places), together)]
        assert all(unit == list(range(unit[0], unit[0] + together)) and unit[0] % together == 0 for unit in units)
        room = sum(capacity.padded(lengths[place]) for place in places)
        assert 0 < -(-room // capacity.row) * capacity.row <= capacity.tokens
    assert pack(list(lengths), capacity, together) == bins  # nothing but the lengths decides
    half_empty = [
        places for places in bins if 2 * sum(map(capacity.padded, (lengths[p] for p in places))) <= capacity.usable
    ]
    assert len(half_empty) <= 1


@settings(deadline=None)
@given(st.lists(st.integers(1, 100), max_size=80), st.integers(100, 300))
def test_it_is_the_first_fit_of_the_textbook(sizes: list[int], capacity: int) -> None:
    assert first_fit_decreasing(sizes, capacity) == first_fit(sizes, capacity)


@settings(deadline=None)
@given(st.lists(st.integers(1, 1000), max_size=80), st.integers(1, 9))
def test_a_deal_is_even_and_leaves_no_rank_without_work(weights: list[int], ranks: int) -> None:
    owners = deal(weights, ranks)
    assert owners == deal(list(weights), ranks) and all(0 <= owner < ranks for owner in owners)
    sums = [sum(w for w, owner in zip(weights, owners, strict=True) if owner == rank) for rank in range(ranks)]
    if weights:
        assert max(sums) - min(sums) <= max(weights)
    if len(weights) >= ranks:
        assert min(sums) > 0


@pytest.mark.parametrize(("tensor", "context", "together"), [(1, 1, 1), (1, 1, 2), (2, 2, 1), (2, 2, 2), (8, 8, 1)])
@pytest.mark.parametrize("sigma", [0.5, 1.0])
def test_lognormal_lengths_fill_95_percent(sigma: float, tensor: int, context: int, together: int) -> None:
    """True tokens over all that the packed rows hold, padding to the layout's multiples and their last gaps included."""
    chance = random.Random(0)
    lengths = [min(4096, 1 + round(512 * chance.lognormvariate(0, sigma))) for _ in range(512)]
    capacity = Capacity.of_layout(16384, tensor=tensor, context=context)
    bins = pack(lengths, capacity, together)
    assert sorted(place for places in bins for place in places) == list(range(512))
    assert sum(lengths) / (len(bins) * capacity.usable) >= 0.95


def test_a_deal_counts_what_is_there_already() -> None:
    assert deal([5, 5, 5], 2, [10, 0]) == [1, 1, 0]


@given(st.integers(1, 10_000), st.sampled_from(SIZES))
def test_padded_lengths_divide_as_the_layout_needs(length: int, sizes: tuple[int, int]) -> None:
    tensor, context = sizes
    capacity = Capacity.of_layout(1 << 20, tensor=tensor, context=context)
    chunks = 2 * context if context > 1 else 1
    assert capacity.padded(length) % chunks == 0 and 0 <= capacity.padded(length) - length < chunks
    assert capacity.row == chunks * tensor


def test_what_does_not_fit_is_named() -> None:
    capacity = Capacity(64, sequence=4, row=8)
    with pytest.raises(
        ValueError, match=r"sequence 1 of 66 tokens take 68 .* multiples of 4; batch.tokens = 64 holds 64"
    ):
        pack([3, 66], capacity)
    with pytest.raises(ValueError, match=r"sequences 2 to 3, which stay together, of 30 \+ 33 tokens take 68"):
        pack([3, 6, 30, 33], capacity, together=2)
    with pytest.raises(ValueError, match="3 sequences do not make whole units of 2"):
        pack([1, 2, 3], capacity, together=2)
    with pytest.raises(ValueError, match=r"batch.tokens = 7 must be at least 8"):
        Capacity(7, sequence=4, row=8)
    assert Capacity(71, sequence=4, row=8).usable == 64


def test_a_micro_batch_is_filled_by_number_or_by_tokens() -> None:
    assert BatchConfig().sequences == 64
    with pytest.raises(ValueError, match=r"micro_batch_size = 4 contradicts tokens = 128"):
        BatchConfig(micro_batch_size=4, packing=True, tokens=128)
    with pytest.raises(ValueError, match=r"tokens = 128 .* set packing to true"):
        BatchConfig(tokens=128)
    with pytest.raises(ValueError, match=r"tokens = 0 must be at least 1"):
        BatchConfig(packing=True, tokens=0)
    with pytest.raises(ValueError, match=r"contradicts tokens"):  # the file has 256 sequences
        load_config(run("grpo_arithmetic.yaml")[0], ["--batch.tokens=512"])
    config = load_config(run("grpo_arithmetic.yaml")[0], ["--batch.tokens=512", "--batch.micro_batch_size=null"])
    assert config.batch == BatchConfig(packing=True, tokens=512)


def moved(
    rank: int, lengths: list[list[int]], parts: int, together: int, groups_of: int = 1
) -> tuple[dict[str, list], list[int]]:
    """What this rank has after a balance of rows that say where they come from; so many of them are dealt as one."""
    import torch.distributed as dist

    from parallel_rl.training.batching.bin_packing import balance

    mine = lengths[rank]
    width = max(mine)
    ids = torch.zeros(len(mine), width, dtype=torch.int64)
    for row, length in enumerate(mine):
        ids[row, :length] = 1000 * rank + row + 1
    fields = {
        "input_ids": ids,
        "generation_logprobs": -ids.double() / 7,
        "rewards": torch.arange(len(mine), dtype=torch.float32) + 100 * rank,
        "group_ids": torch.arange(len(mine)) // 2 + 50 * rank,
        "expert_mask": torch.arange(len(mine)) % 2 == 0,
        "part": torch.arange(parts).repeat_interleave(len(mine) // parts),
    }
    ends = torch.tensor(mine)
    rows = Samples(fields.pop("input_ids"), torch.arange(width) < ends[:, None], ends).with_fields(**fields)
    group = dist.new_group(list(range(len(lengths))))
    weights = ends.view(-1, groups_of).sum(1, keepdim=True) * (torch.arange(groups_of) == 0)
    dealt = None if groups_of == 1 else weights.flatten()
    rows, sizes = balance(rows, Capacity(64), group, torch.device("cpu"), parts=parts, together=together, weights=dealt)
    return {name: field.tolist() for name, field in rows.tensors().items()}, sizes


@pytest.mark.parametrize("parts, together, groups_of", [(1, 1, 1), (2, 1, 1), (2, 2, 2), (1, 3, 1), (2, 1, 3)])
def test_rows_arrive_whole_and_ranks_are_even(parts: int, together: int, groups_of: int) -> None:
    lengths = [[60, 60, 58, 50, 40, 55, 7, 9, 60, 50, 40, 30], [2, 3, 1, 4, 2, 2, 6, 3, 2, 1, 1, 2], [9] * 12]
    if together > 1:
        lengths = [[min(length, 64 // together) for length in of_rank] for of_rank in lengths]
    results = run_world(3, moved, lengths, parts, together, groups_of)
    together = max(together, groups_of)
    seen = []
    for found, sizes in results:
        assert len(sizes) == parts and min(sizes) >= 1 and all(size % together == 0 for size in sizes)
        assert found["part"] == [part for part, size in enumerate(sizes) for _ in range(size)]
        names = []
        for row, length in enumerate(found["lengths"]):
            token = found["input_ids"][row][0] - 1
            source, place = divmod(token, 1000)
            assert found["input_ids"][row][:length] == [token + 1] * length and not any(
                found["input_ids"][row][length:]
            )
            assert found["generation_logprobs"][row][0] == -(token + 1) / 7
            assert length == lengths[source][place]
            assert found["rewards"][row] == place + 100 * source
            assert found["group_ids"][row] == place // 2 + 50 * source
            assert found["expert_mask"][row] == (place % 2 == 0)
            names.append((source, place))
        for first in range(0, len(names), together):
            source, place = names[first]
            assert names[first : first + together] == [(source, place + index) for index in range(together)]
            assert place % together == 0
        seen += names
    assert sorted(seen) == [(rank, place) for rank in range(3) for place in range(12)]
    for part in range(parts):
        loads = []
        for found, _ in results:
            loads.append(sum(n for n, p in zip(found["lengths"], found["part"], strict=True) if p == part))
        assert max(loads) - min(loads) <= max(map(max, lengths)) * together


def test_a_row_that_fits_nowhere_is_refused_on_every_rank() -> None:
    with pytest.raises(WorldError) as raised:
        run_world(2, moved, [[5, 5], [5, 65]], 1, 1)
    assert set(raised.value.errors) == {0, 1}
    assert all("sequence 1 of 65 tokens" in error for error in raised.value.errors.values())


def test_too_small_a_capacity_is_refused_before_any_work(tmp_path: Path) -> None:
    pairs = tmp_path / "pairs.jsonl"
    pairs.write_text(json.dumps({"prompt": "1+1=", "chosen": "2" * 20, "rejected": "3"}) + "\n")
    common = {"parallel": {}, "warmup": "null", "evaluation": "null"}
    batch = {"tokens": 50, "packing": True}
    preference = run("dpo_arithmetic.yaml", run__dir=tmp_path / "a", data={"pairs": str(pairs)}, batch=batch, **common)
    with pytest.raises(
        WorldError, match=r"batch.tokens = 50 is too few: a row holds 50, and the 2 rows of a record take up to 52"
    ):
        run_world(1, train_rows, preference)
    data = {"rollouts": str(DATA / "arithmetic_rollouts.jsonl")}
    recorded = run(
        "grpo_arithmetic.yaml",
        run__dir=tmp_path / "b",
        data=data,
        batch={"tokens": 8, "packing": True},
        rl__steps=1,
        **common,
    )
    with pytest.raises(WorldError, match=r"batch.tokens = 8 is too few: a row holds 8, and the sequence takes \d+"):
        run_world(1, train_rows, recorded)
    assert not (tmp_path / "a").exists() and not (tmp_path / "b").exists()
