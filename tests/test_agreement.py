"""What one rank finds is an error on all: exceptions, words, results and the price."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint import CheckpointException

from parallel_rl.agreement import describe, gather_results, on_first_rank, raise_on_all_ranks
from parallel_rl.testing.pool import run_world
from tests.collectives import recorded

WORLD = 4


def fail(error: BaseException | None) -> str:
    if error is not None:
        raise error
    return "fine"


def outcome(error: BaseException | None, what: str = "") -> tuple[str, str]:
    try:
        return "result", raise_on_all_ranks(lambda: fail(error), what=what)
    except (ValueError, RuntimeError) as raised:
        return type(raised).__name__, str(raised)


def outcomes(rank: int) -> list[tuple[str, str]]:
    stack = CheckpointException("", {0: (RuntimeError("the disk is full"), None)})  # type: ignore[dict-item]
    return [
        outcome(None),
        outcome(ValueError("length 10 is not divisible by 4") if rank == 2 else None),
        outcome(ValueError("no rows") if rank in (0, 3) else None, "data.train"),
        outcome(ValueError("no rows")),
        outcome([ValueError("no rows"), OSError("disk full"), None, None][rank], "no checkpoint"),
        outcome(stack if rank == 1 else None, "no checkpoint"),
        outcome(ValueError(f"row {rank}")),
    ]


def test_the_same_exception_with_ranks_and_causes_on_all() -> None:
    each = run_world(WORLD, outcomes, timeout=60)
    assert each[0] == [
        ("result", "fine"),
        ("ValueError", "rank 2: length 10 is not divisible by 4"),
        ("ValueError", "data.train: rank 0, 3: no rows"),
        ("ValueError", "no rows"),
        ("RuntimeError", "no checkpoint: rank 0: no rows; rank 1: OSError: disk full"),
        ("RuntimeError", "no checkpoint: rank 1: RuntimeError: the disk is full"),
        ("ValueError", "rank 0: row 0; rank 1: row 1; rank 2: row 2; rank 3: row 3"),
    ]
    assert all(found == each[0] for found in each)


def nested(rank: int) -> list[str]:
    """Agreement among the pairs (0, 1), (2, 3), within one among (0, 2), (1, 3); one rank fails, then one pair disagrees."""
    pairs = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3], [0, 2], [1, 3])]
    inner, outer = pairs[rank // 2], pairs[2 + rank % 2]
    found = []
    for error, length in ((ValueError("no rows") if rank == 1 else None, 4), (None, 4 + (rank == 3))):
        try:
            raise_on_all_ranks(
                lambda e=error, n=length: raise_on_all_ranks(lambda: fail(e), [inner], same={"length": n}),  # type: ignore[misc]
                [outer],
            )
        except ValueError as raised:
            found.append(str(raised))
    return found


def test_an_agreement_within_another_gives_one_message() -> None:
    differ = "rank 2, 3: the ranks of a group differ in length: it is 4 on one and 5 on another"
    assert run_world(WORLD, nested, timeout=60) == [["rank 1: no rows", differ]] * WORLD


def prices(rank: int) -> tuple[list[str], list[str], list[object], list[object]]:
    with recorded() as ops:
        raise_on_all_ranks(lambda: object())  # is not pickled
        raise_on_all_ranks(lambda: lambda: None, [None])
    with recorded() as unlooked:
        raise_on_all_ranks(lambda: None, like=torch.empty(0, device="meta"))
    gathered = gather_results(lambda: rank**2)
    return ops, unlooked, gathered, [on_first_rank(lambda: rank, "nothing")]


def test_results_and_collectives() -> None:
    for ops, unlooked, gathered, first in run_world(WORLD, prices, timeout=60):
        assert ops == ["allreduce_ MAX"] and unlooked == []
        assert gathered == [0, 1, 4, 9] and first == [0]


class Refusal(ValueError):
    pass


def first_rank_fails(rank: int) -> list[tuple[str, str]]:
    found = []
    for error in (Refusal("no such folder"), OSError("disk full")):
        try:
            on_first_rank(lambda error=error: fail(error), "no marker")  # type: ignore[misc]
        except (ValueError, RuntimeError) as raised:
            found.append((type(raised).__name__, str(raised)))
    return found


def test_what_the_first_rank_refuses_stays_the_error_it_was() -> None:
    expected = [("Refusal", "no such folder"), ("RuntimeError", "no marker: rank 0: OSError: disk full")]
    assert run_world(2, first_rank_fails, timeout=60) == [expected, expected]


def test_a_process_alone() -> None:
    assert not dist.is_initialized()
    with pytest.raises(OSError, match=r"^disk full$"):
        raise_on_all_ranks(lambda: fail(OSError("disk full")))
    with pytest.raises(RuntimeError, match=r"^no log: OSError: disk full$"):
        raise_on_all_ranks(lambda: fail(OSError("disk full")), what="no log")
    with pytest.raises(KeyboardInterrupt):
        raise_on_all_ranks(lambda: fail(KeyboardInterrupt()), what="no log")
    assert gather_results(lambda: 1) == [1]
    assert describe(OSError()) == "OSError"
