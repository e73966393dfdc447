"""Attention of a prefix tree's row: the new tokens of each sequence attend to its whole path.

Keys of a path are gathered from the row by index, so each sequence is ordinary causal attention whose queries are its last
tokens. A key read by several paths gets the sum of their gradients, in a fixed order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from parallel_rl.segments import Groups

if TYPE_CHECKING:
    from parallel_rl.megatron.context import Context
    from parallel_rl.prefix_tree import PrefixTree


class Path(NamedTuple):
    """Neighbouring queries [start, stop) of a context rank, the last tokens of a path of `keys` tokens."""

    start: int
    stop: int
    keys: int


@dataclass(frozen=True, eq=False)
class TreePlan:
    """Paths of a context rank's rows.

    Attributes:
        paths: in the order of the rows; rows in no path are padding.
        keys: the row of each key of each path, among the rows of all context ranks, rank after rank.
        rows: of this rank.
    """

    paths: tuple[Path, ...]
    keys: Groups
    rows: int


def tree_plan(tree: PrefixTree, context: Context, device: torch.device) -> TreePlan:
    """Plan the attention of a tree's row on one context rank, on the host."""
    owner, local = tree.owners(context.size, context.layout)
    count = tree.row_length // context.size
    gathered = owner * count + local
    paths, keys = [], []
    for sequence in tree.order.tolist():
        first, last = int(tree.shared[sequence]), int(tree.lengths[sequence])
        rows = tree.where[sequence, :last]
        mine = (owner[rows[first:]] == context.rank).nonzero()[:, 0] + first
        for run in _runs(mine, local[rows[mine]]):
            start = int(local[rows[run[0]]])
            paths.append(Path(start, start + len(run), int(run[-1]) + 1))
            keys.append(gathered[rows[: int(run[-1]) + 1]])
    order = sorted(range(len(paths)), key=lambda place: paths[place].start)
    index = torch.cat([keys[place] for place in order]) if keys else gathered[:0]
    return TreePlan(tuple(paths[place] for place in order), Groups.of(index, tree.row_length).to(device), count)


def tree_attention(query: Tensor, key: Tensor, value: Tensor, plan: TreePlan, scale: float | None) -> Tensor:
    """Attend along the paths of a tree; returns [R, 1, h·d], 0 at padding.

    Args:
        query: [R, 1, h, d] of this rank's rows.
        key, value: [cp, R, 1, g, d] of all context ranks; h is a multiple of g.
        scale: of the logits; None is 1/√d.
    """
    heads, groups = query.shape[2], key.shape[3]
    both = torch.cat((key, value), dim=-1).reshape(-1, groups * 2 * key.shape[-1])
    gathered = plan.keys.take(both).view(-1, groups, 2, key.shape[-1])
    if groups != heads:
        gathered = gathered.repeat_interleave(heads // groups, dim=1)
    parts, at = [], 0
    for path, pair in zip(plan.paths, gathered.split([path.keys for path in plan.paths]), strict=True):
        if path.start > at:
            parts.append(query.new_zeros(path.start - at, heads, query.shape[-1]))
        parts.append(_attend(query[path.start : path.stop, 0], pair, scale))
        at = path.stop
    if at < plan.rows:
        parts.append(query.new_zeros(plan.rows - at, heads, query.shape[-1]))
    out = torch.cat(parts).view(plan.rows, 1, -1)
    # a rank with only padding takes part in the backward of the gather and of the queries, too
    return out if plan.paths else out + gathered.sum() + query[:0].sum()


def tree_params(plan: TreePlan, tree: PrefixTree) -> PackedSeqParams:
    """Make the parameters that Megatron passes from the model to each layer's attention."""
    longest = int(tree.lengths.max())
    params = PackedSeqParams(qkv_format="sbhd", max_seqlen_q=longest, max_seqlen_kv=longest)
    params.tree = plan
    return params


def plan_of(params: PackedSeqParams | None) -> TreePlan | None:
    return getattr(params, "tree", None)


def _attend(query: Tensor, pair: Tensor, scale: float | None) -> Tensor:
    """Attend: [n, h, d] queries, the last of [m, h, 2, d] keys and values → [n, h, d]."""
    key, value = (x.transpose(0, 1)[None] for x in pair.unbind(2))
    queries, keys = len(query), len(pair)
    mask = None
    if queries != keys:
        mask = torch.ones(queries, keys, dtype=torch.bool, device=query.device).tril(keys - queries)
    out = torch.nn.functional.scaled_dot_product_attention(
        query.transpose(0, 1)[None], key, value, attn_mask=mask, is_causal=mask is None, scale=scale
    )
    return out[0].transpose(0, 1)


def _runs(positions: Tensor, local: Tensor) -> list[list[int]]:
    """Split positions of a sequence where they, or their local rows, are not neighbours."""
    if not len(positions):
        return []
    broken = (positions.diff() != 1) | (local.diff() != 1)
    cuts = (broken.nonzero()[:, 0] + 1).tolist()
    return [part.tolist() for part in positions.tensor_split(cuts)]
