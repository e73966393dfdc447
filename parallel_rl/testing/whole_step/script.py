"""One step of a Megatron script: its forward step or loss callback in Megatron's schedule, with its DDP and log."""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import torch
import torch.distributed as dist
from megatron.core import num_microbatches_calculator as calculator
from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import get_model_config
from torch import Tensor

from parallel_rl.groups import current_device
from parallel_rl.megatron import packed_input, padded_input, unwrap
from parallel_rl.megatron.forward import is_last_stage
from parallel_rl.megatron.model_input import packed_bounds
from parallel_rl.testing.whole_step.layouts import ROWS, WIDTH, Rows, StepLayout, megatron_rows, packed_width
from parallel_rl.testing.whole_step.ranks import needs_gpu, user_place
from parallel_rl.testing.whole_step.subject import StepSubject, source_name

Callback = Callable[..., object]


def wrap_for_script(model: torch.nn.Module) -> torch.nn.Module:
    config: TransformerConfig = get_model_config(model)
    wrapped = DistributedDataParallel(config, DistributedDataParallelConfig(), model)
    if config.finalize_model_grads_func is None:
        config.finalize_model_grads_func = finalize_model_grads
    return wrapped


def run_script(
    subject: StepSubject,
    models: Sequence[torch.nn.Module],
    config: TransformerConfig,
    batches: list[Rows],
    layout: StepLayout,
) -> dict[str, float]:
    """Run the step; return its log, reduced as by Megatron-LM's `train_step`; ValueError for packed rows."""
    if subject.forward_step is not None and layout.packed:
        raise ValueError(
            "packed rows are not passed to a forward step, whose batches are its own; pass a loss callback"
        )
    dtype = next(models[0].parameters()).dtype
    calculator.unset_num_microbatches_calculator()
    calculator.init_num_microbatches_calculator(dist.get_rank(), None, ROWS, ROWS // layout.micro, layout.dp)
    iterators: list[Iterator[Mapping[str, Tensor | None]]]
    if subject.forward_step is not None:
        step: Callback = subject.forward_step
        iterators = [megatron_rows(batches, dtype) for _ in models]
    else:
        assert subject.loss_callback is not None
        step = partial(_forward_step, callback=subject.loss_callback, packed=layout.packed)
        iterators = [_with_lengths(batches, dtype) for _ in models]
    named = source_name(subject.forward_step or subject.loss_callback or step)
    try:
        logs = get_forward_backward_func()(
            forward_step_func=partial(_checked_step, step=step, name=named),
            data_iterator=iterators if len(models) > 1 else iterators[0],
            model=list(models) if len(models) > 1 else models[0],
            num_microbatches=len(batches),
            seq_length=WIDTH if not layout.packed else packed_width(ROWS // layout.micro),
            micro_batch_size=1 if layout.packed else ROWS // layout.micro,
            forward_only=False,
        )
    finally:
        calculator.unset_num_microbatches_calculator()
    return _reduced(logs)


def _checked_step(*args: object, step: Callback, name: str) -> tuple[object, Callback]:
    """Run a forward step and check its result and its loss callback's; Megatron's schedule does not."""
    try:
        returned = step(*args)
    except Exception as error:
        if needs_gpu(error):
            raise ValueError(
                f"{name} needs a GPU ({error}) at {user_place(traceback.format_exc())}; run the command where there is one, or "
                "pass --loss-callback in place of --forward-step"
            ) from error
        raise
    if not (isinstance(returned, tuple) and len(returned) == 2 and callable(returned[1])):
        raise ValueError(f"{name} returned {_kind(returned)}; a forward step returns (output, loss callback)")
    output, callback = returned

    def checked(output: Tensor, **more: object) -> object:
        parts = callback(output, **more)
        if not (isinstance(parts, tuple | list) and len(parts) in (2, 3) and isinstance(parts[0], Tensor)):
            raise ValueError(
                f"the loss callback of {name} returned {_kind(parts)}; Megatron's schedule takes (loss, log) or "
                "(sum, tokens, log)"
            )
        if not parts[0].requires_grad:
            raise ValueError(f"the loss callback of {name} returned a loss without a gradient; do not detach it")
        return parts

    return output, checked


def _kind(returned: object) -> str:
    if isinstance(returned, tuple | list):
        return f"a {type(returned).__name__} of {len(returned)} ({', '.join(type(item).__name__ for item in returned)})"
    return type(returned).__name__


def _with_lengths(batches: list[Rows], dtype: torch.dtype) -> Iterator[Mapping[str, Tensor | None]]:
    for rows, batch in zip(megatron_rows(batches, dtype), batches, strict=True):
        yield {**rows, "lengths": batch["lengths"]}


def _forward_step(
    data_iterator: Iterator[dict[str, Tensor]], model: torch.nn.Module, *, callback: Callback, packed: bool
) -> tuple[Tensor, Callback]:
    """Run the model on labels with rows cut over context ranks, as Megatron-LM's `pretrain_gpt` does."""
    batch = next(data_iterator)
    device = current_device()
    tokens, labels, mask = (batch[name].to(device) for name in ("tokens", "labels", "loss_mask"))
    if packed:
        bounds = packed_bounds(batch["lengths"], total=packed_width(len(tokens)))
        placed = packed_input(tokens, *bounds)
    else:
        placed = padded_input(tokens)
    local_labels, local_mask = (
        placed.layout.shard(field, shift=False).view(placed.tokens.shape) for field in (labels, mask)
    )
    more: dict[str, object] = {"packed_seq_params": placed.packed} if packed else {}
    config = unwrap(model).config
    if config.mtp_num_layers and "loss_mask" in inspect.signature(unwrap(model).forward).parameters:
        more["loss_mask"] = local_mask
    output = model(placed.tokens, placed.positions, None, labels=local_labels, **more)
    takes_model = "model" in inspect.signature(callback).parameters
    return output, partial(callback, local_mask, model=model) if takes_model else partial(callback, local_mask)


def _reduced(logs: Sequence[object]) -> dict[str, float]:
    """Sum pairs (sum, count) over micro-batches and data ranks and divide them; average single numbers."""
    metrics: dict[str, float] = {}
    if is_last_stage():
        first = logs[0] if logs else {}
        if not isinstance(first, Mapping):
            raise ValueError(f"the loss callback reports {type(first).__name__}; Megatron logs a mapping of tensors")
        group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        for name in first:
            values = [
                torch.as_tensor(log[name]).detach().double().reshape(-1) for log in logs if isinstance(log, Mapping)
            ]
            total = torch.stack(values).sum(0)
            if total.numel() == 1:
                total = torch.stack((total[0], total.new_tensor(float(len(values)))))
            dist.all_reduce(total, group=group)
            if total.numel() == 2:
                metrics[str(name)] = float(total[0] / total[1])
    shared = [metrics]
    if parallel_state.get_pipeline_model_parallel_world_size() > 1:
        source = parallel_state.get_pipeline_model_parallel_last_rank()
        dist.broadcast_object_list(shared, src=source, group=parallel_state.get_pipeline_model_parallel_group())
    return shared[0]
