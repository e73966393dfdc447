"""Destination of the LM head's weight gradient: autograd, or Megatron's `main_grad` directly."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch.utils.weak import WeakIdKeyDictionary

from parallel_rl.vocab.backends.torch_backend import math_dtype
from parallel_rl.vocab.linear.gemm import add_weight_gradient

if TYPE_CHECKING:
    from torch import Tensor

_ZEROS: dict[tuple[torch.Size, torch.dtype, torch.device], Tensor] = {}
_TELLING = WeakIdKeyDictionary()  # weights with a hook


@dataclass(frozen=True)
class WeightTarget:
    """Destination of the weight's gradient: autograd (factor None), or `weight.main_grad` += factor × it."""

    weight: Tensor  # [W, D] of the caller, with padding columns
    factor: float | None

    def rows(self, valid: int) -> Tensor | None:
        """Return the rows of `main_grad` that hold real columns."""
        if self.factor is None:
            return None
        main: Tensor = self.weight.main_grad  # type: ignore[attr-defined]
        return main[:valid]

    def direct(self, valid: int, dtype: torch.dtype) -> Tensor | None:
        """Return `rows` if products can be summed there directly: unscaled and in their dtype."""
        into = self.rows(valid)
        return into if into is not None and self.factor == 1 and into.dtype == dtype else None

    def add(self, dz: Tensor, hidden: Tensor, valid: int) -> Tensor:
        """Add dz [n, valid]ᵀ · hidden [n, D], and return the gradient for autograd."""
        into = self.rows(valid)
        if into is None or self.factor is None:
            gradient = torch.zeros_like(self.weight)
            add_weight_gradient(gradient[:valid], dz, hidden, blank=True)
            return gradient
        dtype = math_dtype(hidden.dtype)
        direct = self.direct(valid, dtype)
        sums = torch.empty_like(into, dtype=dtype) if direct is None else direct
        add_weight_gradient(sums, dz, hidden, blank=direct is None)
        if direct is None:
            into.add_(sums, alpha=self.factor)
        return self.stand_in()

    def stand_in(self) -> Tensor:
        """Return cached zeros, which Megatron's hooks expect instead of the gradient."""
        weight, key = self.weight, (self.weight.shape, self.weight.dtype, self.weight.device)
        weight.grad_added_to_main_grad = True  # type: ignore[attr-defined]
        if key not in _ZEROS or _ZEROS[key]._version:  # or they were written to
            _ZEROS[key] = torch.zeros_like(weight, requires_grad=False)
        return _ZEROS[key].detach()

    def result(self, gradient: Tensor | None) -> Tensor | None:
        """Return the gradient for autograd, zero-padded, or the stand-in for what went to `main_grad`."""
        return padded(gradient, self.weight) if self.factor is None else self.stand_in()


def padded(gradient: Tensor | None, like: Tensor | None) -> Tensor | None:
    if gradient is None or like is None or gradient.shape == like.shape:
        return gradient
    whole = torch.zeros_like(like, dtype=gradient.dtype)
    whole[: gradient.shape[0]] = gradient
    return whole


def let_others_add(weight: Tensor) -> None:
    """Let other gradients of the weight reach its `main_grad`, too.

    Megatron's data parallelism drops every gradient while `grad_added_to_main_grad` is set, also in later micro-batches: that
    of a penalty on the weight, or of logits that were not fused. So the flag is set for the stand-in only. Do not use it
    where Megatron's own layers set the flag: their stand-ins hold anything.
    """
    if weight not in _TELLING:
        itself = weakref.ref(weight)  # a hook must not keep it alive
        _TELLING[weight] = weight.register_hook(partial(_tell, itself))


def _tell(reference: weakref.ref[Tensor], gradient: Tensor) -> None:
    weight = reference()
    assert weight is not None
    zeros = _ZEROS.get((weight.shape, weight.dtype, weight.device))
    alone = zeros is not None and gradient.untyped_storage().data_ptr() == zeros.untyped_storage().data_ptr()
    weight.grad_added_to_main_grad = alone  # type: ignore[attr-defined]
