"""Guards against reading as logits a gradient written over them, or hidden states."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

import torch

from parallel_rl.validation import get_validation

if TYPE_CHECKING:
    from torch import Tensor
    from torch.autograd.function import FunctionCtx

# attributes of the storage: shared by every view, gone with the memory
_MARK = "_parallel_rl_gradient_at_version"
_HIDDEN = "_parallel_rl_hidden_states"


def mark_consumed(logits: Tensor) -> None:
    """Note that a backward has written its gradient over `logits`; a later write lifts the mark."""
    if not torch.compiler.is_compiling():
        setattr(logits.untyped_storage(), _MARK, logits._version)


def check_not_consumed(logits: Tensor) -> None:
    """Refuse logits that a backward has written over, without a read; skipped by validation "never"."""
    if torch.compiler.is_compiling() or get_validation() == "never" or logits.is_inference():
        return
    if getattr(logits.untyped_storage(), _MARK, None) == logits._version:
        raise ValueError(
            "the logits were consumed by consume_logits=True, and a backward wrote its gradient over them; compute them again, "
            "or consume them only in the last call that reads them"
        )


def mark_hidden_states(output: Tensor, model: object) -> None:
    """Mark the output of a model with a fused head, including its views."""
    if not torch.compiler.is_compiling():
        setattr(output.untyped_storage(), _HIDDEN, weakref.ref(model))


def model_of_hidden_states(output: Tensor) -> object:
    """Return the model whose output `mark_hidden_states` marked; None without a mark."""
    mark = None if torch.compiler.is_compiling() else getattr(output.untyped_storage(), _HIDDEN, None)
    return None if mark is None else mark()


def check_no_hidden_states(logits: Tensor) -> None:
    """Raise ValueError for logits that are the marked output of a model with a fused head."""
    if not torch.compiler.is_compiling() and hasattr(logits.untyped_storage(), _HIDDEN):
        raise ValueError(
            f"the model has a fused head, so its output {list(logits.shape)} is hidden states, not logits; give "
            "head(output), where head is what `fuse_head` returned, or pass it as head= to `megatron_loss_func`"
        )


def check_backward(ctx: FunctionCtx, subject: str) -> None:
    """Raise RuntimeError for create_graph=True, or a second backward through consumed logits."""
    refuse_second_derivative(subject)
    if ctx.consumed:  # type: ignore[attr-defined]
        raise RuntimeError(
            "the first backward wrote its gradient over the logits; consume_logits=False allows a second one"
        )


def refuse_second_derivative(subject: str) -> None:
    """Raise RuntimeError for a backward with create_graph=True."""
    if torch.is_grad_enabled():
        raise RuntimeError(f"{subject} no second derivative; call backward without create_graph=True")


def refuse_transforms(*tensors: Tensor) -> None:
    """Raise ValueError for tensors inside a torch.func transform: custom gradients have no rule for it."""
    if not torch.compiler.is_compiling() and any(map(torch._C._functorch.is_functorch_wrapped_tensor, tensors)):
        raise ValueError(
            "torch.func's transforms (grad, vjp, jvp, vmap, ...) are not supported: the gradient is written by hand, for "
            "loss.backward() and torch.autograd.grad; torch.func.functional_call alone is fine"
        )


def saved_logits(ctx: FunctionCtx) -> tuple[Tensor, ...]:
    """Return `ctx.saved_tensors`; RuntimeError if the logits were written over since the forward."""
    try:
        saved: tuple[Tensor, ...] = ctx.saved_tensors  # type: ignore[attr-defined]
    except RuntimeError as error:
        if "inplace" not in str(error):
            raise
        raise RuntimeError(
            "the logits changed between this loss's forward and its backward: another loss that read them consumed them "
            f"(consume_logits=True), or they were written in place. {error}"
        ) from None
    return saved
