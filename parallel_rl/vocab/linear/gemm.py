"""The three products of a head: logits, gradient of the hidden states, gradient of the weight.

Low-precision operands keep exact products: a GPU multiplies them with float32 results, a CPU converts blocks of columns to
float32, since its low-precision products round their results.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

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

    Products and sums are at least float32; a narrower, blank total is rounded once. If the operands have the total's dtype, a
    device does this in one product.
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
        from parallel_rl.vocab.backends.triton.scale import scale_

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
