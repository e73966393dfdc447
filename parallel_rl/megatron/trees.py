"""A prefix tree's row in a Megatron model: attention along each path, positions by depth, refused layers.

Keys of a path are gathered from the row by index: each sequence is causal attention whose queries are its last tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.utils import get_model_config
from torch import Tensor

from parallel_rl.segments import Groups

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from megatron.core.transformer.transformer_config import TransformerConfig

    from parallel_rl.megatron.process_groups import Context
    from parallel_rl.prefix_tree import PrefixTree


class Path(NamedTuple):
    """Neighbouring queries [start, stop) of a context rank, the last tokens of a path of `keys` tokens."""

    start: int
    stop: int
    keys: int


@dataclass(frozen=True, eq=False)
class TreePlan:
    """Paths of a context rank's rows, in their order; rows in no path are padding.

    Attributes:
        keys: the row of each key of each path, among the rows of all context ranks, rank after rank.
        rows: number of rows of this rank.
        queries: [Q] its rows in a path.
        query_bounds, key_bounds: [paths + 1] int32, where the queries and the keys of each path begin.
    """

    paths: tuple[Path, ...]
    keys: Groups
    rows: int
    queries: Tensor
    query_bounds: Tensor
    key_bounds: Tensor

    @cached_property
    def longest(self) -> tuple[int, int]:
        """Return the largest number of queries and of keys of a path."""
        return max(path.stop - path.start for path in self.paths), max(path.keys for path in self.paths)


#: computes [R, h, d] from queries [R, h, d], the gathered keys and values [M, g, 2, d], those of the rows, a plan, a scale
Attend = Callable[[Tensor, Tensor, Tensor, TreePlan, float | None], Tensor]


def tree_plan(tree: PrefixTree, context: Context, device: torch.device) -> TreePlan:
    """Plan the attention of a tree's row on one context rank, on the host."""
    owner, local = tree.owners(context.size, context.layout)
    count = tree.row_length // context.size
    gathered = owner * count + local
    paths_and_keys = list[tuple[Path, Tensor]]()
    for sequence in tree.order.tolist():
        first, last = int(tree.shared[sequence]), int(tree.lengths[sequence])
        rows = tree.where[sequence, :last]
        places_here = (owner[rows[first:]] == context.rank).nonzero()[:, 0] + first
        for run in _runs(places_here, local[rows[places_here]]):
            start = int(local[rows[run[0]]])
            paths_and_keys.append((Path(start, start + len(run), int(run[-1]) + 1), gathered[rows[: int(run[-1]) + 1]]))
    paths_and_keys.sort(key=lambda pair: pair[0].start)
    paths = tuple(path for path, _ in paths_and_keys)
    queries = [torch.arange(path.start, path.stop) for path in paths]
    return TreePlan(
        paths,
        Groups.of(torch.cat([gathered[:0], *(keys for _, keys in paths_and_keys)]), tree.row_length).to(device),
        count,
        torch.cat([gathered[:0], *queries]).to(device),
        _bounds([len(rows) for rows in queries]).to(device),
        _bounds([path.keys for path in paths]).to(device),
    )


def _bounds(sizes: list[int]) -> Tensor:
    return torch.tensor([0, *sizes]).cumsum(0).to(torch.int32)


def tree_attention(
    query: Tensor, key: Tensor, value: Tensor, plan: TreePlan, scale: float | None, attend: Attend | None = None
) -> Tensor:
    """Attend along the paths of a tree; returns [R, 1, h·d], 0 at padding.

    Args:
        query: [R, 1, h, d] of this rank's rows.
        key, value: [cp, R, 1, g, d] of all context ranks; h is a multiple of g.
        scale: of the logits; None is 1/√d.
        attend: `attend_at_once` or `attend_by_path`; None chooses by device and dtype.
    """
    heads, groups, dim = query.shape[2], key.shape[3], key.shape[-1]
    both = torch.cat((key, value), dim=-1).reshape(-1, groups, 2, dim)
    gathered = plan.keys.take(both.flatten(1)).view(-1, groups, 2, dim)
    if not plan.paths:  # a rank with only padding takes part in the backward of the gather and of the queries, too
        return query.new_zeros(plan.rows, 1, heads * dim) + gathered.sum() + query[:0].sum()
    if attend is None:
        attend = attend_at_once if _flash_takes(query) else attend_by_path
    return attend(query[:, 0], gathered, both.detach(), plan, scale).view(plan.rows, 1, -1)


