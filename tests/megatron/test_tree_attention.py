"""Attention along the paths of a tree against one dense mask, and what it keeps for backward."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from parallel_rl import build_tree
from parallel_rl.prefix_tree import PrefixTree
from parallel_rl.testing.pool import preload
from tests.prefix_tree.trees import padded, random_sequences

pytest.importorskip("megatron.core")
preload("megatron.core")

HEADS, DIM = 4, 8


def dense(query: Tensor, key: Tensor, value: Tensor, tree: PrefixTree) -> Tensor:
    """Attend by a mask [T, T] of each row's ancestors and itself; 0 at padding."""
    seen = torch.zeros(tree.row_length, tree.row_length, dtype=torch.bool)
    for row in range(tree.row_length):
        place = row
        while place >= 0 and row in tree.where[tree.real]:
            seen[row, place] = True
            place = int(tree.before[place])
    key, value = (x.repeat_interleave(HEADS // x.shape[1], dim=1) for x in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query, key) / math.sqrt(DIM)
    weights = scores.masked_fill(~seen, float("-inf")).softmax(-1).nan_to_num()
    return torch.einsum("hqk,khd->qhd", weights, value).flatten(1)[:, None]


@pytest.mark.parametrize("groups", [HEADS, 2])
@pytest.mark.parametrize("seed", range(3))
def test_output_and_gradients_are_those_of_a_dense_mask(groups: int, seed: int) -> None:
    from parallel_rl.megatron.context import ALONE
    from parallel_rl.megatron.trees import tree_attention, tree_plan

    ids, lengths = padded(random_sequences(seed))
    tree = build_tree(ids, lengths, multiple_of=4)
    g = torch.Generator().manual_seed(seed)
    shapes = ((tree.row_length, 1, HEADS, DIM), *[(1, tree.row_length, 1, groups, DIM)] * 2)
    query, key, value = (torch.randn(shape, generator=g, dtype=torch.float64, requires_grad=True) for shape in shapes)
    upstream = torch.randn(tree.row_length, 1, HEADS * DIM, generator=g, dtype=torch.float64)
    plan = tree_plan(tree, ALONE, torch.device("cpu"))
    found = tree_attention(query, key, value, plan, None)
    expected = dense(query[:, 0], key[0, :, 0], value[0, :, 0], tree)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    gradients = (torch.autograd.grad(out, (query, key, value), upstream) for out in (found, expected))
    for got, want in zip(*gradients, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


def test_backward_keeps_no_keys_of_a_path() -> None:
    """A kernel's saved keys are gathered at each look."""
    from parallel_rl.megatron.context import ALONE
    from parallel_rl.megatron.trees import tree_attention, tree_plan

    ids = torch.arange(12).expand(5, 12).clone()
    ids[:, 8:] += 100 * torch.arange(5)[:, None]
    tree = build_tree(ids, torch.full((5,), 12))
    shapes = ((tree.row_length, 1, HEADS, DIM), *[(1, tree.row_length, 1, 2, DIM)] * 2)
    tensors = [torch.randn(shape, requires_grad=True) for shape in shapes]
    nodes, seen = [tree_attention(*tensors, tree_plan(tree, ALONE, torch.device("cpu")), None).grad_fn], set()
    kernels = []
    while nodes:
        node = nodes.pop()
        if node is not None and node not in seen:
            seen.add(node)
            kernels += [node] if hasattr(node, "_saved_key") else []
            nodes += [before for before, _ in node.next_functions]
    assert len(kernels) == 5
    for kernel in kernels:
        first, second = kernel._saved_key, kernel._saved_key
        assert (
            first.shape == (1, HEADS, 12, DIM) and torch.equal(first, second) and first.data_ptr() != second.data_ptr()
        )
        assert kernel._saved_attn_mask is None or kernel._saved_attn_mask.untyped_storage().nbytes() <= 4 * (12 + 12)
