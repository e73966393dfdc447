"""Micro-batches of a step, checked on all ranks before anything is sent."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.utils import get_model_config
from torch import Tensor

from parallel_rl.agreement import raise_on_all_ranks
from parallel_rl.groups import ParallelGroups
from parallel_rl.layout import CPLayout
from parallel_rl.losses.core.call import LossFunction
from parallel_rl.losses.core.counted import masked_data
from parallel_rl.losses.nll import NLLLoss
from parallel_rl.megatron.arguments import fault_of
from parallel_rl.megatron.auxiliary import check_auxiliary_losses, has_auxiliary_loss
from parallel_rl.megatron.capabilities import heads_take_packed_rows
from parallel_rl.megatron.fp8 import check_positions, compares_data_ranks, positions_unit
from parallel_rl.megatron.lm_head import FusedHead, is_fused
from parallel_rl.megatron.loop_checks import check_fields, check_step
from parallel_rl.megatron.micro_batch import MicroBatch, padded_batch
from parallel_rl.megatron.model import unwrap
from parallel_rl.megatron.model_config import CUT
from parallel_rl.megatron.tree_model import check_tree_model
from parallel_rl.replicated import Replicated
from parallel_rl.validation import get_validation

_FIRST_STEPS = 3  # in which ranks compare their data on GPUs too, at the price of a host sync
_MULTIPLE = 128  # of columns on a tensor rank, Megatron's default make_vocab_size_divisible_by
_ADVICE = (
    "tensor and pipeline ranks of one data rank hold the same micro-batches: seed the sampler by the data rank alone",
    "context ranks hold the same whole rows: give whole rows, the loss cuts them (get_batch_on_this_cp_rank cuts them before)",
)
#: columns, and vocab_size of the loss, that `warn_of_padding` spoke of
_WARNED: set[tuple[int, int | None]] = set()
#: steps of a model
_STEPS: WeakKeyDictionary[torch.nn.Module, int] = WeakKeyDictionary()


def prepare(
    models: Sequence[torch.nn.Module],
    loss_fn: LossFunction,
    batches: Sequence[MicroBatch | Mapping[str, Tensor]],
    head: FusedHead | None,
    mtp_loss: NLLLoss | None,
    groups: ParallelGroups,
    *,
    allow_dropout: bool = False,
) -> list[MicroBatch]:
    """The micro-batches of a step, once every rank of the world knows that it has good ones.

    Raises:
        ValueError: see `forward_backward`.
    """
    config = get_model_config(models[0])
    like = torch.empty(0, device=next(models[0].parameters()).device)
    layout = [parallel_state.get_model_parallel_group(), groups.context]
    fault = fault_of(models, batches)
    batches = [] if fault else batches
    data = [batch.data if isinstance(batch, MicroBatch) else batch for batch in batches]
    ids = [each.get("input_ids") for each in data]
    same = {
        "the number of micro-batches": len(batches),
        "the number of tokens in their rows": sum(field.numel() for field in ids if isinstance(field, Tensor)),
    }

    def check() -> list[MicroBatch]:
        if fault is not None:
            raise fault
        cut: CPLayout = getattr(config, CUT, "zigzag")
        prepared = [
            batch if isinstance(batch, MicroBatch) else padded_batch(batch, device=like.device, cp_layout=cut)
            for batch in batches or _masked(models, loss_fn, groups)
        ]
        # The last pipeline stage alone calls the loss; what it would miss, the other stages must hear before they send.
        check_fields(loss_fn.requirements, [batch.data for batch in prepared])
        check_step(models, loss_fn.requirements, allow_dropout=allow_dropout, trains_heads=mtp_loss is not None)
        _check_model(models, head, groups)
        _check_heads(models, mtp_loss)
        if mtp_loss is not None and any(batch.packed for batch in prepared) and not heads_take_packed_rows():
            raise ValueError("mtp_loss with packed rows: heads of this megatron-core take padded ones only; use 0.16")
        if any(batch.input.tree for batch in prepared):
            inner = [unwrap(model) for model in models]
            check_tree_model(inner, trains_heads=mtp_loss is not None, balances=has_auxiliary_loss(config))
        check_auxiliary_losses(config, groups.cp_size)
        check_positions(config, [batch.input.tokens for batch in prepared])
        _check_context(models, loss_fn, prepared, groups)
        _check_pipeline(models, [batch.input.tokens for batch in prepared])
        return prepared

    sharing = {}
    if parallel_state.get_expert_model_parallel_world_size() > 1:  # experts are asked by data ranks together
        sharing = {"the number of micro-batches (with expert parallelism; add masked ones)": len(batches)}
    elif compares_data_ranks(config):
        why = "with FP8 by delayed scaling; add masked ones, or choose another fp8_recipe"
        sharing = {f"the number of micro-batches ({why})": len(batches)}

    step = _STEPS[models[0]] = _STEPS.get(models[0], 0) + 1
    looks = None if step <= _FIRST_STEPS and get_validation() != "never" else like
    fields = (*loss_fn.requirements.fields, *loss_fn.requirements.optional)
    names = ("input_ids", "token_mask", "sample_mask", *(field.name for field in fields if field.per != "local"))
    alike = Replicated(data, names, whole=("input_ids",), advice=_ADVICE)
    # First within what holds the same rows, then over the ranks with other rows, which agree in nothing but their health.
    prepared = raise_on_all_ranks(
        lambda: raise_on_all_ranks(check, layout, looks, same, alike=alike),
        [groups.data],
        None if sharing else looks,
        sharing,
    )
    inner = unwrap(models[0])
    columns = getattr(inner, "vocab_size", None)
    if step == 1 and columns is not None and loss_fn.requirements.reads != "scalar" and dist.get_rank() == 0:
        warn_of_padding(loss_fn, columns, groups.tp_size, getattr(inner, "true_vocab_size", None))
    return prepared


def _masked(
    models: Sequence[torch.nn.Module], loss_fn: LossFunction, groups: ParallelGroups
) -> list[Mapping[str, Tensor]]:
    """Input for a data rank without a micro-batch: its model takes part in the collectives of the others."""
    needs = loss_fn.requirements
    local = [field.name for field in needs.fields if field.per == "local"]
    if local:
        raise ValueError(f"batches is empty; {local} cannot be made up, pass a micro-batch whose sample_mask is 0")
    width = 2 * groups.cp_size * math.lcm(groups.tp_size, positions_unit(get_model_config(models[0])))
    data = masked_data(needs.with_kept_ids(), 2 if needs.paired else 1, width)
    # an interleaved schedule wants as many micro-batches as stages
    return [data] * (parallel_state.get_pipeline_model_parallel_world_size() if len(models) > 1 else 1)


def warn_of_padding(loss_fn: object, columns: int, tp: int, true: int | None = None) -> None:
    """Warn once of padding in every softmax: the model has more columns than tokens, and the loss does not know how many.

    Args:
        columns: of the vocabulary, padding included, over all tensor ranks.
        true: V, if it is known; None: Megatron's padding is presumed where `columns` are a multiple of what it pads to.
    """
    options = getattr(getattr(loss_fn, "func", loss_fn), "options", None)  # of a functools.partial, too
    size = getattr(options, "vocab_size", None)
    if options is None or (columns, size) in _WARNED:
        return
    if true is not None and true != (columns if size is None else size):
        known, wanted = f"{true} of which are tokens", str(true)
    elif true is None and size is None and columns % (_MULTIPLE * tp) == 0:
        known, wanted = "a multiple of what Megatron pads to", "the tokenizer's size"
    else:
        return
    _WARNED.add((columns, size))
    warnings.warn(
        f"the loss has vocab_size = {size}, the model {columns} columns ({columns // tp} on each tensor rank), {known}; pass "
        f"vocab_size = {wanted} to the loss: columns of padding that it does not know are in every softmax",
        stacklevel=4,
    )


def _check_model(models: Sequence[torch.nn.Module], head: FusedHead | None, groups: ParallelGroups) -> None:
    if groups.tp_size > 1 and not all(getattr(unwrap(model), "parallel_output", True) for model in models):
        raise ValueError(
            "the GPTModel has parallel_output = False, which gathers the whole vocabulary on every tensor rank: the loss would "
            "train rank 0's columns alone; build it with parallel_output = True"
        )
    finalized = get_model_config(models[0]).finalize_model_grads_func is not None
    wrapped = [hasattr(model, "finish_grad_sync") for model in models]
    if any(is_wrapped != finalized for is_wrapped in wrapped):
        raise ValueError(
            "config.finalize_model_grads_func must be set if, and only if, every model chunk is wrapped in Megatron's data "
            f"parallelism; it is {'set' if finalized else 'None'}, wrapped: {wrapped}. `wrap_model` sees to both"
        )
    config = get_model_config(models[0])
    if config.num_moe_experts and config.moe_router_enable_expert_bias and not finalized:
        raise ValueError(
            "moe_router_enable_expert_bias = True has no effect without Megatron's data parallelism, whose "
            "`finalize_model_grads` moves the biases"
        )
    if config.num_moe_experts and config.expert_tensor_parallel_size != config.tensor_model_parallel_size:
        named = [each for model in models for each in model.named_parameters()]
        if any(".experts." in name and getattr(parameter, "allreduce", True) for name, parameter in named):
            raise ValueError(
                f"tensor ranks hold replicas of experts (expert_tensor_parallel_size = {config.expert_tensor_parallel_size} of "
                f"{config.tensor_model_parallel_size}) whose gradients Megatron does not sum over them without expert "
                "parallelism: their parameters need allreduce = False before DDP is made (`build_model` sees to it)"
            )
    if head is None and any(is_fused(model) for model in models):
        raise ValueError(
            "the model has a fused head, so its output is hidden states; pass what `fuse_head` gave as head="
        )


def _check_heads(models: Sequence[torch.nn.Module], mtp_loss: NLLLoss | None) -> None:
    heads = get_model_config(models[0]).mtp_num_layers
    if mtp_loss is not None and not heads:
        raise ValueError(
            "mtp_loss is given, but mtp_num_layers = None: the model has no heads of multi-token prediction"
        )
    if mtp_loss is not None and getattr(get_model_config(models[0]), "mtp_detach_heads", False):
        raise ValueError(
            "mtp_detach_heads = True with mtp_loss: the loss of the heads would train the LM head, which they share; "
            "set it to False"
        )
    wrappers = [model.ddp_config for model in models if isinstance(model, DistributedDataParallel)]
    if heads and mtp_loss is None and any(wrapper.overlap_grad_reduce for wrapper in wrappers):
        raise ValueError(
            f"overlap_grad_reduce = True waits for the gradients of the heads (mtp_num_layers = {heads}), which have none "
            "without mtp_loss; give it, or build the model without heads"
        )


def _check_context(
    models: Sequence[torch.nn.Module], loss_fn: LossFunction, batches: Sequence[MicroBatch], groups: ParallelGroups
) -> None:
    config = get_model_config(models[0])
    of_model, of_loss = getattr(config, CUT, "zigzag"), getattr(loss_fn, "options", None)
    for batch in batches:
        wanted = batch.input.context.layout
        if wanted != of_model or (of_loss is not None and wanted != of_loss.cp_layout):
            said = "" if of_loss is None else f", the loss {of_loss.cp_layout!r}"
            raise ValueError(f"a micro-batch is cut {wanted!r} over context ranks, the model wants {of_model!r}{said}")
    if any(batch.context_group != "model" for batch in batches) and (groups.cp_size > 1 or config.num_moe_experts):
        raise ValueError(
            f"context groups of micro-batches need context_parallel_size = 1 and no experts, got {groups.cp_size} and "
            f"num_moe_experts = {config.num_moe_experts}: the groups are made of data ranks"
        )


def _check_pipeline(models: Sequence[torch.nn.Module], tokens: Sequence[Tensor]) -> None:
    config, stages = get_model_config(models[0]), parallel_state.get_pipeline_model_parallel_world_size()
    shapes = sorted({tuple(each.shape) for each in tokens})
    if stages > 1 and len(shapes) > 1 and not config.variable_seq_lengths:
        raise ValueError(
            f"micro-batches have local shapes {shapes}, but pipeline stages with variable_seq_lengths = False exchange one "
            "shape only; give all one width, by padding or `packed_batch(total=...)`, or set variable_seq_lengths = True (and "
            "moe_token_dispatcher_type = 'alltoall', which Megatron then wants of dense models too)"
        )
    if stages == 2 and len(models) > 1 and not config.overlap_p2p_comm:
        raise ValueError(
            "overlap_p2p_comm = False mixes up what two interleaved stages send each other, since the next and the previous "
            "stage are one rank; set it, and batch_p2p_comm = False (`build_config` does with virtual_pp)"
        )
