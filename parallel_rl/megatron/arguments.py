"""Checks of the kinds of a step's arguments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import torch
from megatron.core import parallel_state

from parallel_rl.groups import ParallelGroups
from parallel_rl.losses.core.call import LossFunction
from parallel_rl.megatron.lm_head import FusedHead
from parallel_rl.megatron.micro_batch import MicroBatch
from parallel_rl.megatron.model import unwrap
from parallel_rl.statistics import Statistics


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