def _flash_takes(query: Tensor) -> bool:
    """Test whether torch's FlashAttention computes queries [..., d] of this device and dtype."""
    return (
        query.is_cuda
        and query.dtype in (torch.bfloat16, torch.float16)
        and query.shape[-1] % 8 == 0
        and query.shape[-1] <= 256
        and torch.backends.cuda.is_flash_attention_available()
        and torch.cuda.get_device_capability(query.device) >= (8, 0)
    )


def attend_at_once(query: Tensor, gathered: Tensor, both: Tensor, plan: TreePlan, scale: float | None) -> Tensor:
    """Attend by one variable-length call of FlashAttention, whose segments are the paths; an `Attend`.

    Its causal mask is aligned to the last key of a segment, as `torch.nn.attention.bias.causal_lower_right`.
    """
    key, value = gathered.unbind(2)
    rows = plan.keys.index
    padded = len(plan.queries) < plan.rows
    with _gathered_again((key, value), lambda place: both[rows, :, place]):
        out: Tensor = torch.ops.aten._flash_attention_forward(
            query.index_select(0, plan.queries) if padded else query, key, value,
            plan.query_bounds, plan.key_bounds, *plan.longest, 0.0, True, False, scale=scale,
        )[0]  # fmt: skip
    return query.new_zeros(query.shape).index_copy(0, plan.queries, out) if padded else out


def attend_by_path(query: Tensor, gathered: Tensor, both: Tensor, plan: TreePlan, scale: float | None) -> Tensor:
    """Attend by a call for each path, on any device and in any dtype; an `Attend`."""
    heads, sizes = query.shape[1], [path.keys for path in plan.paths]
    parts, at = [], 0
    for path, pair, rows in zip(plan.paths, gathered.split(sizes), plan.keys.index.split(sizes), strict=True):
        if path.start > at:
            parts.append(query.new_zeros(path.start - at, *query.shape[1:]))
        pair = _expanded(pair, heads)
        saved = tuple(x.transpose(0, 1)[None] for x in pair.unbind(2))

        def again(place: int, rows: Tensor = rows) -> Tensor:
            return _expanded(both[rows, :, place, None], heads).squeeze(2).transpose(0, 1)[None]

        with _gathered_again(saved, again):
            parts.append(_attend(query[path.start : path.stop], pair, scale))
        at = path.stop
    if at < plan.rows:
        parts.append(query.new_zeros(plan.rows - at, *query.shape[1:]))
    return torch.cat(parts)


