"""Auxiliary losses added in backward (MoE routers, DSA indexer) and their denominators."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from torch import Tensor

from parallel_rl.groups import ParallelGroups, reduce_
from parallel_rl.megatron.capabilities import (
    auxiliary_losses_know_context_ranks,
    routers_count_the_whole_row,
    schedules_scale_the_indexer,
)
from parallel_rl.megatron.model_input import ModelInput

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_config import TransformerConfig


@dataclass(frozen=True)
class RoutedTokens:
    """Tokens by which a router multiplies its auxiliary losses, including prompts and padding.

    here: of this micro-batch's row, or (megatron-core before 0.19) those that a rank's router reads. step: a 0-dim integer
    tensor, the sum over the step's micro-batches and data ranks.
    """

    here: int
    step: Tensor


def count_routed(
    inputs: Sequence[ModelInput],
    *,
    config: TransformerConfig,
    groups: ParallelGroups | None = None,
    made_up: bool = False,
) -> list[RoutedTokens]:
    """Count the tokens that routers with auxiliary losses will read per micro-batch; one all-reduce.

    >>> count_routed([padded_input(data["input_ids"])], config=config)[0].here
    8

    Args:
        inputs: of all micro-batches of this data rank's step. config: the model's.
        made_up: the inputs stand for no data and count as no token.
    """
    where = groups or ParallelGroups.from_megatron()
    local = [0 if made_up else batch.tokens.numel() for batch in inputs]
    if routers_count_the_whole_row() or not config.num_moe_experts:
        here = [tokens * where.cp_size for tokens in local]
    else:
        here = [tokens // (where.tp_size if config.sequence_parallel else 1) for tokens in local]
    total = reduce_(torch.tensor(sum(here), device=inputs[0].tokens.device), where.data)
    return [RoutedTokens(count, total) for count in here]


def balance_coefficients(config: TransformerConfig) -> dict[str, float]:
    """Return the nonzero coefficients of expert-balancing losses, by Megatron's names."""
    if not config.num_moe_experts:
        return {}
    kinds = getattr(config, "moe_router_load_balancing_type", "aux_loss")
    values = getattr(config, "moe_aux_loss_coeff", 0.0)
    by_kind = dict(zip(kinds, values, strict=True)) if isinstance(values, list) else {kinds: values}
    return {kind: value for kind, value in by_kind.items() if value}


def has_auxiliary_loss(config: TransformerConfig) -> bool:
    """Return whether a model adds losses in backward: its routers, or DSA's indexer."""
    coefficients = [getattr(config, "dsa_indexer_loss_coeff", None)]
    if config.num_moe_experts:
        coefficients.append(getattr(config, "moe_z_loss_coeff", None))
    return any(coefficients) or bool(balance_coefficients(config))


def forget_scales(config: TransformerConfig) -> None:
    """Reset the scale of auxiliary losses; a backward outside a schedule leaves a scale of another shape."""
    MoEAuxLossAutoScaler.main_loss_backward_scale = None
    if getattr(config, "experimental_attention_variant", None) == "dsa":
        from megatron.core.transformer.experimental_attention_variant.dsa import DSAIndexerLossAutoScaler

        DSAIndexerLossAutoScaler.main_loss_backward_scale = None


@contextlib.contextmanager
def without_auxiliary_losses(config: TransformerConfig) -> Iterator[None]:
    """Turn off a model's losses in backward inside a `with` block."""
    names = ("moe_aux_loss_coeff", "moe_z_loss_coeff", "dsa_indexer_loss_coeff")
    before = {name: getattr(config, name) for name in names if hasattr(config, name)}
    for name, value in before.items():
        setattr(config, name, [0.0] * len(value) if isinstance(value, list) else 0.0 if "aux" in name else None)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(config, name, value)


def check_auxiliary_losses(config: TransformerConfig, cp_size: int, *, by_megatron: bool = False) -> None:
    """Refuse auxiliary losses whose gradients depend on the layout, by definition or by version.

    `by_megatron`: Megatron's routers compute `seq_aux_loss` and `global_aux_loss`, not `RouterBalance`.

    Raises:
        ValueError: on a version that gets them wrong: DSA's indexer, or context ranks without calculate_per_token_loss. By
            Megatron: experts balanced over data ranks (`global_aux_loss`) or by sequences (`seq_aux_loss`).
    """
    if not has_auxiliary_loss(config):
        return
    per_token, coefficients = config.calculate_per_token_loss, balance_coefficients(config)
    name = "moe_router_load_balancing_type"
    if by_megatron and "global_aux_loss" in coefficients:
        raise ValueError(
            f"{name} = 'global_aux_loss' balances what data ranks have routed in the micro-batches so far: its gradient "
            "depends on their number and order, and Megatron divides it by the data ranks; use `forward_backward`, which "
            "balances the whole step, or 'aux_loss'"
        )
    if by_megatron and "seq_aux_loss" in coefficients:
        raise ValueError(
            f"{name} = 'seq_aux_loss' takes a packed row for one sequence and padding for tokens of it, and weighs rows by "
            "micro-batches; use `forward_backward`, which balances each sequence's own tokens, or 'aux_loss'"
        )
    if getattr(config, "dsa_indexer_loss_coeff", None) and not schedules_scale_the_indexer():
        raise ValueError(
            f"dsa_indexer_loss_coeff = {config.dsa_indexer_loss_coeff} is scaled by no schedule of this megatron-core: each "
            "micro-batch adds all of it; use 0.19, or 0"
        )
    if cp_size > 1 and not per_token and getattr(config, "dsa_indexer_loss_coeff", None):
        raise ValueError(
            f"dsa_indexer_loss_coeff = {config.dsa_indexer_loss_coeff} at CP {cp_size} with calculate_per_token_loss = False "
            "counts times CP in this megatron-core, whose context ranks each add a mean of their own; use "
            "calculate_per_token_loss = True, or 0"
        )
    if cp_size > 1 and not per_token and not auxiliary_losses_know_context_ranks():
        raise ValueError(
            f"auxiliary losses at CP {cp_size} with calculate_per_token_loss = False are divided by CP in this megatron-core; "
            "use calculate_per_token_loss = True, or 0.16"
        )
