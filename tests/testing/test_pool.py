"""The pool itself: order of results, world sizes, failures that must not hang, and life after a kill."""

import os
import time

import pytest
import torch
import torch.distributed as dist

from parallel_rl.testing.pool import WorldError, run_world


def _sum_of_ranks(rank: int, scale: float) -> tuple[int, float]:
    value = torch.tensor(rank * scale)
    dist.all_reduce(value)
    return rank, value.item()


def _state(rank: int) -> tuple[int, int, torch.dtype, float]:
    seen = (os.getpid(), dist.get_world_size(), torch.get_default_dtype(), torch.rand(()).item())
    torch.set_default_dtype(torch.float64)
    dist.new_group(list(range(dist.get_world_size())))
    return seen


def _many_groups(rank: int) -> tuple[int, int, int]:
    before = len(os.listdir("/proc/self/task"))
    for _ in range(10):
        dist.new_group(list(range(dist.get_world_size())))
    return os.getpid(), before, len(os.listdir("/proc/self/task"))


def _one_raises(rank: int) -> None:
    if rank == 1:
        raise ValueError("only I am wrong")
    dist.all_reduce(torch.zeros(1))


def _all_raise(rank: int) -> None:
    time.sleep(0.1 * rank)
    raise ValueError(f"temperature of rank {rank}")


def _hang(rank: int) -> None:
    if rank == 0:
        dist.barrier()
    else:
        time.sleep(1000)


def _die(rank: int) -> None:
    if rank == 0:
        os._exit(3)
    dist.barrier()


def test_results_come_in_rank_order_at_every_world_size() -> None:
    for world_size in (2, 4, 1, 3):
        total = 0.5 * sum(range(world_size))
        assert run_world(world_size, _sum_of_ranks, 0.5) == [(rank, total) for rank in range(world_size)]


def test_workers_stay_and_calls_leave_nothing_behind() -> None:
    first, second = run_world(2, _state), run_world(2, _state)
    assert first == second
    assert first[0][0] != first[1][0]
    assert [row[1:3] for row in first] == [(2, torch.float32)] * 2


@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="threads are counted by Linux")
def test_ranks_that_wait_for_work_hold_no_groups() -> None:
    """Hundreds of idle groups took two thirds of the processor: each has threads that look for messages all the time."""
    process, before, most = run_world(2, _many_groups)[0]
    assert most >= before + 10
    deadline = time.monotonic() + 10
    while len(os.listdir(f"/proc/{process}/task")) > before:
        assert time.monotonic() < deadline, "the groups of the last call are still there"
        time.sleep(0.05)


def test_an_error_on_one_rank_is_raised_while_the_others_wait() -> None:
    start = time.monotonic()
    with pytest.raises(WorldError, match="only I am wrong") as caught:
        run_world(3, _one_raises)
    assert time.monotonic() - start < 110  # the limit of a call is 120
    assert caught.value.errors[1] == "ValueError: only I am wrong"
    assert "_one_raises" in caught.value.tracebacks[1]
    assert run_world(3, _sum_of_ranks, 1.0)[0] == (0, 3.0)


def test_errors_of_all_ranks_are_seen() -> None:
    with pytest.raises(WorldError) as caught:
        run_world(3, _all_raise)
    assert caught.value.errors == {rank: f"ValueError: temperature of rank {rank}" for rank in range(3)}
    assert caught.value.silent == []


@pytest.mark.slow
def test_a_hang_is_killed_and_the_next_call_works() -> None:
    with pytest.raises(WorldError, match="gave no answer") as caught:
        run_world(2, _hang, timeout=10)
    assert 1 in caught.value.silent
    assert "_hang" in caught.value.tracebacks[1]
    assert run_world(2, _sum_of_ranks, 1.0) == [(0, 1.0), (1, 1.0)]


def test_a_dead_worker_is_reported() -> None:
    with pytest.raises(WorldError, match="exit code 3"):
        run_world(2, _die)
    assert run_world(2, _sum_of_ranks, 1.0) == [(0, 1.0), (1, 1.0)]


def test_world_size_is_checked() -> None:
    with pytest.raises(ValueError, match="world_size = 9"):
        run_world(9, _sum_of_ranks, 1.0)
