"""Turn a fault on one rank into an error on all ranks, so that none waits for another.

The error is the same on every rank: a ValueError if `work` refused its input, `Unavailable` if an outside service did not
answer, else a RuntimeError. It names ranks and causes: "rank 1: sequence length 10 is not divisible by 4".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar, cast

import torch
import torch.distributed as dist

from parallel_rl.groups import all_gather, group_rank, group_size, reduce_
from parallel_rl.replicated import Replicated
from parallel_rl.validation import checks_values, get_validation

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup

ResultT = TypeVar("ResultT")

_ROUNDING = 1e-4  # what nondeterministic sums on a GPU may differ in
_CAUSES = 4  # different ones in a message
_WHOLE = (
    "the vocabulary shards are bit-equal on all tensor ranks; give each rank its own columns: a GPTModel needs "
    "parallel_output = True, and a head's shards different initial weights"
)
_AGREED = "_faults_of_ranks"  # an attribute of errors that ranks agreed on, for an agreement around theirs


class Unavailable(RuntimeError):
    """An outside service does not answer now and may later; the unfinished work can then be done.

    >>> issubclass(Unavailable, RuntimeError)
    True
    """


def raise_on_all_ranks(
    work: Callable[[], ResultT],
    groups: Sequence[ProcessGroup | None] | None = None,
    like: Tensor | None = None,
    same: Mapping[str, int] | None = None,
    what: str = "",
    alike: Replicated | None = None,
) -> ResultT:
    """Return `work()` of this rank, unless it failed on any rank of `groups`; then raise on all of them.

    Costs one MAX all-reduce a group. Every rank calls it; `work` must not communicate, unless it fails on all ranks alike.

    >>> raise_on_all_ranks(lambda: 3)
    3

    Args:
        work: a check of this rank's input, or anything that may fail on one rank alone.
        groups: whose collectives come next; None entries are groups of one. None: the world, if there is one.
        like: input whose values `work` checks; if the mode skips values (`set_validation`), `work` runs without a
            collective. None: ranks always exchange their faults.
        same: numbers by name that all ranks of the groups must agree in, such as the number of tokens; same names everywhere.
        what: put before the causes.
        alike: data that the ranks of each group must hold alike, on every rank of a group or none. Its checksum joins the
            exchange; where checksums differ, a second collective compares the fields.

    Raises:
        ValueError: raised by `work` on any rank, or a number or a field in which ranks differ.
        Unavailable: raised by `work` on all ranks that failed.
        RuntimeError: any other failure.
    """
    groups = [dist.group.WORLD] if groups is None else groups
    real = {place: group for place, group in enumerate(groups) if group is not None and group_size(group) > 1}
    if not (real or what) or (like is not None and not checks_values(like)):
        return work()
    result, error = _attempt(work)
    # One group after the other: a rank passes on over the second group a fault it received over the first.
    faults = _known(error)
    home = torch.device("cpu") if like is None else like.device
    checksum = alike.checksum() if alike is not None and not any(faults.values()) else 0
    for place, group in real.items():
        common = None if alike is None else _Common(alike, checksum, place)
        faults |= _faults_of_group(faults, group, home, same or {}, common)
    if any(faults.values()):
        kinds = {fault.kind for fault in faults.values() if fault is not None}
        agreed = (kinds.pop() if len(kinds) == 1 else RuntimeError)(_message(what, faults))
        if not what:
            vars(agreed)[_AGREED] = faults
        raise agreed from error
    return cast(ResultT, result)


def gather_results(work: Callable[[], ResultT], what: str = "") -> list[ResultT]:
    """Gather `work()` of every rank of the world, in order and pickled; raise as `raise_on_all_ranks`."""
    result = raise_on_all_ranks(work, what=what)
    results = [result] * group_size(dist.group.WORLD)
    if len(results) > 1:
        dist.all_gather_object(results, result)
    return results


def on_first_rank(work: Callable[[], ResultT], what: str) -> ResultT:
    """Return `work()` of rank 0 on every rank of the world (pickled); one broadcast.

    Errors: a ValueError or Unavailable of `work` as it is, a RuntimeError with `what` for any other.
    """
    result, error = _attempt(work) if dist.get_rank() == 0 else (None, None)
    refusal = error if isinstance(error, ValueError | Unavailable) else None
    outcome = [(result, refusal, None if error is None else describe(error))]
    dist.broadcast_object_list(outcome, src=0)
    result, refusal, cause = outcome[0]
    if refusal is not None:
        raise refusal
    if cause is not None:
        raise RuntimeError(f"{what}: rank 0: {cause}") from error
    return cast(ResultT, result)


def check_replicated(gradients: Sequence[Tensor | None], group: ProcessGroup | None, like: Tensor) -> None:
    """Refuse upstream gradients that differ between tensor ranks, in mode "always".

    They would silently corrupt the model's gradient. One all-gather finds them.

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


