"""Rows that hold shared prefixes once train the model that flat rows train, and none is too full."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from parallel_rl import build_tree
from parallel_rl.experience import Samples
from parallel_rl.testing.pool import run_world
from parallel_rl.training.batching.bin_packing import Capacity
from parallel_rl.training.batching.prefix_trees import cut_groups, group_tokens, pack_trees, tree_tokens, unit_rooms
from tests.prefix_tree.trees import padded
from tests.training.batching.test_packed_layouts import OF_THE_LAYOUT, arguments
from tests.training.helpers import Rows, assert_near, train_rows

OF_TREES = ("tokens_computed", "tokens_trained", "shared", "groups_cut", "tokens_repeated")


@st.composite
def steps(draw: st.DrawFn) -> tuple[Samples, Capacity, int]:
    """Sequences of few token ids, so that many begin alike; a capacity that holds each unit; how many stay together."""
    together = draw(st.integers(1, 3))
    sequence = st.lists(st.integers(1, 2), min_size=1, max_size=12)
    rows = draw(st.lists(sequence, min_size=together, max_size=24))
    ids, lengths = padded(rows[: len(rows) // together * together])
    capacity = Capacity.of_layout(10**6, tensor=draw(st.sampled_from((1, 2))), context=draw(st.sampled_from((1, 2))))
    samples = Samples(ids, torch.ones_like(ids), lengths)
    least = int(unit_rooms(samples, capacity, together).max())
    unit = capacity.row
    tokens = -(-least // unit) * unit + draw(st.integers(0, 30))
    return samples, Capacity(tokens, capacity.sequence, unit), together


@settings(deadline=None)
@given(steps())
def test_every_unit_is_in_one_row_and_no_tree_is_too_long(step: tuple[Samples, Capacity, int]) -> None:
    rows, capacity, together = step
    bins = pack_trees(rows, capacity, together)
    assert sorted(place for places in bins for place in places) == list(range(len(rows)))
    for places in bins:
        units = [places[first : first + together] for first in range(0, len(places), together)]
        assert all(unit == list(range(unit[0], unit[0] + together)) and unit[0] % together == 0 for unit in units)
        part = rows.select(places)
        room = build_tree(part.input_ids, part.lengths, multiple_of=capacity.sequence).row_length
        assert -(-room // capacity.row) * capacity.row <= capacity.tokens
    # without a prompt all sequences are one group
    repeated = sum(tree_tokens(rows.select(places)) for places in bins) - tree_tokens(rows)
    assert cut_groups(rows, bins) == [(0, 0)] * (len(bins) - 1) + [(len(bins) > 1, repeated)]
    of_bin = {place: number for number, places in enumerate(bins) for place in places}
    if together == 1:
        for token in (1, 2):
            tree = [place for place in range(len(rows)) if rows.input_ids[place, 0] == token]
            if tree and capacity.padded(build_tree(rows.input_ids[tree], rows.lengths[tree]).tokens) <= capacity.usable:
                assert len({of_bin[place] for place in tree}) == 1, "a tree that fits was cut"


def test_groups_are_prompts_and_stay_within_their_part() -> None:
    ids = torch.tensor([[5, 6, 1], [5, 6, 2], [5, 7, 1], [5, 7, 1], [5, 7, 3], [5, 7, 4]])
    rows = Samples(ids, torch.tensor([[0, 0, 1]]).expand(6, 3), torch.full((6,), 3))
    assert group_tokens(rows).tolist() == [4, 0, 5, 0, 0, 0]
    assert group_tokens(rows, parts=2).tolist() == [4, 0, 3, 5, 0, 0]
    assert group_tokens(rows, together=2).tolist() == [4, 0, 5, 0, 0, 0]


def test_a_pair_that_fits_only_as_a_tree() -> None:
    ids = torch.tensor([[5, 6, 7, 1], [5, 6, 7, 2], [5, 6, 3, 4], [5, 6, 8, 9]])
    rows = Samples(ids, ids < 5, torch.full((4,), 4))
    assert unit_rooms(rows, Capacity(6), together=2).tolist() == [5, 0, 6, 0]
    assert sorted(pack_trees(rows, Capacity(6), together=2)) == [[0, 1], [2, 3]]
    message = r"sequences 2 to 3, .* of 4 \+ 4 tokens take 6 with padding to multiples of 1, shared prefixes once"
    with pytest.raises(ValueError, match=message):
        pack_trees(rows, Capacity(5), together=2)
    with pytest.raises(ValueError, match="4 sequences do not make whole units of 3"):
        pack_trees(rows, Capacity(8), together=3)


_flat: dict[str, Rows] = {}


def flat_rows(case: str, folder: Path, **more: object) -> Rows:
    """The rows of one process on packed rows without trees."""
    if case not in _flat:
        batch = {"packing": True, "micro_batch_size": 6}
        [_flat[case]] = run_world(1, train_rows, arguments(case, folder, "flat", batch=batch, **more))
    return _flat[case]


@pytest.mark.parametrize(
    ("case", "world", "batch", "parallel"),
    [
        ("GRPO", 2, {"tokens": 40}, {"tensor": 2, "sequence_parallel": True}),
        *(
            pytest.param(case, world, batch, parallel, marks=pytest.mark.slow)
            for case, world, batch, parallel in [
                ("GRPO", 1, {"tokens": 40}, {}),
                ("GRPO", 1, {"micro_batch_size": 6}, {}),
                ("quantile of the step", 4, {"tokens": 40}, {"context": 2, "pipeline": 2}),
                ("sampled, covariances", 4, {"tokens": 40}, {"context": 2}),
                ("experts", 2, {"tokens": 40}, {}),
                ("critic", 2, {"tokens": 40}, {"context": 2}),
                ("DPO", 2, {"tokens": 64}, {}),  # of pairs that take up to 72 unshared
                ("KTO", 2, {"tokens": 108}, {"context": 2}),
                ("reward model", 1, {"tokens": 72}, {}),
                ("SFT", 2, {"tokens": 40}, {}),
            ]
        ),
    ],
)
def test_flat_rows_train_the_same_model(
    case: str, world: int, batch: dict[str, object], parallel: dict[str, object], tmp_path: Path
) -> None:
    expected = flat_rows(case, tmp_path)
    batch = {"packing": True, "share_prefixes": True, **batch}
    results = run_world(world, train_rows, arguments(case, tmp_path, "trees", batch=batch, parallel=parallel))
    assert all(rows == results[0] for rows in results)
    rows = results[0]
    for row in rows:
        computed, trained, shared, cut, repeated = (
            float(row.get(name, row.get(f"critic_{name}"))) for name in OF_TREES
        )
        assert 0 < computed < trained and 0 < shared < 1
        assert cut <= repeated < computed and (cut > 0 or repeated == 0)
    others = [{name: x for name, x in row.items() if not _of_trees(name)} for row in rows]
    assert_near(others, expected, rel=1e-10)


def _of_trees(name: str) -> bool:
    return name.removeprefix("critic_") in {*OF_TREES, *OF_THE_LAYOUT}
