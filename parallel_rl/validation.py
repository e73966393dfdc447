"""The switch for checks that look at values; shapes, dtypes and configs are always checked."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Literal, get_args

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

ValidationMode = Literal["auto", "always", "never"]

_mode: ValidationMode = "auto"


def set_validation(mode: ValidationMode) -> None:
    """Choose when values (not only shapes) are checked.

    >>> set_validation("auto")

    "auto": on tensors in host memory, where it is free. "always": on device tensors too, at the price of a
    host sync. "never": shapes, dtypes and configs only. Where values are checked, one small MAX all-reduce over each
    group tells every rank of a fault found by one of them, and all raise the same error. The all-reduce carries a
    checksum of the fields and counts that a loss reads, which must be equal on tensor and on context ranks, and one of a few
    logits, which must not be equal on all tensor ranks. "always" compares the tensor ranks' upstream gradients in the
    backward, too. Checks of a Megatron loop that cost a collective or a wait run in its first three steps in mode "auto", in
    each one in mode "always". Recorded log-probs are compared with the policy's in a loss's first micro-batches in mode
    "auto", at every call in mode "always"; see `parallel_rl.losses.core.recorded.RecordedCheck`.

    Raises:
        ValueError: an unknown mode.
    """
    global _mode
    if mode not in get_args(ValidationMode):
        raise ValueError(f"validation mode {mode!r} is not valid; choose one of {', '.join(get_args(ValidationMode))}")
    _mode = mode


def get_validation() -> ValidationMode:
    """Return the mode that `set_validation` set."""
    return _mode


@contextmanager
def validation(mode: ValidationMode) -> Iterator[None]:
    """Set the mode within a `with` block.

    >>> with validation("never"):
    ...     get_validation()
    'never'
    """
    before = _mode
    set_validation(mode)
    try:
        yield
    finally:
        set_validation(before)


def checks_values(tensor: Tensor) -> bool:
    """Return whether the current mode checks the values of `tensor`."""
    return _mode == "always" or (_mode == "auto" and tensor.device.type == "cpu")
