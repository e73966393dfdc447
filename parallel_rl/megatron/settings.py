"""Refuse or warn of settings of a training model that change numbers or stop a single rank."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.utils import get_model_config

from parallel_rl.megatron.auxiliary import has_auxiliary_loss
from parallel_rl.megatron.lm_head import FusedHead, is_fused
from parallel_rl.megatron.loop_checks import loss_scale, steps_of, warn
from parallel_rl.megatron.model import unwrap
from parallel_rl.megatron.model_config import SAME_EVERYWHERE, layout_dependence

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_config import TransformerConfig

    from parallel_rl.losses.core.requirements import Requirements


def check_model(
    models: Sequence[torch.nn.Module],
    needs: Requirements,
    head: FusedHead | None,
    *,
    allow_dropout: bool,
    trains_heads: bool,
) -> None:
    """Refuse models with which `forward_backward` is wrong or cannot run; warn of others in step 1.

    ValueError as of `check_sizes`, `check_heads` and `check_settings`; for logits gathered over tensor ranks, a wrapper without
    `finalize_model_grads_func`, replicated experts that are not summed, or a fused head without head=.
    """
    config, first = get_model_config(models[0]), steps_of(models) == 0
    check_sizes(config)
    if getattr(config, "overlap_moe_expert_parallel_comm", False):
        raise ValueError(
            "overlap_moe_expert_parallel_comm = True needs a forward step that returns a schedule plan; set it to False"
        )
    if any(model.training for model in models):
        check_settings(config, needs, allow_dropout=allow_dropout, trains_heads=trains_heads, first=first)
    elif first and has_auxiliary_loss(config):
        warn("the model is in eval mode, in which routers leave out their auxiliary losses; call model.train()")
    _check_wrappers(models)
    _check_stages(models)
    _check_output(models, head)
    check_heads(config, trains_heads)
    overlaps = any(
        model.ddp_config.overlap_grad_reduce for model in models if isinstance(model, DistributedDataParallel)
    )
    if config.mtp_num_layers and not trains_heads and overlaps:
        raise ValueError(
            f"overlap_grad_reduce = True waits for the gradients of the heads (mtp_num_layers = {config.mtp_num_layers}), "
            "which have none without mtp_loss; give it, or build the model without heads"
        )
    if first:
        _check_trained(models)


def check_sizes(config: TransformerConfig) -> None:
    """Refuse a config with other sizes than Megatron's process groups, since Megatron reads both.

    Also refuses two interleaved stages without overlap_p2p_comm.
    """
    sizes = {
        "tensor_model_parallel_size": parallel_state.get_tensor_model_parallel_world_size(),
        "context_parallel_size": parallel_state.get_context_parallel_world_size(),
        "pipeline_model_parallel_size": parallel_state.get_pipeline_model_parallel_world_size(),
    }
    for name, size in sizes.items():
        if (written := getattr(config, name, size)) != size:
            raise ValueError(
                f"the model's config has {name} = {written}, the process groups have {size}; give TransformerConfig the sizes "
                "of initialize_model_parallel"
            )
    interleaved = (config.virtual_pipeline_model_parallel_size or 1) > 1
    if sizes["pipeline_model_parallel_size"] == 2 and interleaved and not config.overlap_p2p_comm:
        raise ValueError(
            "overlap_p2p_comm = False mixes up what two interleaved stages send each other, since the next and the previous "
            "stage are one rank; set it, and batch_p2p_comm = False (`build_config` does with virtual_pp)"
        )


def check_settings(
    config: TransformerConfig, needs: Requirements | None, *, allow_dropout: bool, trains_heads: bool, first: bool
) -> None:
    """Refuse dropout with recorded log-probs; in the `first` step warn of settings wrong for most losses.

    ValueError also for a loss scale that is no finite positive number, and a second scale of experts' auxiliary losses.
    """
    drops = {name: getattr(config, name) for name in ("attention_dropout", "hidden_dropout") if getattr(config, name)}
    if drops and not allow_dropout:
        written = ", ".join(f"{name} = {value}" for name, value in drops.items())
        recorded = [] if needs is None else [name for name in needs.names if name.endswith("logprobs")]
        if recorded:
            raise ValueError(
                f"{written}: this loss compares the policy with {', '.join(recorded)}, and dropout changes the policy in "
                "each forward and on each layout. Set attention_dropout = 0 and hidden_dropout = 0 in the model's config, or "
                "pass "
                "allow_dropout=True"
            )
        if first:
            warn(
                f"{written}: dropout differs between layouts, so the loss does too; set attention_dropout = 0 and "
                "hidden_dropout = 0, or pass allow_dropout=True"
            )
    if getattr(config, "moe_grad_scale_func", None) is not None:
        raise ValueError(
            "config.moe_grad_scale_func is set (NeMo-RL sets it), which would scale the auxiliary losses of experts once more; "
            "set it to None: their scale follows from the counts of the step"
        )
    if first and config.fp16 and config.grad_scale_func is None:
        warn(
            "fp16 without config.grad_scale_func: small gradients become 0, and Megatron's optimizer divides by a scale that "
            "the loss was not multiplied by; set config.grad_scale_func = optimizer.scale_loss"
        )
    if first:
        check_loss_scale(config)
    experts = [name for name in vars(config) if name.startswith("moe_") and name in SAME_EVERYWHERE]
    if first and config.num_moe_experts and (dependence := layout_dependence(vars(config), experts)):
        warn(dependence)
    if first and config.mtp_num_layers and not trains_heads:
        warn(
            f"mtp_num_layers = {config.mtp_num_layers} without mtp_loss: the heads of multi-token prediction do not learn; "
            "pass mtp_loss=NLLLoss(...)"
        )


def check_loss_scale(config: TransformerConfig) -> None:
    """Refuse a `grad_scale_func` that does not multiply a loss by a finite positive number."""
    if not 0 < (scale := loss_scale(config)) < math.inf:
        raise ValueError(
            f"config.grad_scale_func must multiply a loss by a finite scale above 0, got {scale} for a loss of 1; set "
            "config.grad_scale_func = optimizer.scale_loss"
        )


def check_heads(config: TransformerConfig, trains_heads: bool) -> None:
    """Raise ValueError for a loss of MTP heads that the model lacks, or that would train the LM head."""
    if trains_heads and not config.mtp_num_layers:
        raise ValueError(
            "mtp_loss is given, but mtp_num_layers = None: the model has no heads of multi-token prediction"
        )
    if trains_heads and config.mtp_loss_scaling_factor is None:  # the default of megatron-core 0.15
        raise ValueError("mtp_loss_scaling_factor = None with mtp_loss; set the weight of the heads' loss, such as 0.1")
    if trains_heads and getattr(config, "mtp_detach_heads", False):
        raise ValueError(
            "mtp_detach_heads = True with mtp_loss: the loss of the heads would train the LM head, which they share; "
            "set it to False"
        )


def check_finalizing(config: TransformerConfig, ddp: bool) -> None:
    """Raise ValueError for `ddp` that contradicts `config.finalize_model_grads_func`."""
    finalizes = config.finalize_model_grads_func is not None
    if ddp and not finalizes:
        raise ValueError(
            "ddp = True, but config.finalize_model_grads_func is None, so no gradient is summed over ranks: wrap the model in "
            "Megatron's DDP and set it (`wrap_model` does both), or pass ddp=False and call `sum_gradients`"
        )
    if finalizes and not ddp:
        raise ValueError(
            "ddp = False, but config.finalize_model_grads_func is set, so the schedule takes the model for one in Megatron's "
            "DDP; pass ddp=True, or set it to None and call `sum_gradients`"
        )


def check_rows(models: Sequence[torch.nn.Module], shapes: Sequence[tuple[int, ...]], *, packed: bool) -> None:
    """Refuse micro-batches that the model's attention, or the exchange between its stages, cannot take.

    shapes: of the micro-batches' tokens on this rank. ValueError for packed rows on Megatron's own attention, several shapes,
    or a wrong number of micro-batches for interleaved stages.
    """
    config, stages = get_model_config(models[0]), parallel_state.get_pipeline_model_parallel_world_size()
    if packed and any(isinstance(module, DotProductAttention) for model in models for module in model.modules()):
        raise ValueError(
            "packed rows on Megatron's DotProductAttention, which takes padded ones only; build the layers by "
            "`layer_spec(config)`, which takes Transformer Engine's where it is installed"
        )
    if stages > 1 and len(set(shapes)) > 1 and not config.variable_seq_lengths:
        raise ValueError(
            f"micro-batches have local shapes {sorted(set(shapes))}, but pipeline stages with variable_seq_lengths = False "
            "exchange one shape only; give all one width, by padding or `packed_batch(total=...)`, or set "
            "variable_seq_lengths = True (and moe_token_dispatcher_type = 'alltoall', which Megatron then wants of dense "
            "models too)"
        )
    group = config.microbatch_group_size_per_vp_stage or stages
    if len(models) > 1 and (len(shapes) < group or 0 < len(shapes) % group < stages):
        raise ValueError(
            f"{len(shapes)} micro-batches on {stages} stages of {len(models)} chunks each, but their schedule takes a "
            f"multiple of {group}; add masked ones (sample_mask 0)"
        )


def _check_stages(models: Sequence[torch.nn.Module]) -> None:
    """Refuse chunks other than the schedule's, and a dtype between stages other than the model's."""
    config, chunks = get_model_config(models[0]), parallel_state.get_virtual_pipeline_model_parallel_world_size() or 1
    places = [getattr(unwrap(model), "vp_stage", None) for model in models]
    if len(models) != chunks or (chunks > 1 and None not in places and places != list(range(chunks))):
        raise ValueError(
            f"model has {len(models)} chunks (vp_stage {places}), the schedule of virtual_pipeline_model_parallel_size = "
            f"{chunks} runs {chunks}; give the list of all chunks of this rank, in their order"
        )
    stage, stages = (
        parallel_state.get_pipeline_model_parallel_rank(),
        parallel_state.get_pipeline_model_parallel_world_size(),
    )
    ends = [(model.pre_process, model.post_process) for model in map(unwrap, models) if hasattr(model, "pre_process")]
    wanted = [(stage == i == 0, stage == stages - 1 and i == chunks - 1) for i in range(chunks)]
    if stages > 1 and ends and ends != wanted:
        raise ValueError(
            f"(pre_process, post_process) of the chunks are {ends} on pipeline stage {stage}, which calls for {wanted}: the "
            "first chunk of the first stage embeds tokens, the last one of the last stage has the head"
        )
    dtype = next(models[0].parameters()).dtype
    if stages > 1 and config.pipeline_dtype != dtype and not config.fp32_residual_connection:
        raise ValueError(
            f"config.pipeline_dtype = {config.pipeline_dtype}, in which stages receive hidden states, but the model is in "
            f"{dtype}; set config.pipeline_dtype = {dtype}"
        )


def _check_output(models: Sequence[torch.nn.Module], head: FusedHead | None) -> None:
    split = parallel_state.get_tensor_model_parallel_world_size() > 1
    if split and not all(getattr(unwrap(model), "parallel_output", True) for model in models):
        raise ValueError(
            "the GPTModel has parallel_output = False, which gathers the whole vocabulary on every tensor rank: the loss would "
            "train rank 0's columns alone; build it with parallel_output = True"
        )
    if head is None and any(is_fused(model) for model in models):
        raise ValueError(
            "the model has a fused head, so its output is hidden states; pass what `fuse_head` gave as head="
        )


def _check_wrappers(models: Sequence[torch.nn.Module]) -> None:
    config = get_model_config(models[0])
    finalized = config.finalize_model_grads_func is not None
    if any(isinstance(model, torch.nn.parallel.DistributedDataParallel) for model in models):
        raise ValueError(
            "the model is in torch's DistributedDataParallel, which averages over ranks that `forward_backward` sums over; "
            "wrap it in Megatron's (`wrap_model`), or in none"
        )
    wrapped = [hasattr(model, "finish_grad_sync") for model in models]
    if any(is_wrapped != finalized for is_wrapped in wrapped):
        raise ValueError(
            "config.finalize_model_grads_func must be set if, and only if, every model chunk is wrapped in Megatron's data "
            f"parallelism; it is {'set' if finalized else 'None'}, wrapped: {wrapped}. `wrap_model` does both"
        )
    check_scaling_of_wrappers(models, config)
    if not config.num_moe_experts:
        return
    if config.moe_router_enable_expert_bias and not finalized:
        raise ValueError(
            "moe_router_enable_expert_bias = True has no effect without Megatron's data parallelism, whose "
            "`finalize_model_grads` moves the biases"
        )
    if config.expert_tensor_parallel_size != config.tensor_model_parallel_size:
        named = [parameter for model in models for parameter in model.named_parameters()]
        if any(".experts." in name and getattr(parameter, "allreduce", True) for name, parameter in named):
            raise ValueError(
                f"tensor ranks hold replicas of experts (expert_tensor_parallel_size = {config.expert_tensor_parallel_size} of "
                f"{config.tensor_model_parallel_size}) whose gradients Megatron does not sum over them without expert "
                "parallelism: their parameters need allreduce = False before DDP is made (`build_model` sets it)"
            )


def check_scaling_of_wrappers(models: Sequence[torch.nn.Module], config: TransformerConfig) -> None:
    """Refuse a `calculate_per_token_loss` set after DDP read it, which would divide wrongly."""
    wrappers = [model for model in models if isinstance(model, DistributedDataParallel)]
    for wrapper in wrappers:
        ranks = parallel_state.get_data_parallel_world_size(with_context_parallel=True)
        keeps_sums = config.calculate_per_token_loss or wrapper.ddp_config.average_in_collective
        factor = wrapper.buffers[0].gradient_scaling_factor if wrapper.buffers else None
        if factor is not None and factor != (1.0 if keeps_sums else 1.0 / ranks):
            raise ValueError(
                f"config.calculate_per_token_loss = {config.calculate_per_token_loss} was set after Megatron's DDP was made, "
                f"which multiplies gradients by {factor:g} as it was before; set it before the model is wrapped"
            )


def _check_trained(models: Sequence[torch.nn.Module]) -> None:
    """Refuse a model without trained parameters, whose schedule has no backward; a stage may be frozen."""
    if any(parameter.requires_grad for model in models for parameter in model.parameters()):
        return
    text = (
        "no parameter of {} requires a gradient, so nothing here learns; set requires_grad before the model is wrapped"
    )
    if parallel_state.get_pipeline_model_parallel_world_size() == 1:
        raise ValueError(text.format("the model"))
    warn(text.format("this pipeline stage"))
