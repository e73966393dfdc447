"""Conditions on a model for a prefix tree's row: positions by depth, and refused layers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING

import torch
from megatron.core.utils import get_model_config
from torch import Tensor

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from megatron.core.transformer.transformer_config import TransformerConfig

    from parallel_rl.prefix_tree import PrefixTree


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
    """Refuse a model whose layers would compute other numbers on a tree's row than on flat rows.

    Args:
        models: chunks without wrappers.
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
                    "SelfAttentionCore does, that of layer_spec(config) without Transformer Engine"
                )
