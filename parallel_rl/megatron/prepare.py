"""Micro-batches and arguments of a step, checked on all ranks before anything is sent."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.utils import get_model_config
from torch import Tensor

from parallel_rl.agreement import raise_on_all_ranks
from parallel_rl.groups import ParallelGroups
from parallel_rl.layout import CPLayout
from parallel_rl.losses.core.call import LossFunction
from parallel_rl.losses.core.run import masked_data
from parallel_rl.losses.nll import NLLLoss
from parallel_rl.megatron.auxiliary import check_auxiliary_losses, has_auxiliary_loss
from parallel_rl.megatron.capabilities import heads_take_packed_rows
from parallel_rl.megatron.lm_head import FusedHead
from parallel_rl.megatron.loop_checks import (
    fact_of_validation,
    facts_of_loss,
    facts_of_replicas,
    facts_of_weights,
    is_checked,
    steps_of,
)
from parallel_rl.megatron.micro_batch import MicroBatch, padded_batch
from parallel_rl.megatron.model import unwrap
from parallel_rl.megatron.model_config import CUT
from parallel_rl.megatron.row_checks import (
    ROWS,
    check_columns,
    check_ids,
    warn_of_padding,
    warn_of_precision,
    warn_of_prompts,
    warn_of_repeats,
    warn_of_same_rows,
    warn_of_shifted_mask,
)
from parallel_rl.megatron.settings import check_model, check_rows
from parallel_rl.megatron.trees import check_tree_model
from parallel_rl.packing import check_packed
from parallel_rl.replicated import Replicated
from parallel_rl.statistics import Statistics

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_config import TransformerConfig


def split_partial(loss_fn: object) -> tuple[LossFunction, Statistics | None]:
    """Split `functools.partial(loss_fn, statistics=...)` in two; ValueError for a name, class or function."""
    if isinstance(loss_fn, LossFunction):
        return loss_fn, None
    if isinstance(loss_fn, partial):
        if isinstance(loss_fn.func, LossFunction) and not loss_fn.args and set(loss_fn.keywords) == {"statistics"}:
            return loss_fn.func, loss_fn.keywords["statistics"]
        raise ValueError(
            f"loss_fn is {loss_fn!r}; a partial may give statistics= alone, the constructor takes all else"
        )
    refuse_name_and_class(loss_fn)
    name = getattr(loss_fn, "__name__", type(loss_fn).__name__)
    raise ValueError(
        f"loss_fn must be a loss of this package, got {name}; `register_objective` makes one of a function (logprobs, batch)"
    )


def refuse_name_and_class(loss_fn: object) -> None:
    """Raise ValueError for the name or the class of a loss, and name the call that makes the loss."""
    if isinstance(loss_fn, str):
        raise ValueError(
            f"loss_fn = {loss_fn!r} is a name; give a loss: get_loss({loss_fn!r})({{}}, vocab_size=...), or of a recipe "
            f"kind, config = load_recipe({loss_fn!r}) and kind(config, vocab_size=...)"
        )
    if isinstance(loss_fn, type):
        raise ValueError(
            f"loss_fn is the class {loss_fn.__name__}; give an instance, {loss_fn.__name__}(vocab_size=...)"
        )


def fault_of(
    models: Sequence[torch.nn.Module], batches: object, head: object, groups: ParallelGroups
) -> ValueError | None:
    """Return the first fault of micro-batches, head, groups or gradients; all ranks raise it in `prepare`."""
    try:
        if not torch.is_grad_enabled():
            raise ValueError(
                "forward_backward runs under torch.no_grad (or inference_mode), where there is no backward; call it outside, "
                "or score with `forward_only`"
            )
        _check_batches(batches)
        _check_head(models, head)
        _check_groups(groups)
    except ValueError as error:
        return error
    return None


def _check_batches(batches: object) -> None:
    if isinstance(batches, Mapping | MicroBatch):
        raise ValueError(
            f"batches is one {type(batches).__name__}; give the step's micro-batches as a list, [batch] where it has one"
        )
    if not isinstance(batches, Sequence) or isinstance(batches, str):
        raise ValueError(
            f"batches must be the list of the step's micro-batches, got {type(batches).__name__}; of an iterator take "
            "[next(iterator) for _ in range(get_num_microbatches())]"
        )
    for i, batch in enumerate(batches):
        if not isinstance(batch, Mapping | MicroBatch):
            raise ValueError(
                f"batches[{i}] is {type(batch).__name__}; a micro-batch is a dict of tensors, or what `packed_batch` makes"
            )


def _check_head(models: Sequence[torch.nn.Module], head: object) -> None:
    if head is not None and not isinstance(head, FusedHead):
        raise ValueError(f"head must be what `fuse_head` returned for this model, got {type(head).__name__}")
    if head is not None and all(unwrap(model) is not head.model for model in models):
        raise ValueError("head is the fused head of another model; give what `fuse_head` returned for this one")


def _check_groups(groups: ParallelGroups) -> None:
    sizes = {
        "tensor": (groups.tp_size, parallel_state.get_tensor_model_parallel_world_size()),
        "context": (groups.cp_size, parallel_state.get_context_parallel_world_size()),
        "data": (groups.dp_size, parallel_state.get_data_parallel_world_size()),
    }
    for name, (size, megatron_size) in sizes.items():
        if size != megatron_size:
            raise ValueError(
                f"groups has {size} {name} ranks, Megatron's process groups {megatron_size} (data ranks without context "
                "ranks); leave groups= out, or give ParallelGroups.from_megatron()"
            )


def positions_unit(config: TransformerConfig) -> int:
    """Return the unit of a context rank's positions in a micro-batch: 1 without FP8."""
    if not config.fp8:
        return 1
    parts = config.tensor_model_parallel_size if config.sequence_parallel else 1
    unit = 16  # bytes of a row for cuBLAS: positions, in the product for a weight's gradient
    if config.fp8_recipe == "mxfp8":
        unit = 32
    elif config.fp8_recipe == "blockwise" and parts > 1:
        unit = 128  # blocks are gathered whole over tensor ranks
    return unit * parts


