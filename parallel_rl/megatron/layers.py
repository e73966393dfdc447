"""Layers of a GPT model in plain PyTorch: core attention on any layout, and a head with one output per position.

Under context parallelism a rank holds a part of every sequence (zigzag), or of the row (contiguous). Keys and values are
gathered once over the context group (backward: a reduce-scatter), and masks compare (segment, place in the sequence).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import torch
from megatron.core import tensor_parallel
from megatron.core.models.gpt import GPTModel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from parallel_rl.layout import CPLayout, SequenceLayout
from parallel_rl.megatron.model_config import CUT
from parallel_rl.megatron.trees import plan_of, tree_attention

if TYPE_CHECKING:
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.transformer.enums import AttnMaskType

BLOCK = 512  # positions of a packed row per mask, if its sequences are shorter


@dataclass(frozen=True)
class _Block:
    """Local positions [start, stop) that attend by `mask` [q, k]; None is plain causal."""

    start: int
    stop: int
    mask: Tensor | None


class SelfAttentionCore(MegatronModule):
    """Causal softmax(q·kᵀ/√d)·v within each sequence or prefix tree, as a layer spec's `core_attention`.

    Works in float64, float32 or bfloat16, as its input. ValueError for dropout, a sliding window or a softmax variant in the
    config.
    """

    takes_trees = True

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
    ) -> None:
        super().__init__(config=config)
        dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        for name, value, supported in (
            ("attention_dropout", dropout, 0.0),
            ("window_size", config.window_size, None),
            ("softmax_type", config.softmax_type, "vanilla"),
        ):
            if value != supported:
                raise ValueError(f"{name} = {value!r} is not supported by SelfAttentionCore; it must be {supported!r}")
        if pg_collection is None:
            pg_collection = ProcessGroupCollection.use_mpu_process_groups(required_pgs=["tp", "cp"])
        self.layer_number = layer_number
        self.softmax_scale = softmax_scale  # None is 1/√d
        self.cp_group = pg_collection.cp
        self.cp_layout: CPLayout = getattr(config, CUT, "zigzag")

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> Tensor:
        """Compute the attention output [S/cp, B, h·d] of this rank's tokens, packed [T/cp, h·d].

        Args:
            query: [S/cp, B, h, d], packed [T/cp, h, d].
            key, value: [S/cp, B, g, d], packed [T/cp, g, d]; h is a multiple of g.
            attention_mask: True hides, broadcast to [B, h, S, S], on top of causality; without context parallelism and packing.
            packed_seq_params: bounds of the packed sequences; None is padded.
        """
        if attention_bias is not None:
            raise ValueError("attention_bias is not supported by SelfAttentionCore")
        plan = plan_of(packed_seq_params)
        packed = packed_seq_params is not None and packed_seq_params.qkv_format == "thd"
        if packed:
            query, key, value = query.unsqueeze(1), key.unsqueeze(1), value.unsqueeze(1)
        length, batch, heads, dim = query.shape
        size, rank = self.cp_group.size(), self.cp_group.rank()
        if attention_mask is not None and (packed or size > 1):
            raise ValueError(
                "attention_mask is not supported with packed sequences or context parallelism; leave it None"
            )
        if size > 1:
            # one collective for both; [cp, S/cp, B, g, 2·d]
            pair = torch.cat((key, value), dim=-1)
            pair = tensor_parallel.gather_from_sequence_parallel_region(pair, True, self.cp_group)
            key, value = pair.view(size, length, *pair.shape[1:]).split((key.shape[-1], value.shape[-1]), dim=-1)
        else:
            key, value = key.unsqueeze(0), value.unsqueeze(0)
        if plan is not None:
            return tree_attention(query, key, value, plan, self.softmax_scale)
        blocks = _plan(
            _bounds(packed_seq_params, length, size) if packed else (0, length * size),
            (size, rank, self.cp_layout),
            query.device,
        )
        parts = []
        for block in blocks:
            q = query[block.start : block.stop]
            k, v = (
                _heads(x[:, block.start : block.stop], heads) if size > 1 or packed else _heads(x, heads)
                for x in (key, value)
            )
            parts.append(self._attend(q, k, v, block.mask, attention_mask))
        out = parts[0] if len(parts) == 1 else torch.cat(parts)
        return out.view(length, heads * dim) if packed else out.view(length, batch, heads * dim)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, hidden: Tensor | None) -> Tensor:
        """Attend: query [q, B, h, d], key and value [B, h, k, d] → [q, B, h, d]."""
        queries, keys = query.shape[0], key.shape[2]
        if mask is None and (hidden is not None or queries != keys):
            # fewer queries than keys: the queries are the last of them (generation with a cache)
            causal = torch.ones(queries, keys, dtype=torch.bool, device=query.device).tril(keys - queries)
            mask = causal if hidden is None else causal & ~hidden
        out = torch.nn.functional.scaled_dot_product_attention(
            query.permute(1, 2, 0, 3), key, value, attn_mask=mask, is_causal=mask is None, scale=self.softmax_scale
        )
        return out.permute(2, 0, 1, 3).contiguous()


def _heads(x: Tensor, heads: int) -> Tensor:
    """Reorder and expand [cp, s, B, g, d] → [B, h, cp·s, d]."""
    x = x.permute(2, 3, 0, 1, 4).flatten(2, 3)
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], dim=1)


def _bounds(packed: PackedSeqParams | None, length: int, size: int) -> tuple[int, ...]:
    assert packed is not None
    cu_seqlens = packed.cu_seqlens_q if packed.cu_seqlens_q_padded is None else packed.cu_seqlens_q_padded
    # `packed_input` keeps them on the host; reading them from a GPU would wait
    bounds: tuple[int, ...] = getattr(packed, "bounds_on_host", None) or tuple(cu_seqlens.tolist())
    if bounds[-1] != length * size:
        raise ValueError(
            f"the packed bounds end at {bounds[-1]}; the row has {length} × cp {size} = {length * size} positions"
        )
    return bounds


@lru_cache(maxsize=4)  # reused by the layers of a micro-batch; a long row's mask is gigabytes
def _plan(bounds: tuple[int, ...], context: tuple[int, int, CPLayout], device: torch.device) -> tuple[_Block, ...]:
    """Group neighbouring sequences into blocks; without CP a single sequence needs no mask."""
    if context[2] == "contiguous" and context[0] > 1:  # a rank's part of the row may end within a sequence
        return (_block(bounds, context, device),)
    groups: list[tuple[int, ...]] = []
    first = 0
    for last in range(1, len(bounds)):
        if last + 1 == len(bounds) or bounds[last + 1] - bounds[first] > BLOCK:
            groups.append(bounds[first : last + 1])
            first = last
    return tuple(_block(group, context, device) for group in groups)


def _block(bounds: tuple[int, ...], context: tuple[int, int, CPLayout], device: torch.device) -> _Block:
    cp_size, cp_rank, cut = context
    start, stop = bounds[0] // cp_size, bounds[-1] // cp_size
    if cp_size == 1 and len(bounds) == 2:
        return _Block(start, stop, None)
    total = bounds[-1] - bounds[0]
    cu_seqlens = torch.tensor(bounds) - bounds[0]
    ranks = [
        SequenceLayout.packed(cu_seqlens, seq_len=total, total=total, cp_size=cp_size, cp_rank=rank, cp_layout=cut)
        for rank in range(cp_size)
    ]
    segments = torch.cat([layout.sequence_ids for layout in ranks])
    places = torch.cat([layout.positions for layout in ranks])
    local = ranks[cp_rank]
    mask = (local.sequence_ids[:, None] == segments) & (local.positions[:, None] >= places)
    return _Block(start, stop, mask.to(device))


class ScalarHead(torch.nn.Module):
    """v_t = w·h_t: [S, B, D] (sequence parallel [S/tp, B, D]) to [S, B, 1], alike on every tensor rank."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.sequence_parallel = config.sequence_parallel
        self.weight = torch.nn.Parameter(torch.zeros(1, config.hidden_size))

    def forward(
        self, hidden: Tensor, weight: Tensor | None = None, runtime_gather_output: bool | None = None
    ) -> tuple[Tensor, None]:
        """Replace the call of a `GPTModel`'s output layer; there is no bias."""
        if self.sequence_parallel:
            # every tensor rank computes the same, so its gradient must not be summed over them
            hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False)
        return torch.nn.functional.linear(hidden, self.weight), None


def replace_head(model: GPTModel) -> None:
    if model.post_process:
        model.output_layer = ScalarHead(model.config)


@torch.no_grad()
def copy_trunk(source: torch.nn.Module, target: torch.nn.Module) -> None:
    """Copy all weights except the head's between two models of one layout; ValueError for other shapes.

    >>> critic = build_model(config, 8, 4, scalar_head=True)
    >>> copy_trunk(build_model(config, 8, 4), critic)
    """
    source_parameters = dict(source.named_parameters())
    for name, parameter in target.named_parameters():
        if name.startswith("output_layer."):
            continue
        if name not in source_parameters or source_parameters[name].shape != parameter.shape:
            raise ValueError(f"the models differ in {name!r}: one cannot start as a copy of the other")
        parameter.copy_(source_parameters[name])
