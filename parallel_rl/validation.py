"""Checks of values, and the agreement that makes a fault on one rank an error on all of its group."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Literal, get_args

import torch
import torch.distributed as dist

from parallel_rl.groups import all_gather, group_size

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor
    from torch.distributed import ProcessGroup

ValidationMode = Literal["auto", "always", "never"]

_mode: ValidationMode = "auto"
_ROUNDING = 1e-4  # what nondeterministic sums on a GPU may differ in


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


def agreed_check(
    check: Callable[[], None],
    groups: Sequence[ProcessGroup | None],
    like: Tensor,
    same: Mapping[str, int] | None = None,
) -> None:
    """Runs `check`; where values are checked, its error is raised on every rank of `groups`, and nothing hangs.

    Args:
        check: raises where this rank's input is bad.
        groups: the groups whose collectives come next; None entries are groups of one.
        like: a tensor on the device that the groups communicate from.
        same: numbers by name that all ranks of the groups must agree in, such as the number of tokens; the names are
            the same everywhere.

    Raises:
        ValueError: what `check` found on any rank, or a number in which ranks differ.
    """
    real = [group for group in groups if group is not None and dist.get_world_size(group) > 1]
    if not real or not checks_values(like):
        return check()
    fault: str | None = None
    try:
        check()
    except ValueError as error:
        fault = f"rank {dist.get_rank()}: {error}"
    except Exception as error:  # what torch raises of an input that no check foresaw; alone it would hang the others
        fault = f"rank {dist.get_rank()}: {type(error).__name__}: {error}"
    same = same or {}
    # One group after the other: whoever heard of a fault over the first passes it on over the second.
    for group in real:
        numbers = [int(fault is not None), *same.values(), *(-x for x in same.values())]
        flag = torch.tensor(numbers, dtype=torch.int64, device=like.device)
        dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=group)
        found, *bounds = flag.tolist()
        if found:
            told: list[str | None] = [None] * dist.get_world_size(group)
            dist.all_gather_object(told, fault, group=group)
            fault = next(text for text in told if text is not None)
            continue
        for name, high, low in zip(same, bounds, bounds[len(same) :], strict=False):
            if high != -low:
                fault = f"the ranks of a group differ in {name}: it is {-low} on one and {high} on another"
    if fault is not None:
        raise ValueError(fault)


def agreed_gradients(gradients: Sequence[Tensor | None], group: ProcessGroup | None, like: Tensor) -> None:
    """Mode "always": refuses upstream gradients in which tensor ranks differ, which would spoil the model's in silence.

    A loss is computed alike on all tensor ranks and never summed over them; one all-gather shows where it was not.

    Args:
        gradients: of one shape, that of `like`; None is zero.

    Raises:
        ValueError: they differ beyond rounding, on all ranks of the group.
    """
    if _mode != "always" or torch.compiler.is_compiling() or group_size(group) == 1:
        return
    mine = torch.stack([torch.zeros_like(like) if g is None else g.to(like.dtype) for g in gradients])
    of_ranks = all_gather(mine, group)
    largest = float(of_ranks.abs().nan_to_num(0.0).amax()) if mine.numel() else 0.0
    apart = ~torch.isclose(of_ranks, of_ranks[:1], rtol=_ROUNDING, atol=_ROUNDING * largest, equal_nan=True)
    if bool(apart.any()):
        rank, *place = apart.nonzero()[0].tolist()
        here, there = (float(of_ranks[(r, *place)]) for r in (0, rank))
        raise ValueError(
            f"the gradient that reaches the token statistics differs between tensor ranks: {here} on rank 0 and {there} on "
            f"rank {rank} of the group, at {place[1:]}; the loss must be computed alike on all of them, and not be summed or "
            "averaged over them"
        )


def shape_numbers(logits: Tensor, vocab_size: int | None) -> dict[str, int]:
    """What ranks that share a batch agree in: tokens, and the shard's width where no `vocab_size` allows for uneven ones."""
    width = logits.shape[-1] if logits.dim() else 1
    return {
        "the number of local tokens": logits.numel() // max(width, 1),
        "the width of the vocabulary shard (without vocab_size)": width if vocab_size is None else 0,
    }