def check_positions(config: TransformerConfig, tokens: Iterable[Tensor]) -> None:
    """Refuse tokens [B, S/cp] or [1, T/cp] on which Transformer Engine would fail."""
    unit = positions_unit(config)
    for rows in tokens:
        if rows.numel() % unit:
            raise ValueError(
                f"a micro-batch has {rows.shape[0]} × {rows.shape[1]} positions on a context rank, which with fp8 = "
                f"{config.fp8!r} must be a multiple of {unit}: pad its rows, or give `packed_batch` a `total` that is one × cp"
            )


def compares_data_ranks(config: TransformerConfig) -> bool:
    """Return whether passes reduce maxima over data ranks, which must then run equally many."""
    return bool(config.fp8) and config.fp8_recipe == "delayed" and not config.tp_only_amax_red


_ADVICE = (
    "tensor and pipeline ranks of one data rank hold the same micro-batches: seed the sampler by the data rank alone",
    "context ranks hold the same whole rows: give whole rows, the loss cuts them (get_batch_on_this_cp_rank cuts them before)",
)


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
    """Return the step's micro-batches, checked on all ranks; ValueErrors of `forward_backward`."""
    config = get_model_config(models[0])
    like = torch.empty(0, device=next(models[0].parameters()).device)
    layout = [parallel_state.get_model_parallel_group(), groups.context]
    first, checked = steps_of(models) == 0, is_checked(steps_of(models))
    columns = getattr(unwrap(models[0]), "vocab_size", None)
    fault = fault_of(models, batches, head, groups)
    batches = [] if fault else batches
    data = [batch.data if isinstance(batch, MicroBatch) else batch for batch in batches]
    ids = [fields.get("input_ids") for fields in data]
    same = {
        "the number of micro-batches": len(batches),
        "the number of tokens in their rows": sum(field.numel() for field in ids if isinstance(field, Tensor)),
    }

    alone = groups.tp_size == parallel_state.get_pipeline_model_parallel_world_size() == 1
    # in the first step also in mode "never", so that ranks of different modes do not wait for each other
    loss = facts_of_loss(loss_fn, head, config) if checked or first else {}
    # later steps find gradients that were not summed over data ranks; a delayed gather has other weights until the forward
    gathered = not any(getattr(model, "overlap_param_gather_enabled", False) for model in models)
    weights = facts_of_weights([] if fault else models) if first or (checked and gathered) else {}
    same |= loss | (weights if alone else {})
    replicas: dict[str, int] = {}  # alike on the tensor ranks of one stage
    if first:
        same |= fact_of_validation()
        replicas = facts_of_replicas([] if fault else models)
    if parallel_state.get_pipeline_model_parallel_world_size() == 1:
        same |= replicas
        replicas = {}

    def check() -> list[MicroBatch]:
        if fault is not None:
            raise fault
        # only the last pipeline stage calls the loss, so all stages check its fields before they send
        for fields in data:
            loss_fn.check_inputs(fields, values=checked)
        cut: CPLayout = getattr(config, CUT, "zigzag")
        prepared = [
            batch if isinstance(batch, MicroBatch) else padded_batch(batch, device=like.device, cp_layout=cut)
            for batch in batches or _masked(models, loss_fn, groups)
        ]
        if columns is not None and loss_fn.requirements.reads != "scalar":
            check_columns(columns, loss_fn)
        for fields in data:
            check_ids(fields, columns, loss_fn)
        for batch in prepared:
            if batch.packed is not None and checked:
                check_packed(loss_fn, batch.data, batch.packed)
        check_model(models, loss_fn.requirements, head, allow_dropout=allow_dropout, trains_heads=mtp_loss is not None)
        if mtp_loss is not None and any(batch.packed for batch in prepared) and not heads_take_packed_rows():
            raise ValueError("mtp_loss with packed rows: heads of this megatron-core take padded ones only; use 0.16")
        if any(batch.input.tree for batch in prepared):
            inner = [unwrap(model) for model in models]
            check_tree_model(inner, trains_heads=mtp_loss is not None, balances=has_auxiliary_loss(config))
        check_auxiliary_losses(config, groups.cp_size)
        check_positions(config, [batch.input.tokens for batch in prepared])
        _check_context(models, loss_fn, prepared, groups)
        shapes = [tuple(batch.input.tokens.shape) for batch in prepared]
        check_rows(models, shapes, packed=any(batch.packed for batch in prepared))
        if first and dist.get_rank() == 0:  # where warnings are errors, rank 0 alone would raise after the agreement
            warn_of_prompts(data, loss_fn.requirements)
            warn_of_shifted_mask(data, loss_fn.requirements)
            warn_of_repeats(data)
            warn_of_precision(data, loss_fn.requirements)
            if columns is not None and loss_fn.requirements.reads != "scalar":
                warn_of_padding(loss_fn, columns, groups.tp_size, getattr(unwrap(models[0]), "true_vocab_size", None))
        return prepared

    sharing = loss | weights
    if parallel_state.get_expert_model_parallel_world_size() > 1:  # data ranks call experts together
        sharing |= {"the number of micro-batches (with expert parallelism; add masked ones)": len(batches)}
    elif compares_data_ranks(config):
        why = "with FP8 by delayed scaling; add masked ones, or choose another fp8_recipe"
        sharing |= {f"the number of micro-batches ({why})": len(batches)}

    looks = None if checked or first else like
    read = (*loss_fn.requirements.fields, *loss_fn.requirements.optional)
    names = ("input_ids", "token_mask", "sample_mask", *(field.name for field in read if field.per != "local"))
    alike = Replicated(data, names, whole=("input_ids",), advice=_ADVICE)
    health: Callable[[], list[MicroBatch]] = check
    if replicas:
        health = partial(raise_on_all_ranks, check, [groups.tensor], same=replicas)
    # first within the ranks of the same rows, then over ranks with other rows, which compare only faults and weights
    prepared = raise_on_all_ranks(
        lambda: raise_on_all_ranks(health, layout, looks, same, alike=alike),
        [groups.data if groups.dp_size == 1 else groups.data_context or groups.data],
        None if sharing else looks,
        sharing,
    )
    if first and checked and all(batch.context_group == "model" for batch in prepared):
        warn_of_same_rows(Replicated(data, ROWS).checksum() if data else None, groups.data)
    return prepared


