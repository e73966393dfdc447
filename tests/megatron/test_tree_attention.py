"""Attention along the paths of a tree against one dense mask, and what it keeps for backward.

torch's FlashAttention needs a card: on the CPU a plain computation of its rule stands for the kernel, so that its arguments
and its gradients are held here; test_trees_gpu.py calls the kernel itself.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from parallel_rl import build_tree
from parallel_rl.layout import CPLayout
from parallel_rl.prefix_tree import PrefixTree
from parallel_rl.testing.pool import preload
from tests.prefix_tree.trees import padded, random_sequences

pytest.importorskip("megatron.core")
preload("megatron.core")

HEADS, DIM = 4, 8


def of_segment(query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return weights [h, q, k] with the last query on the last key, and keys and values [k, h, d] of each query head."""
    key, value = (x.repeat_interleave(HEADS // x.shape[1], dim=1) for x in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query, key) * (scale or DIM**-0.5)
    seen = torch.ones(scores.shape[1:], dtype=torch.bool).tril(len(key) - len(query))
    return scores.masked_fill(~seen, float("-inf")).softmax(-1), key, value


def segments(bounds: Tensor, *tensors: Tensor) -> list[tuple[Tensor, ...]]:
    return list(zip(*(x.split(bounds.diff().tolist()) for x in tensors), strict=True))


@pytest.fixture(scope="module", autouse=True)
def flash_on_the_cpu() -> Iterator[None]:
    def forward(query: Tensor, key: Tensor, value: Tensor, cum_q: Tensor, cum_k: Tensor, max_q: int, max_k: int,
                dropout: float, causal: bool, debug: bool, *, scale: float | None = None, **_: object) -> tuple:  # fmt: skip
        assert causal and not dropout and {cum_q.dtype, cum_k.dtype} == {torch.int32}
        assert [int(cum_q.diff().max()), int(cum_k.diff().max())] == [max_q, max_k]
        parts = []
        for (q,), (k, v) in zip(segments(cum_q, query), segments(cum_k, key, value), strict=True):
            weights, _, v = of_segment(q, k, v, scale)
            parts.append(torch.einsum("hqk,khd->qhd", weights, v))
        out = torch.cat(parts)
        return out, out.new_zeros(HEADS, len(query)), torch.zeros(2, dtype=torch.uint64), torch.zeros(0), out[:0]

    def backward(upstream: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, logsumexp: Tensor,
                 cum_q: Tensor, cum_k: Tensor, *_: object, scale: float | None = None, **__: object) -> tuple:  # fmt: skip
        gradients = []
        for (q, g), (k, v) in zip(segments(cum_q, query, upstream), segments(cum_k, key, value), strict=True):
            groups = k.shape[1]
            weights, k, v = of_segment(q, k, v, scale)
            of_weights = torch.einsum("qhd,khd->hqk", g, v)
            of_scores = weights * (of_weights - (weights * of_weights).sum(-1, keepdim=True)) * (scale or DIM**-0.5)
            of_keys = torch.einsum("hqk,qhd->khd", of_scores, q), torch.einsum("hqk,qhd->khd", weights, g)
            shared = (x.unflatten(1, (groups, -1)).sum(2) for x in of_keys)
            gradients.append((torch.einsum("hqk,khd->qhd", of_scores, k), *shared))
        return tuple(torch.cat(parts) for parts in zip(*gradients, strict=True))

    library = torch.library.Library("aten", "IMPL")
    library.impl("_flash_attention_forward", forward, "CPU")
    library.impl("_flash_attention_backward", backward, "CPU")
    yield
    library._destroy()


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
@pytest.mark.parametrize("attend", ["attend_by_path", "attend_at_once"])
@pytest.mark.parametrize(("seed", "ranks", "cut"), [(0, 1, "zigzag"), (1, 2, "zigzag"), (2, 2, "contiguous")])
def test_output_and_gradients_are_those_of_a_dense_mask(
    groups: int, attend: str, seed: int, ranks: int, cut: CPLayout
) -> None:
    from parallel_rl.megatron import trees
    from parallel_rl.megatron.process_groups import Context
    from parallel_rl.megatron.trees import tree_attention, tree_plan

    ids, lengths = padded(random_sequences(seed))
    tree = build_tree(ids, lengths, multiple_of=4)
    owner, local = tree.owners(ranks, cut)
    g = torch.Generator().manual_seed(seed)
    shapes = ((tree.row_length, HEADS, DIM), *[(tree.row_length, groups, DIM)] * 2)
    inputs = [torch.randn(shape, generator=g, dtype=torch.float64, requires_grad=True) for shape in shapes]
    rows = torch.stack([(owner == rank).nonzero()[:, 0][local[owner == rank].argsort()] for rank in range(ranks)])
    query, key, value = (x[rows][:, :, None] for x in inputs)
    parts = []
    for rank in range(ranks):
        plan = tree_plan(tree, Context(ranks, rank, cut), torch.device("cpu"))
        parts.append(tree_attention(query[rank], key, value, plan, None, getattr(trees, attend)))
    expected = dense(*inputs, tree)
    outputs = torch.cat(parts), expected[rows.flatten()]
    torch.testing.assert_close(*outputs, rtol=1e-12, atol=1e-12)
    upstream = torch.randn(outputs[0].shape, generator=g, dtype=torch.float64)
    gradients = (torch.autograd.grad(out, inputs, upstream) for out in outputs)
    for actual, wanted in zip(*gradients, strict=True):
        torch.testing.assert_close(actual, wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("attend", ["attend_by_path", "attend_at_once"])
def test_backward_keeps_no_keys_of_a_path(attend: str) -> None:
    """A kernel's saved keys are gathered at each look."""
    from parallel_rl.megatron import trees
    from parallel_rl.megatron.process_groups import ALONE
    from parallel_rl.megatron.trees import tree_attention, tree_plan

    ids = torch.arange(12).expand(5, 12).clone()
    ids[:, 8:] += 100 * torch.arange(5)[:, None]
    tree = build_tree(ids, torch.full((5,), 12))
    shapes = ((tree.row_length, 1, HEADS, DIM), *[(1, tree.row_length, 1, 2, DIM)] * 2)
    tensors = [torch.randn(shape, requires_grad=True) for shape in shapes]
    plan = tree_plan(tree, ALONE, torch.device("cpu"))
    nodes, seen = [tree_attention(*tensors, plan, None, getattr(trees, attend)).grad_fn], set()
    kernels = []
    while nodes:
        node = nodes.pop()
        if node is not None and node not in seen:
            seen.add(node)
            kernels += [node] if hasattr(node, "_saved_key") else []
            nodes += [before for before, _ in node.next_functions]
    one_call = attend == "attend_at_once"
    assert len(kernels) == (1 if one_call else 5)
    shape = (5 * 12, 2, DIM) if one_call else (1, HEADS, 12, DIM)
    for kernel in kernels:
        first, second = kernel._saved_key, kernel._saved_key
        assert first.shape == shape and torch.equal(first, second) and first.data_ptr() != second.data_ptr()
        mask = getattr(kernel, "_saved_attn_mask", None)
        assert mask is None or mask.untyped_storage().nbytes() <= 4 * (12 + 12)
