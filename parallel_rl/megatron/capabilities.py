"""Capabilities of the installed megatron-core, read from its code because branches and patches share versions."""

from __future__ import annotations

import inspect
from functools import cache
from types import SimpleNamespace

import torch
from megatron.core.pipeline_parallel.schedules import forward_step_calc_loss
from megatron.core.tensor_parallel import random
from megatron.core.transformer import multi_token_prediction
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_config import TransformerConfig


@cache
def routers_count_the_whole_row() -> bool:
    """Return whether routers scale auxiliary losses by tokens of all tensor and context ranks (from 0.19)."""
    return "tp_cp_group" in TopKRouter.attach_and_log_load_balancing_loss.__code__.co_names


@cache
def auxiliary_losses_know_context_ranks() -> bool:
    """Return whether schedules multiply auxiliary losses by CP if the loss is not per token (not in 0.15)."""
    config = SimpleNamespace(
        calculate_per_token_loss=False, timers=None, num_moe_experts=1, mtp_num_layers=None, grad_scale_func=None
    )
    before = MoEAuxLossAutoScaler.main_loss_backward_scale
    MoEAuxLossAutoScaler.main_loss_backward_scale = None
    try:
        forward_step_calc_loss(
            None, torch.ones(()), lambda loss: (loss.clone(), {}), config, None, False, 1, [], cp_group_size=2,
            is_last_stage=True,
        )  # fmt: skip
        return bool(MoEAuxLossAutoScaler.main_loss_backward_scale == 2)
    finally:
        MoEAuxLossAutoScaler.main_loss_backward_scale = before


@cache
def schedules_scale_the_indexer() -> bool:
    """Return whether schedules scale DSA's indexer loss (0.19); before, each micro-batch adds all of it."""
    return "experimental_attention_variant_loss_scale_func" in TransformerConfig.__dataclass_fields__


@cache
def heads_take_packed_rows() -> bool:
    """Return whether heads of multi-token prediction run on packed rows (from 0.16 on)."""
    return hasattr(multi_token_prediction, "_roll_tensor_packed_seq")


@cache
def heads_recompute_packed_rows() -> bool:
    """Return whether MTP heads can recompute packed rows (from 0.18 on); before, a TypeError."""
    recompute = multi_token_prediction.MultiTokenPredictionLayer._checkpointed_forward
    return "packed_seq_params" in inspect.signature(recompute).parameters


@cache
def norms_can_be_recomputed() -> bool:
    """Return whether norms can be recomputed alone: Megatron then needs Transformer Engine, FP8 or not."""
    return hasattr(random, "FP8GlobalStateManager")
