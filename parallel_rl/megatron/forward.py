"""Forward passes: of a model chunk on this rank's input, and of the whole pipeline without gradient."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import TypeVar

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.module import Float16Module
from megatron.core.utils import get_model_config
from torch import Tensor

from parallel_rl.groups import current_device
from parallel_rl.megatron.callbacks import callbacks_of
from parallel_rl.megatron.lm_head import heads_running
from parallel_rl.megatron.model import unwrap
from parallel_rl.megatron.model_input import ModelInput
from parallel_rl.megatron.trees import check_tree_model, positions_by_depth

BatchT = TypeVar("BatchT")
ResultT = TypeVar("ResultT")

_DTYPES = (
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
)
_MAX_DIMS = 6


@torch.no_grad()
def forward_only(
    forward: Callable[[torch.nn.Module, BatchT], Tensor],
    models: Sequence[torch.nn.Module],
    batches: Sequence[BatchT],
    collect: Callable[[Tensor, int], ResultT],
    *,
    seq_length: int,
    micro_batch_size: int,
) -> list[ResultT] | None:
    """Run the pipeline without gradient and collect a result from each micro-batch's logits.

    >>> inputs = [padded_input(data["input_ids"])]
    >>> shape = lambda logits, index: tuple(logits.shape)
    >>> forward_only(forward_logits, [model], inputs, shape, seq_length=4, micro_batch_size=2)
    [(2, 4, 8)]

    Args:
        forward: model chunk and micro-batch → the chunk's output (`forward_logits` for a `ModelInput`).
        models: this rank's chunks (one, except under an interleaved schedule). batches: equally many on every rank.
        collect: (logits, index of the micro-batch) → anything; called in order, on the last pipeline stage only.
        seq_length, micro_batch_size: S (packed: T) over all context ranks and B (packed: 1); only read by pipelines with
            `variable_seq_lengths` False.

    Returns:
        One result per micro-batch on the last pipeline stage, None on the others.
    """

    def step(batches: Iterator[tuple[int, BatchT]], model: torch.nn.Module) -> tuple[Tensor, Callable[..., ResultT]]:
        index, batch = next(batches)
        return forward(model, batch), partial(_collect, index)

    def _collect(index: int, logits: Tensor, non_loss_data: bool = True) -> ResultT:
        return collect(logits, index)

    iterators = [iter(list(enumerate(batches))) for _ in models]
    results: list[ResultT] = get_forward_backward_func()(
        forward_step_func=step,
        data_iterator=iterators if len(models) > 1 else iterators[0],
        model=list(models),
        num_microbatches=len(batches),
        seq_length=seq_length,
        micro_batch_size=micro_batch_size,
        forward_only=True,
        collect_non_loss_data=True,
    )
    return results if is_last_stage() else None


def is_last_stage() -> bool:
    """Return whether this rank is on the last pipeline stage, which has the logits.

    >>> is_last_stage()
    True
    """
    return bool(parallel_state.is_pipeline_last_stage(ignore_virtual=True))


def broadcast_from_last_stage(
    tensor: Tensor | None, *, shape: Sequence[int] | None = None, dtype: torch.dtype | None = None
) -> Tensor:
    """Broadcast the last pipeline stage's tensor to every stage; all ranks of the group call it.

    >>> broadcast_from_last_stage(torch.tensor(3.0))
    tensor(3.)

    Args:
        tensor: on the last stage; ignored on the others.
        shape, dtype: of the tensor, if every stage knows them: one broadcast. Otherwise a header is sent first.

    Raises:
        ValueError: no tensor on the last stage; only one of shape and dtype; more than 6 dimensions or an unusual dtype.
    """
    group = parallel_state.get_pipeline_model_parallel_group()
    if is_last_stage() and tensor is None:
        raise ValueError("the last pipeline stage must pass the tensor")
    if (shape is None) != (dtype is None):
        raise ValueError(f"give both shape and dtype or none of them, got shape = {shape} and dtype = {dtype}")
    if dist.get_world_size(group) == 1:
        assert tensor is not None
        return tensor
    source = parallel_state.get_pipeline_model_parallel_last_rank()
    device = current_device()
    if shape is None or dtype is None:
        shape, dtype = _exchange_header(tensor if is_last_stage() else None, source, device)
    if is_last_stage():
        assert tensor is not None
        if tuple(tensor.shape) != tuple(shape) or tensor.dtype != dtype:
            raise ValueError(f"the tensor is {tensor.dtype} {list(tensor.shape)}; announced were {dtype} {list(shape)}")
        out = tensor.detach().contiguous()
    else:
        out = torch.empty(tuple(shape), dtype=dtype, device=device)
    dist.broadcast(out, source, group=group)
    return out


def _exchange_header(tensor: Tensor | None, source: int, device: torch.device) -> tuple[list[int], torch.dtype]:
    header = torch.zeros(2 + _MAX_DIMS, dtype=torch.int64, device=device)
    if tensor is not None:
        if tensor.dim() > _MAX_DIMS or tensor.dtype not in _DTYPES:
            raise ValueError(
                f"cannot announce a {tensor.dtype} tensor of {tensor.dim()} dimensions; give shape and dtype"
            )
        values = [_DTYPES.index(tensor.dtype), tensor.dim(), *tensor.shape]
        header[: len(values)] = torch.tensor(values, dtype=torch.int64, device=device)
    dist.broadcast(header, source, group=parallel_state.get_pipeline_model_parallel_group())
    code, dims, *sizes = header.tolist()
    return sizes[:dims], _DTYPES[code]


def forward_logits(model: torch.nn.Module, batch: ModelInput, *, mtp: bool = False) -> Tensor:
    """Run a model chunk: logits [B, S/cp, V/tp] on the last stage, before it hidden states; model's dtype.

    With `mtp` the heads of multi-token prediction run too; the last stage's output appends theirs, see `split_heads`.

    >>> forward_logits(model, padded_input(data["input_ids"])).shape
    torch.Size([2, 4, 8])

    Raises:
        ValueError: ids beyond the model's vocabulary, over pipeline stages at the end of a step with `megatron_loss_func`;
            under sequence parallelism, a local length that is not divisible by tp.
    """
    config = get_model_config(model)
    tokens = _embeddable(model, batch)
    tp = config.tensor_model_parallel_size
    if config.sequence_parallel and batch.tokens.shape[1] % tp:
        raise ValueError(
            f"sequence_parallel splits the {batch.tokens.shape[1]} local positions over tp = {tp}, not evenly; "
            f"pad the rows to a multiple of cp·tp (`packed_bounds` does)"
        )
    wrapped: torch.nn.Module | None = model
    half = False
    while wrapped is not None and not half:
        half = isinstance(wrapped, Float16Module)
        wrapped = getattr(wrapped, "module", None)
    options = {"fp32_output": False} if half else {}
    if not torch.is_grad_enabled():
        # Transformer Engine casts weights to FP8 in the first micro-batch, which only a schedule marks; without the mark a
        # forward would use the weights from before the optimizer's step
        unwrap(model).set_is_first_microbatch()
    positions: AbstractContextManager[None] = nullcontext()
    if batch.tree is not None:
        check_tree_model([unwrap(model)], trains_heads=mtp)
        positions = positions_by_depth(unwrap(model), batch.positions[0], batch.tree)
    with heads_running(unwrap(model), mtp), positions, _embedding_with_gradient(unwrap(model)):
        out: Tensor = model(tokens, batch.positions, None, packed_seq_params=batch.packed, **options)
    return out


@contextmanager
def _embedding_with_gradient(model: torch.nn.Module) -> Iterator[None]:
    """Require a gradient of a frozen embedding's output, or recomputation drops those behind it."""
    embedding = getattr(model, "embedding", None)  # of the first stage
    recomputes = get_model_config(model).recompute_granularity is not None and torch.is_grad_enabled()
    if embedding is None or not recomputes or any(weight.requires_grad for weight in embedding.parameters()):
        yield
        return
    hook = embedding.register_forward_hook(lambda module, args, out: out.requires_grad_())
    try:
        yield
    finally:
        hook.remove()


def _embeddable(model: torch.nn.Module, batch: ModelInput) -> Tensor:
    """Return the tokens; raise for ids beyond the vocabulary, over pipeline stages at the step's end."""
    inner = unwrap(model)
    columns = getattr(inner, "vocab_size", None)
    if columns is None or batch.highest is None or batch.highest < columns:
        return batch.tokens
    fault = ValueError(
        f"the highest of input_ids is {batch.highest}, outside the model's vocabulary [0, {columns}), and the model embeds "
        "prompts and padding too: give the tokenizer that the model was built for"
    )
    if not callbacks_of(inner.config).postpone(fault):
        raise fault
    return torch.zeros_like(batch.tokens)
