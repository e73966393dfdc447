"""Checks of values, and the agreement that makes a fault on one rank an error on all of its group."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Literal, get_args

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor
    from torch.distributed import ProcessGroup

ValidationMode = Literal["auto", "always", "never"]

_mode: ValidationMode = "auto"


def set_validation(mode: ValidationMode) -> None:
    """Chooses when values (not only shapes) are checked.

    "auto": on tensors in host memory, where a look costs nothing. "always": on device tensors too, at the price of a
    host sync. "never": shapes, dtypes and configs only. Where values are checked, one small MAX all-reduce over each
    group tells every rank of a fault found by one of them, and all raise the same error.

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


def agreed_check(check: Callable[[], None], groups: Sequence[ProcessGroup | None], like: Tensor) -> None:
    """Runs `check`; where values are checked, its ValueError is raised on every rank of `groups`, and nothing hangs.

    Args:
        check: raises ValueError where this rank's input is bad.
        groups: the groups whose collectives come next; None entries are groups of one.
        like: a tensor on the device that the groups communicate from.
    """
    fault: str | None = None
    try:
        check()
    except ValueError as error:
        fault = str(error)
    real = (
        [group for group in groups if group is not None and dist.get_world_size(group) > 1]
        if checks_values(like)
        else []
    )
    if fault is not None and real:
        fault = f"rank {dist.get_rank()}: {fault}"
    # One group after the other: whoever heard of a fault over the first passes it on over the second.
    for group in real:
        flag = torch.tensor([fault is not None], dtype=torch.int32, device=like.device)
        dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=group)
        if flag.item():
            told: list[str | None] = [None] * dist.get_world_size(group)
            dist.all_gather_object(told, fault, group=group)
            fault = next(text for text in told if text is not None)
    if fault is not None:
        raise ValueError(fault)
