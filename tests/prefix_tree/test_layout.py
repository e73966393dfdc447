"""The layout of a tree's row: each flat token on the one context rank that holds its row, its edge, and what is left out."""

from __future__ import annotations

import pytest
import torch

from parallel_rl import build_tree
from parallel_rl.layout import CPLayout
from tests.prefix_tree.cuts import held_rows
from tests.prefix_tree.trees import padded, random_sequences

CUTS: list[tuple[int, CPLayout]] = [(1, "zigzag"), (2, "zigzag"), (4, "zigzag"), (2, "contiguous"), (4, "contiguous")]


@pytest.mark.parametrize(("cp", "cp_layout"), CUTS)
@pytest.mark.parametrize("seed", range(3))
def test_each_flat_token_reads_its_own_row(seed: int, cp: int, cp_layout: CPLayout) -> None:
    ids, lengths = padded(random_sequences(seed))
    tree = build_tree(ids, lengths, multiple_of=2 * cp)
    flat = []
    for rank in range(cp):
        held = held_rows(tree, cp, rank, cp_layout)
        layout = tree.layout(cp_size=cp, cp_rank=rank, cp_layout=cp_layout)
        shared = layout.tree
        assert shared is not None
        assert layout.local_shape == (1, len(held))
        targets = layout.shard(ids)
        predicts = layout.predicted[1]
        for place, (sequence, position) in enumerate(
            zip(layout.sequence_ids.tolist(), layout.positions.tolist(), strict=True)
        ):
            flat.append((sequence, position))
            row = int(shared.rows.index[place])
            assert held[row] == int(tree.where[sequence, position])
            if not predicts[place]:
                continue
            edge = int(shared.edges.index[place])
            assert row == (edge if edge < len(held) else int(shared.branches[edge - len(held)]))
            assert targets[shared.targets[edge]] == ids[sequence, position + 1]
        assert shared.branches.tolist() == sorted(shared.branches.tolist())
        assert layout.offsets.tolist() == [0, *layout.sequence_ids.bincount(minlength=len(ids)).cumsum(0).tolist()]
    assert sorted(flat) == [(row, column) for row, length in enumerate(lengths.tolist()) for column in range(length)]


def test_branching_rows_alone_have_further_edges() -> None:
    tree = build_tree(*padded([[1, 2, 3, 4], [1, 2, 5, 6], [1, 2, 3, 7], [1, 2]]))
    shared = tree.layout().tree
    assert shared is not None
    assert shared.branches.tolist() == [1, 1, 2, 2]
    assert (shared.targets < 0).sum() == 2 + 3  # those two rows, and the three leaves


def test_tokens_without_loss_are_left_out() -> None:
    """Of a prompt that 16 answers share, one row each is read: that of its last token, which predicts the answer's first."""
    rows = [[1, 2, 3, 4, 10 + answer, 5] for answer in range(16)]
    ids, lengths = padded(rows)
    mask = torch.zeros_like(ids)
    mask[:, 4:] = 1
    layout = build_tree(ids, lengths, token_mask=mask).layout()
    assert len(layout.positions) == 16 * 3
    assert layout.shard(mask).sum() == 16 * 2


def test_chunks_count_the_passages_between_ranks() -> None:
    tree = build_tree(*padded([[1, 2, 3, 4], [1, 2, 5, 6]]), multiple_of=2)
    assert tree.row_length == 6
    for rank in range(2):
        shared = tree.layout(cp_size=2, cp_rank=rank, cp_layout="contiguous").tree
        assert shared is not None
        assert shared.chunk.tolist() == [[0, 0, 0, 1], [0, 0, 1, 1]]
        assert shared.cuts == 1


def test_a_tree_that_does_not_divide_is_refused() -> None:
    tree = build_tree(*padded([[1, 2, 3]]))
    with pytest.raises(ValueError, match="3 positions, which is not divisible by cp = 2"):
        tree.layout(cp_size=2)
    tree = build_tree(*padded([[1, 2, 3, 4, 5]]), multiple_of=2)
    with pytest.raises(ValueError, match="not divisible by 4"):
        tree.layout(cp_size=2)
