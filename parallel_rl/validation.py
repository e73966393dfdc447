"""Checks of values, and the agreement that makes a fault on one rank an error on all of its group."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Literal, get_args

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

ValidationMode = Literal["auto", "always", "never"]

_mode: ValidationMode = "auto"


def set_validation(mode: ValidationMode) -> None:
    """Chooses when values (not only shapes) are checked.

    "auto": on tensors in host memory, where a look costs nothing. "always": on device tensors too, at the price of a
    host sync. "never": shapes, dtypes and configs only. Where values are checked, one small MAX all-reduce over each
    group tells every rank of a fault found by one of them, and all raise the same error. "always" compares the tensor ranks'
    upstream gradients in the backward, too.

    Raises:
        ValueError: an unknown mode.
    """
    global _mode
    if mode not in get_args(ValidationMode):
        raise ValueError(f"validation mode {mode!r} is not valid; choose one of {', '.join(get_args(ValidationMode))}")
    _mode = mode


def get_validation() -> ValidationMode:
    """The mode that `set_validation` set."""
    return _mode


@contextmanager
def validation(mode: ValidationMode) -> Iterator[None]:
    """`set_validation` for the length of a `with` block."""
    before = _mode
    set_validation(mode)
    try:
        yield
    finally:
        set_validation(before)


def checks_values(tensor: Tensor) -> bool:
    """Whether the values of `tensor` are looked at in the present mode."""
    return _mode == "always" or (_mode == "auto" and tensor.device.type == "cpu")
