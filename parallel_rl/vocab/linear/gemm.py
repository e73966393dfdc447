"""The three products of an LM head, and the weight's gradient in Megatron's main_grad.

Low-precision operands keep exact products: a GPU multiplies them with float32 results, a CPU converts blocks of columns to
float32, since its low-precision products round their results.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from parallel_rl.vocab.backends.choice import Backend, runs_on_triton
from parallel_rl.vocab.backends.torch_backend import math_dtype

_BLOCK = 1 << 22  # weight elements converted at once
_FIRST = 1 << 16
# older torch.addmm cannot add low-precision products to float32
_ADDS_PRODUCTS = tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 10)


def project(hidden: Tensor, weight: Tensor, out: Tensor) -> None:
    """Write hidden [n, D] · weight [W, D]ᵀ to `out` [n, W], in its dtype."""
    if hidden.dtype == out.dtype:
        torch.mm(hidden, weight.t(), out=out)
    elif hidden.device.type != "cpu":
        torch.mm(hidden, weight.t(), out.dtype, out=out)
    else:
        raised = hidden.to(out.dtype)
        for columns in _blocks(weight):
            torch.mm(raised, weight[columns].to(out.dtype).t(), out=out[:, columns])


def add_hidden_gradient(total: Tensor, dz: Tensor, weight: Tensor, blank: bool = False) -> None:
    """Add dz [n, W] · weight [W, D] to `total` [n, D], in its dtype; a blank total is overwritten."""
    if not len(weight):
        if blank:
            total.zero_()
    elif dz.dtype == weight.dtype == total.dtype:
        total.addmm_(dz, weight, beta=0 if blank else 1)
    elif dz.device.type == "cpu":
        for columns in _blocks(weight):
            beta = 0 if blank and columns.start == 0 else 1
            total.addmm_(dz[:, columns].to(total.dtype), weight[columns].to(total.dtype), beta=beta)
    else:
        _add_product(total, dz, weight, blank)


def add_weight_gradient(total: Tensor, dz: Tensor, hidden: Tensor, blank: bool = False) -> None:
    """Add dz [n, W]ᵀ · hidden [n, D] to `total` [W, D]; a blank total is overwritten.

    Products and sums are at least float32; a narrower, blank total is rounded once.
    """
    dtype = math_dtype(total.dtype)
    if dz.dtype == hidden.dtype == total.dtype == dtype:
        total.addmm_(dz.t(), hidden, beta=0 if blank else 1)
        return
    on_host = dz.device.type == "cpu"
    if not on_host and dz.dtype == hidden.dtype == total.dtype:
        assert blank
        torch.mm(dz.t(), hidden, out=total)
        return
    raised = hidden.to(dtype) if on_host else hidden
    for columns in _blocks(total) if on_host or total.dtype != dtype else (slice(None),):
        part = dz[:, columns].t()
        sums = total[columns] if total.dtype == dtype else torch.empty_like(total[columns], dtype=dtype)
        if on_host:
            sums.addmm_(part.to(dtype), raised, beta=0 if blank else 1)
        else:
            _add_product(sums, part, raised, blank)
        if total.dtype != dtype:
            total[columns] = sums


def _add_product(total: Tensor, a: Tensor, b: Tensor, blank: bool) -> None:
    if blank:
        torch.mm(a, b, total.dtype, out=total)
    elif _ADDS_PRODUCTS:
        torch.addmm(total, a, b, total.dtype, out=total)
    else:
        for rows in _blocks(total):
            total[rows] += torch.mm(a[rows], b, total.dtype)


def scaled_to_(values: Tensor, scale: Tensor | None, dtype: torch.dtype, backend: Backend = "auto") -> Tensor:
    """Write values · scale in `dtype` over the same bytes; a half as wide result takes the first half.

    Products are in the scale's dtype, at least float32, and rounded once.
    """
    if dtype == values.dtype:
        return values if scale is None else _scaled_(values, scale, backend)
    flat = values.view(-1)
    out = flat.view(dtype)[: flat.numel()]
    start, most = 0, _BLOCK if values.device.type == "cpu" else flat.numel()
    while start < flat.numel():
        stop = start + max(_FIRST, min(start, most))  # beyond the first part, half as wide numbers end before it begins
        part = flat[start:stop]
        if scale is None:
            out[start:stop] = part if start else part.clone()
        else:
            torch.mul(part if start else part.clone(), scale, out=out[start:stop])
        start = stop
    return out.view(values.shape)


def _scaled_(values: Tensor, scale: Tensor, backend: Backend) -> Tensor:
    if runs_on_triton(values, backend):
        from parallel_rl.vocab.backends.triton.operators import scale_

        scale_(values, scale)
    elif scale.dtype == values.dtype:
        values.mul_(scale)
    else:  # a device factor would be rounded to the values' dtype
        for rows in _blocks(values):
            values[rows] = values[rows].to(scale.dtype).mul_(scale)
    return values


def _blocks(weight: Tensor) -> Iterator[slice]:
    rows = max(1, _BLOCK // max(weight.shape[1], 1))
    return (slice(start, start + rows) for start in range(0, weight.shape[0], rows))


_ZEROS: dict[tuple[torch.Size, torch.dtype, torch.device], Tensor] = {}
_HOOKED = WeakIdKeyDictionary()  # weights with a hook


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

    Megatron's data parallelism drops every gradient while `grad_added_to_main_grad` is set, also in later micro-batches: of a
    penalty on the weight, or of logits that were not fused. So the flag is set for the stand-in only. Do not use it where
    Megatron's own layers set the flag: their stand-ins hold anything.
    """
    if weight not in _HOOKED:
        reference = weakref.ref(weight)  # a hook must not keep it alive
        _HOOKED[weight] = weight.register_hook(partial(_flag_stand_in, reference))


def _flag_stand_in(reference: weakref.ref[Tensor], gradient: Tensor) -> None:
    weight = reference()
    assert weight is not None
    zeros = _ZEROS.get((weight.shape, weight.dtype, weight.device))
    is_stand_in = zeros is not None and gradient.untyped_storage().data_ptr() == zeros.untyped_storage().data_ptr()
    weight.grad_added_to_main_grad = is_stand_in  # type: ignore[attr-defined]