def _expanded(keys: Tensor, heads: int) -> Tensor:
    groups = keys.shape[1]
    return keys if groups == heads else keys.repeat_interleave(heads // groups, dim=1)


def _gathered_again(
    tensors: tuple[Tensor, ...], again: Callable[[int], Tensor]
) -> torch.autograd.graph.saved_tensors_hooks:
    """Save none of `tensors` in a `with` block; backward gets the one at a place by `again(place)`."""
    places = {(x.data_ptr(), x.shape, x.stride()): place for place, x in enumerate(tensors)}

    def pack(x: Tensor) -> Tensor | int:
        return places.get((x.data_ptr(), x.shape, x.stride()), x)

    def unpack(saved: Tensor | int) -> Tensor:
        return again(saved) if isinstance(saved, int) else saved

    return torch.autograd.graph.saved_tensors_hooks(pack, unpack)


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
    attend = torch.nn.functional.scaled_dot_product_attention
    if len(query) == len(pair):
        return attend(query.transpose(0, 1)[None], key, value, is_causal=True, scale=scale)[0].transpose(0, 1)
    mask = _mask_of_last_queries(len(query), len(pair), query)
    out = attend(query.flip(0).transpose(0, 1)[None], key, value, attn_mask=mask, scale=scale)
    return out[0].transpose(0, 1).flip(0)


def _mask_of_last_queries(queries: int, keys: int, like: Tensor) -> Tensor:
    """Mask [n, m] what the last n of m places may not see, last place first: a view of n + m − 1 numbers."""
    line = like.new_zeros(queries + keys - 1)
    line[keys:] = float("-inf")
    mask = line.as_strided((queries, keys), (1, 1))
    return mask if like.device.type == "cpu" else mask.contiguous()  # kernels of other devices need aligned rows


def _runs(positions: Tensor, local: Tensor) -> list[list[int]]:
    """Split positions of a sequence where they, or their local rows, are not neighbours."""
    if not len(positions):
        return []
    broken = (positions.diff() != 1) | (local.diff() != 1)
    cuts = (broken.nonzero()[:, 0] + 1).tolist()
    return [part.tolist() for part in positions.tensor_split(cuts)]


def positions_by_depth(model: torch.nn.Module, depths: Tensor, tree: PrefixTree) -> AbstractContextManager[None]:
    """Rotate by the depths [R] of a tree's rows, not by their places, while a model runs."""
    rotary = getattr(model, "rotary_pos_emb", None)
    return nullcontext() if rotary is None else _rotary_at(rotary, depths, int(tree.lengths.max()))


@contextmanager
def _rotary_at(rotary: torch.nn.Module, depths: Tensor, longest: int) -> Iterator[None]:
    def whole(_: torch.nn.Module, args: tuple, kwargs: dict[str, object]) -> tuple[tuple, dict[str, object]]:
        return (longest,), {**kwargs, "packed_seq": True}  # not cut over context ranks

    def gather(_: torch.nn.Module, args: tuple, angles: Tensor | tuple) -> Tensor | tuple:
        return angles[depths] if isinstance(angles, Tensor) else (angles[0][depths], *angles[1:])

    handles = rotary.register_forward_pre_hook(whole, with_kwargs=True), rotary.register_forward_hook(gather)
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def check_tree_model(models: Sequence[torch.nn.Module], *, trains_heads: bool = False, balances: bool = False) -> None:
    """Refuse model chunks whose layers would compute other numbers on a tree's row than on flat rows.

    trains_heads: multi-token prediction is trained. balances: layers add their own losses, such as routers.
    """
    config: TransformerConfig = get_model_config(models[0])
    for key, wrong, why in (
        ("multi_latent_attention", config.multi_latent_attention, "its layers rotate by place in the row"),
        ("mtp_num_layers", trains_heads, "a row's second next token is not one token"),
        ("fp8", config.fp8, "a scale of the whole row would depend on what is shared"),
        ("fp4", getattr(config, "fp4", None), "a scale of the whole row would depend on what is shared"),
        (
            "moe_expert_capacity_factor",
            config.moe_expert_capacity_factor,
            "which tokens are dropped depends on the row",
        ),
        (
            "moe_aux_loss_coeff",
            balances,
            "a shared token would count once, not once for each sequence",
        ),
        (
            "moe_router_enable_expert_bias",
            getattr(config, "moe_router_enable_expert_bias", False),
            "a shared token would move the bias once, not once for each sequence",
        ),
        ("is_hybrid_model", getattr(config, "is_hybrid_model", False), "a state has one past"),
    ):
        if wrong:
            raise ValueError(f"{key} = {getattr(config, key, wrong)!r} is not supported with prefix trees: {why}")
    for model in models:
        kind = getattr(model, "position_embedding_type", "rope")
        if kind not in ("rope", "yarn", "learned_absolute", "none"):
            raise ValueError(f"position_embedding_type = {kind!r} is not supported with prefix trees")
        for name, module in model.named_modules():
            attention = getattr(module, "core_attention", None)
            if attention is not None and not hasattr(attention, "takes_trees"):
                raise ValueError(
                    f"{name}.core_attention is a {type(attention).__name__}, which does not know prefix trees; "
                    "SelfAttentionCore does, that of layer_spec(config, prefix_trees=True)"
                )
