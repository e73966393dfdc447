"""Forward of a model chunk on this rank's input."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from megatron.core.transformer.module import Float16Module
from megatron.core.utils import get_model_config
from torch import Tensor

from parallel_rl.megatron.callbacks import callbacks_of
from parallel_rl.megatron.model import unwrap
from parallel_rl.megatron.model_input import ModelInput
from parallel_rl.megatron.mtp import heads_running
from parallel_rl.megatron.trees import check_tree_model, positions_by_depth


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