def shape_facts(logits: Tensor, vocab_size: int | None, vocab_start: int | None = None) -> dict[str, int]:
    """Collect what ranks with a common batch must agree in: tokens, how shards are given, their width."""
    width = logits.shape[-1] if logits.dim() else 1
    return {
        "the number of local tokens": logits.shape[:-1].numel(),  # a shard may have no column
        "the width of the vocabulary shard (without vocab_size)": width if vocab_size is None else 0,
        "how many give a vocab_start (1, or 0)": int(vocab_start is not None),
    }


def communication_device(group: ProcessGroup | None, home: torch.device) -> torch.device:
    """Return the device of the tensors that `group`'s collectives take; `home` without NCCL."""
    if group_size(group) > 1 and dist.get_backend(group) == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return home


def sum_over_groups(x: Tensor, groups: Sequence[ProcessGroup | None]) -> Tensor:
    """Sum x over the ranks of one group after the other, on x's device; may overwrite x."""
    home = x.device
    for group in groups:
        x = reduce_(x.to(communication_device(group, home)), group)
    return x.to(home)


def describe(error: BaseException) -> str:
    """Render an error's kind and message in one line."""
    lines = [line.strip() for line in str(error).strip().splitlines()]
    if not isinstance(error, Exception | SystemExit):  # a CheckpointException: tracebacks, with the cause at the end
        return lines[-1] if lines else type(error).__name__
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


@dataclass(frozen=True)
class _Fault:
    cause: str
    kind: type[Exception]

    @classmethod
    def of(cls, error: BaseException) -> _Fault:
        kind = next((kind for kind in (ValueError, Unavailable) if isinstance(error, kind)), RuntimeError)
        return cls(describe(error) if kind is RuntimeError else str(error), kind)


_Faults = Mapping[int, _Fault | None]  # of each rank heard from


def _known(error: BaseException | None) -> dict[int, _Fault | None]:
    """Return this rank's fault, or those of the ranks that agreed on `error` already."""
    mine = {group_rank(dist.group.WORLD): None if error is None else _Fault.of(error)}
    agreed: _Faults | None = None if error is None else vars(error).get(_AGREED)
    return mine if agreed is None else dict(agreed)


def _attempt(work: Callable[[], ResultT]) -> tuple[ResultT | None, BaseException | None]:
    try:
        return work(), None
    except (Exception, SystemExit) as error:  # a user's function may call sys.exit while the other ranks wait
        return None, error
    except BaseException as error:
        from torch.distributed.checkpoint import CheckpointException  # is no Exception, and takes 1 s to import

        if isinstance(error, CheckpointException):
            return None, error
        raise


@dataclass(frozen=True)
class _Common:
    """Data that a group holds alike, its checksum, and the group's place in the agreement."""

    data: Replicated
    checksum: int
    place: int

    def numbers(self, healthy: bool) -> list[int]:
        return [self.checksum, self.data.shard_checksum() if healthy and self.place == 0 else 0]


def _faults_of_group(
    faults: _Faults, group: ProcessGroup, home: torch.device, same: Mapping[str, int], common: _Common | None
) -> _Faults:
    """Return the faults that the ranks of `group` know of; nothing is gathered where there is none."""
    healthy = not any(faults.values())
    numbers = [*same.values(), *([] if common is None else common.numbers(healthy))]
    flags = torch.tensor(
        [int(not healthy), *numbers, *(-x for x in numbers)],
        dtype=torch.int64,
        device=communication_device(group, home),
    )
    dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=group)
    faulty, *bounds = flags.tolist()
    if faulty:
        heard: list[_Faults] = [{}] * group_size(group)
        dist.all_gather_object(heard, faults, group=group)
        return {rank: fault for part in heard for rank, fault in part.items()}
    most, least = bounds[: len(numbers)], [-x for x in bounds[len(numbers) :]]
    for name, high, low in zip(same, most, least, strict=False):
        if high != low:
            return _of_all(group, f"the ranks of a group differ in {name}: it is {low} on one and {high} on another")
    if common is None:
        return {}
    ranks = dist.get_process_group_ranks(group)
    if most[-2] != least[-2]:
        sums: list[Mapping[str, float]] = [{}] * len(ranks)
        dist.all_gather_object(sums, common.data.sums(), group=group)
        if text := common.data.difference(sums, ranks, common.place):
            return _of_all(group, text)
    if most[-1] == least[-1] != 0:
        return _of_all(group, _WHOLE)
    return {}


def _of_all(group: ProcessGroup, cause: str) -> _Faults:
    return dict.fromkeys(dist.get_process_group_ranks(group), _Fault(cause, ValueError))


def _message(what: str, faults: _Faults) -> str:
    ranks: dict[str, list[str]] = {}
    for rank, fault in sorted(faults.items()):
        if fault is not None:
            ranks.setdefault(fault.cause, []).append(str(rank))
    causes = [f"rank {', '.join(numbers)}: {cause}" for cause, numbers in ranks.items()]
    if len(ranks) == 1 and all(faults.values()):
        causes = [*ranks]
    if len(causes) > _CAUSES:
        causes[_CAUSES:] = [f"and {len(causes) - _CAUSES} more"]
    return (f"{what}: " if what else "") + "; ".join(causes)
