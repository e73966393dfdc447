"""Keep modules in float32 within a model in float64."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor


def keep_in_float32(model: torch.nn.Module, kinds: Sequence[str]) -> None:
    """Move modules of these classes to float32, with casts at their borders."""
    for module in model.modules():
        if type(module).__name__ in kinds:
            module.float()
            module.register_forward_pre_hook(_to_single, with_kwargs=True)
            module.register_forward_hook(_to_double)


def _to_single(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    return _cast(args, torch.float32), _cast(kwargs, torch.float32)


def _to_double(module: torch.nn.Module, args: object, out: object) -> object:
    return _cast(out, torch.float64)


def _cast(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, Tensor) and value.is_floating_point():
        return value.to(dtype)
    if type(value) in (tuple, list):
        return type(value)(_cast(item, dtype) for item in value)
    if isinstance(value, Mapping):
        return {name: _cast(item, dtype) for name, item in value.items()}
    return value
