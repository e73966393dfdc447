"""`build_tree` against a trie of Python dictionaries, `from_nodes` against `build_tree`, and what both refuse."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from parallel_rl import PrefixTree, build_tree, from_nodes
from tests.prefix_tree.trees import padded, random_sequences


def trie(rows: list[list[int]]) -> list[list[int]]:
    """The row position of each token, depth-first, children in the order of the first sequence that takes them."""
    root: dict[int, Any] = {}
    for row in rows:
        node = root
        for token in row:
            node = node.setdefault(token, {})
    places: dict[tuple[int, ...], int] = {}

    def walk(node: dict[int, Any], path: tuple[int, ...]) -> None:
        for token, child in node.items():
            places[(*path, token)] = len(places)
            walk(child, (*path, token))

    walk(root, ())
    return [[places[tuple(row[: column + 1])] for column in range(len(row))] for row in rows]


def places(tree: PrefixTree) -> list[list[int]]:
    return [row[:length] for row, length in zip(tree.where.tolist(), tree.lengths.tolist(), strict=True)]


def test_against_a_trie() -> None:
    rng = random.Random(0)
    for _ in range(300):
        vocabulary = rng.choice([1, 2, 3])
        rows = [[rng.randrange(vocabulary) for _ in range(rng.randint(1, 7))] for _ in range(rng.randint(1, 9))]
        tree = build_tree(*padded(rows))
        want = trie(rows)
        assert places(tree) == want
        assert tree.tokens == tree.row_length == len({place for row in want for place in row})
        end = 0  # the tokens that each sequence adds are neighbours
        for row in tree.order.tolist():
            added = want[row][int(tree.shared[row]) :]
            assert added == list(range(end, end + len(added)))
            end += len(added)
        for row, path in zip(rows, want, strict=True):
            assert tree.depth[path].tolist() == list(range(len(row)))
            assert tree.before[path].tolist() == [-1, *path[:-1]]
            assert tree.row(tree.input_ids)[path].tolist() == row


def test_each_tree_is_padded() -> None:
    tree = build_tree(*padded([[1, 2, 3], [4], [1, 2, 5]]), multiple_of=4)
    assert tree.bounds.tolist() == [0, 4, 8]
    assert places(tree) == [[0, 1, 2], [4], [0, 1, 3]]
    assert (tree.tokens, tree.flat_tokens, tree.row_length) == (5, 7, 8)


def test_fields_that_must_agree_part_tokens() -> None:
    ids, lengths = padded([[1, 2, 3], [1, 2, 4]])
    assert places(build_tree(ids, lengths, alike=[torch.tensor([1.0, 1.0])])) == [[0, 1, 2], [0, 1, 3]]
    assert places(build_tree(ids, lengths, alike=[torch.tensor([1.0, 0.7])])) == [[0, 1, 2], [3, 4, 5]]
    kept = torch.zeros(2, 3, 2, dtype=torch.int64)
    kept[1, 1, 1] = 5
    assert places(build_tree(ids, lengths, alike=[kept])) == [[0, 1, 2], [0, 3, 4]]


@pytest.mark.parametrize("seed", range(5))
def test_a_host_that_has_the_tree(seed: int) -> None:
    """One node a token, in the order of the row, gives what was built."""
    ids, lengths = padded(random_sequences(seed))
    tree = build_tree(ids, lengths)
    nodes = [[token] for token in tree.row(ids).tolist()]
    ends = [row[-1] for row in places(tree)]
    other = from_nodes(nodes, tree.before.tolist(), ends, input_ids=ids, row_length=len(nodes) + 3)
    assert torch.equal(other.where * tree.real, tree.where * tree.real)
    assert torch.equal(other.lengths, tree.lengths)
    assert other.tokens == tree.tokens
    assert other.row_length == len(nodes) + 3


IDS = torch.tensor([[5, 6, 7], [5, 6, 8]])
NODES: dict[str, Any] = {"nodes": [[5, 6], [7], [8]], "parents": [-1, 0, 0], "ends": [1, 2]}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"parents": [-1, 1, 0]}, r"parents\[1\] = 1 must be an earlier node"),
        ({"parents": [-1, 2, 0]}, r"parents\[1\] = 2 must be an earlier node"),
        ({"nodes": [[5, 6], [], [8]]}, r"nodes\[1\] is empty"),
        ({"ends": [1, 1]}, r"sequence 1 has 7 at token 2; input_ids has 8"),
        ({"nodes": [[5, 6], [7], [8], [9]], "parents": [-1, 0, 0, 0]}, r"nodes\[3\] lies on the path of no sequence"),
        ({"nodes": [[5, 6], [7], [7]]}, r"nodes\[1\] and nodes\[2\] both continue nodes\[0\] with the token 7"),
        ({"nodes": [[5, 6], [7, 1], [8]]}, r"the path of sequence 0 has 4 tokens; input_ids\[0\] has room for 3"),
        ({"ends": [1, 3]}, r"ends\[1\] = 3 must be a node"),
        ({"ends": [1]}, "do not fit: one parent a node, one end a row"),
        ({"row_length": 3}, "row_length = 3 is less than the 4 tokens"),
        (
            {"nodes": [[5], [5], [6, 7], [6, 8]], "parents": [-1, -1, 0, 1], "ends": [2, 3]},
            r"nodes\[2\] belongs to the tree of nodes\[0\]",
        ),
        ({"token_mask": torch.ones(2, 4)}, r"token_mask must be \[B, S\] = \[2, 3\], got \[2, 4\]"),
        ({"input_ids": IDS.double()}, r"input_ids must be integers \[B, S\]"),
    ],
)
def test_refused_nodes(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        from_nodes(**{**NODES, "input_ids": IDS, **change})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lengths": torch.tensor([3, 0])}, r"lengths\[1\] = 0 must lie in \[1, S = 3\]"),
        ({"lengths": torch.tensor([3, 4])}, r"lengths\[1\] = 4"),
        ({"lengths": torch.tensor([3])}, r"lengths must be integers \[B\] = \[2\]"),
        ({"input_ids": IDS.float()}, r"input_ids must be integers \[B, S\]"),
        ({"alike": [torch.ones(3)]}, r"alike\[0\] must be \[B\], \[B, S\] or \[B, S, K\]"),
        ({"multiple_of": 0}, "multiple_of = 0 must be at least 1"),
    ],
)
def test_refused_sequences(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_tree(**{"input_ids": IDS, "lengths": torch.tensor([3, 3]), **change})
