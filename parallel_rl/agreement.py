"""A fault on one rank is an error on all of its group, so that none waits for another."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, TypeVar

import torch
import torch.distributed as dist

from parallel_rl.groups import ParallelGroups, all_gather, group_size
from parallel_rl.validation import checks_values, get_validation, validation

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup

ResultT = TypeVar("ResultT")

_ROUNDING = 1e-4  # what nondeterministic sums on a GPU may differ in


def raise_on_all_ranks(
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


def check_replicated(gradients: Sequence[Tensor | None], group: ProcessGroup | None, like: Tensor) -> None:
    """Mode "always": refuses upstream gradients in which tensor ranks differ, which would spoil the model's in silence.

    A loss is computed alike on all tensor ranks and never summed over them; one all-gather shows where it was not.

    Args:
        gradients: of one shape, that of `like`; None is zero.

    Raises:
        ValueError: they differ beyond rounding, on all ranks of the group.
    """
    if get_validation() != "always" or torch.compiler.is_compiling() or group_size(group) == 1:
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


def shape_facts(logits: Tensor, vocab_size: int | None) -> dict[str, int]:
    """What ranks that share a batch agree in: tokens, and the shard's width where no `vocab_size` allows for uneven ones."""
    width = logits.shape[-1] if logits.dim() else 1
    return {
        "the number of local tokens": logits.numel() // max(width, 1),
        "the width of the vocabulary shard (without vocab_size)": width if vocab_size is None else 0,
    }


def check_on_all(check: Callable[[], None], groups: Sequence[ProcessGroup | None], like: Tensor) -> None:
    """`raise_on_all_ranks` for inputs on the host of ranks that communicate from their GPUs, too.

    Raises:
        ValueError: what `check` found on any rank of the groups.
    """
    device = like.device
    for group in groups:
        device = communication_device(group, device)
    always = get_validation() == "auto" and checks_values(like)
    with validation("always" if always else get_validation()):
        raise_on_all_ranks(check, groups, torch.empty(0, device=device))


def communication_device(group: ProcessGroup | None, home: torch.device) -> torch.device:
    """Where the collectives of `group` find their tensors; `home` without NCCL."""
    if group_size(group) > 1 and dist.get_backend(group) == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return home


def on_all_ranks(work: Callable[[], ResultT], groups: ParallelGroups) -> ResultT:
    """What `work` returns; what it raises on one data rank is raised on all, so that none waits for it.

    Raises:
        ValueError: what `work` raised on any rank.
    """
    results: list[ResultT] = []
    check_on_all(lambda: results.append(work()), [groups.data], torch.empty(0))
    return results[0]
