"""The three products of a head: logits, gradient of the hidden states, gradient of the weight.

Low-precision operands keep exact products: a GPU multiplies them with float32 results, a CPU multiplies blocks of columns
that are raised to float32, since its own low-precision products round their results.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

_BLOCK = 1 << 22  # elements of the weight that are raised at once
# Before, torch.addmm refused to add low-precision products to float32.
_ADDS_PRODUCTS = tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 10)


def project(hidden: Tensor, weight: Tensor, out: Tensor) -> None:
    """out [n, W] = hidden [n, D] · weight [W, D]ᵀ, in the dtype of `out`."""
    if hidden.dtype == out.dtype:
        torch.mm(hidden, weight.t(), out=out)
    elif hidden.is_cuda:
        torch.mm(hidden, weight.t(), out.dtype, out=out)
    else:
        raised = hidden.to(out.dtype)
        for columns in _blocks(weight):
            torch.mm(raised, weight[columns].to(out.dtype).t(), out=out[:, columns])


def hidden_gradient(dz: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """[n, D] = dz [n, W] · weight [W, D], in `dtype`."""
    if dz.dtype == weight.dtype == dtype:
        return torch.mm(dz, weight)
    if dz.is_cuda:
        return torch.mm(dz, weight, dtype)
    out = torch.zeros(dz.shape[0], weight.shape[1], dtype=dtype, device=dz.device)
    for columns in _blocks(weight):
        out.addmm_(dz[:, columns].to(dtype), weight[columns].to(dtype))
    return out


def add_weight_gradient(total: Tensor, dz: Tensor, hidden: Tensor, blank: bool = False) -> None:
    """total [W, D] += dz [n, W]ᵀ · hidden [n, D], in the dtype of `total`; a blank total may hold anything before."""
    keep = 0 if blank else 1
    if dz.dtype == hidden.dtype == total.dtype:
        total.addmm_(dz.t(), hidden, beta=keep)
    elif dz.is_cuda and _ADDS_PRODUCTS:
        torch.addmm(total, dz.t(), hidden, total.dtype, beta=keep, out=total)
    elif dz.is_cuda:
        for columns in _blocks(total):
            part = torch.mm(dz[:, columns].t(), hidden, total.dtype)
            total[columns] = part if blank else part.add_(total[columns])
    else:
        raised = hidden.to(total.dtype)
        for columns in _blocks(total):
            total[columns].addmm_(dz[:, columns].to(total.dtype).t(), raised, beta=keep)


def scaled_to_(values: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """values · scale in `dtype`, over the same bytes: a narrower result takes the first of them."""
    if dtype == values.dtype:
        return values.mul_(scale)
    flat = values.view(-1)
    out = flat.view(dtype)[: flat.numel()]
    for start in range(0, flat.numel(), _BLOCK):
        part = slice(start, start + _BLOCK)
        out[part] = flat[part] * scale  # block by block: it never catches up with what is still to be read
    return out.view(values.shape)


def _blocks(weight: Tensor) -> Iterator[slice]:
    rows = max(1, _BLOCK // max(weight.shape[1], 1))
    return (slice(start, start + rows) for start in range(0, weight.shape[0], rows))
