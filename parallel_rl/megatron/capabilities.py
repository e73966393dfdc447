"""Capabilities of the installed megatron-core, asked of its code: a version number says little about a branch or a patch."""

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
    """Whether routers multiply an auxiliary loss by the tokens of all tensor and context ranks (0.19), or by their own.

    With calculate_per_token_loss alone, whose division by tokens this is to cancel.

    >>> routers_count_the_whole_row() in (True, False)
    True
    """
    return "tp_cp_group" in TopKRouter.attach_and_log_load_balancing_loss.__code__.co_names


@cache
def auxiliary_losses_know_context_ranks() -> bool:
    """Whether the schedule multiplies auxiliary losses by CP, as DDP's average over context ranks asks (not in 0.15).

    Without calculate_per_token_loss, that is. Megatron's own function is asked.

    >>> auxiliary_losses_know_context_ranks() in (True, False)
    True
    """
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
    """Whether the schedules scale the loss of DSA's indexer (0.19); before, each micro-batch adds all of it.

    >>> schedules_scale_the_indexer() in (True, False)
    True
    """
    return "experimental_attention_variant_loss_scale_func" in TransformerConfig.__dataclass_fields__


@cache
def heads_take_packed_rows() -> bool:
    """Whether heads of multi-token prediction run on packed rows (from 0.16 on).

    >>> heads_take_packed_rows() in (True, False)
    True
    """
    return hasattr(multi_token_prediction, "_roll_tensor_packed_seq")


@cache
def heads_recompute_packed_rows() -> bool:
    """Whether heads of multi-token prediction may recompute packed rows' activations (from 0.18 on); before, a TypeError.

    >>> heads_recompute_packed_rows() in (True, False)
    True
    """
    recompute = multi_token_prediction.MultiTokenPredictionLayer._checkpointed_forward
    return "packed_seq_params" in inspect.signature(recompute).parameters


@cache
def norms_can_be_recomputed() -> bool:
    """Whether activation recomputation takes norms by themselves: it asks Transformer Engine for FP8, used or not.

    >>> norms_can_be_recomputed() in (True, False)
    True
    """
    return hasattr(random, "FP8GlobalStateManager")