def _masked(
    models: Sequence[torch.nn.Module], loss_fn: LossFunction, groups: ParallelGroups
) -> list[Mapping[str, Tensor]]:
    """Make the input of a data rank without a micro-batch, which takes part in the others' collectives."""
    needs = loss_fn.requirements
    local = [field.name for field in needs.fields if field.per == "local"]
    if local:
        raise ValueError(f"batches is empty; {local} cannot be made up, pass a micro-batch whose sample_mask is 0")
    width = 2 * groups.cp_size * math.lcm(groups.tp_size, positions_unit(get_model_config(models[0])))
    data = masked_data(needs.with_kept_ids(), 2 if needs.paired else 1, width)
    # an interleaved schedule wants as many micro-batches as stages
    return [data] * (parallel_state.get_pipeline_model_parallel_world_size() if len(models) > 1 else 1)


def _check_context(
    models: Sequence[torch.nn.Module], loss_fn: LossFunction, batches: Sequence[MicroBatch], groups: ParallelGroups
) -> None:
    config = get_model_config(models[0])
    of_model, of_loss = getattr(config, CUT, "zigzag"), getattr(loss_fn, "options", None)
    for batch in batches:
        wanted = batch.input.context.layout
        if wanted != of_model or (of_loss is not None and wanted != of_loss.cp_layout):
            and_loss = "" if of_loss is None else f", the loss {of_loss.cp_layout!r}"
            raise ValueError(
                f"a micro-batch is cut {wanted!r} over context ranks, the model wants {of_model!r}{and_loss}"
            )
    if any(batch.context_group != "model" for batch in batches) and (groups.cp_size > 1 or config.num_moe_experts):
        raise ValueError(
            f"context groups of micro-batches need context_parallel_size = 1 and no experts, got {groups.cp_size} and "
            f"num_moe_experts = {config.num_moe_experts}: the groups are made of data ranks"
        )
