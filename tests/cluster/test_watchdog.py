"""What the hang watch sees and says; that it ends a real run which stands still is in test_stop.py."""

from __future__ import annotations

import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from parallel_rl.cluster import preemption, progress
from parallel_rl.cluster import watchdog as watch_module
from parallel_rl.cluster.progress import ENDED, Post, post_of, report
from parallel_rl.cluster.watchdog import _Watch, lost_peer
from parallel_rl.testing.pool import run_world

WAITS = Post("waits", 0, "a", "all_reduce (session.py:131 total)", "rl step 7", "training", 540.0)
BUSY = Post("busy", 1, "b", "checker.py:5 prove", "rl step 7", "asking for rewards", 541.0)


def test_a_rank_without_an_answer_is_missing() -> None:
    others = [replace(WAITS, rank=rank) for rank in (1, 3)]
    text = report(WAITS, {post.rank: post for post in [WAITS, *others]}, {2: (replace(BUSY, rank=2), 12.34)}, 4)
    assert text == (
        "parallel-rl: error (rank 0, rl step 7): waited in all_reduce (session.py:131 total), in training; it last moved "
        "540.0 s ago\n"
        "  rank 2 on b is MISSING: no answer; its last heartbeat was 12.3 s ago, in rl step 7, asking for rewards\n"
        "  waiting in all_reduce (session.py:131 total), rl step 7, training: rank 0-1, 3\n"
    )
    assert "rank 2 is MISSING: it never sent a heartbeat" in report(WAITS, {0: WAITS, 1: others[0]}, {}, 3)


def test_a_rank_that_is_elsewhere_is_missing() -> None:
    posts = {0: WAITS, 1: BUSY}
    line = "rank 1 on b is MISSING from the collective: it is at checker.py:5 prove, in rl step 7, asking for rewards"
    assert line in report(WAITS, posts, {}, 2)
    mine = report(BUSY, posts, {}, 2)
    assert line in mine and "(rank 1, rl step 7): others wait in a collective that this rank is not in" in mine
    # but not where another has not answered at all
    text = report(WAITS, posts, {}, 3)
    assert "rank 2 is MISSING" in text and "rank 1 on b is at checker.py:5" in text


def test_a_failed_rank_is_named_with_its_cause() -> None:
    failed = replace(BUSY, kind="failed", what="OSError: [Errno 28] No space left on device")
    text = report(WAITS, {0: WAITS, 1: failed}, {}, 2)
    assert "rank 1 on b FAILED in rl step 7, asking for rewards: OSError: [Errno 28] No space left" in text
    assert "MISSING" not in text
    # a rank that was ended because of it stands behind it, though its number is lower
    ended = replace(failed, rank=1, what="stuck at x.py:1 as SIGTERM came", reason=ENDED)
    text = report(WAITS, {0: WAITS, 1: ended, 2: replace(failed, rank=2)}, {}, 3)
    assert text.index("rank 2 on b FAILED") < text.index("rank 1 on b FAILED")


def test_ranks_that_wait_for_different_things() -> None:
    text = report(WAITS, {0: WAITS, 1: replace(WAITS, rank=1, what="broadcast (a.py:1 f)")}, {}, 2)
    assert "no rank is missing" in text
    assert "waiting in broadcast (a.py:1 f), rl step 7, training: rank 1" in text


def test_a_thousand_missing_ranks_are_a_few_lines() -> None:
    text = report(WAITS, {0: WAITS}, {}, 1024)
    assert len(text.splitlines()) < 25 and "1007 more ranks are MISSING: 17-1023" in text


def test_a_post_survives_the_store() -> None:
    post = replace(WAITS, reason='said "no"\nand left')
    assert "\n" not in post.to_json()  # posts stand one on a line
    assert post_of(post.to_json()) == post


def _place_of_a_waiting_rank(rank: int, seen: Path) -> str | None:
    """Rank 1 comes when the first was seen to wait for it."""
    if rank == 1:
        while not seen.exists():
            time.sleep(0.01)
        dist.all_gather_object([None, None], "x")
        return None
    found: list[progress.Place] = []

    def look() -> None:
        while not found or found[-1].collective is None:
            time.sleep(0.01)
            found.append(progress.main_thread()[0])
        seen.touch()

    watcher = threading.Thread(target=look)
    watcher.start()
    dist.all_gather_object([None, None], "x")
    watcher.join()
    return str(found[-1])


def test_the_place_of_a_waiting_rank_is_the_collective_and_who_called_it(tmp_path: Path) -> None:
    place, _ = run_world(2, _place_of_a_waiting_rank, tmp_path / "seen")
    assert place is not None and place.startswith("all_gather_object (test_watchdog.py:")
    assert place.endswith(" _place_of_a_waiting_rank)")


def _a_peer_leaves(rank: int) -> tuple[bool, str] | None:
    group = dist.new_group([0, 1])
    dist.barrier(group)  # connected, before one leaves
    if rank == 1:
        dist.destroy_process_group(group)
        return None
    try:
        try:
            dist.all_reduce(torch.ones(1), group=group)
        except RuntimeError as error:
            raise ValueError("this checkpoint does not fit") from error
    except ValueError as error:
        gone = lost_peer(error)
        assert gone is not None
        return True, str(progress.of_traceback(gone.__traceback__))
    return None


def test_a_peer_that_left_is_found_among_the_causes_of_an_error() -> None:
    found, _ = run_world(2, _a_peer_leaves)
    assert found is not None and found[0] and found[1].startswith("all_reduce (test_watchdog.py:")
    assert lost_peer(ValueError("the gradient norm is nan")) is None
    assert lost_peer(RuntimeError("out of memory")) is None


@pytest.fixture
def watches(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[dist.TCPStore, Callable[[int, float], _Watch]]]:
    """A store, and what makes watches of a world of two in this process."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)

    def make(rank: int, timeout: float) -> _Watch:
        monkeypatch.setenv("RANK", str(rank))
        return _Watch(timeout)

    progress.reset()
    yield store, make


def test_ranks_that_fail_alike_go_on_to_their_own_messages(
    watches: tuple[dist.TCPStore, Callable[[int, float], _Watch]], monkeypatch: pytest.MonkeyPatch
) -> None:
    store, make = watches
    monkeypatch.setattr(watch_module, "_GATHER", 60.0)  # who waits for all of it did not hear of the other
    both = [make(rank, 20.0) for rank in (0, 1)]
    for watch in both:
        watch.start()
    ends = [threading.Thread(target=watch.fail, args=[ValueError("alike")]) for watch in both]
    began = time.monotonic()
    for end in ends:
        end.start()
    for end in ends:
        end.join(60)
    for watch in both:
        watch.close()
    assert time.monotonic() - began < 50
    posts = [post_of(line) for line in store.get("parallel_rl/watch/0/posts").decode().splitlines()]
    assert sorted(post.rank for post in posts) == [0, 1]
    assert {(post.kind, post.what) for post in posts} == {("failed", "ValueError: alike")}


def test_long_work_outside_of_collectives_is_no_hang(
    watches: tuple[dist.TCPStore, Callable[[int, float], _Watch]],
) -> None:
    store, make = watches
    watch = make(0, 0.4)
    watch.start()
    store.wait(["parallel_rl/watch/0/beat/0"], timedelta(seconds=60))
    time.sleep(1.0)
    watch.close()
    assert not store.check(["parallel_rl/watch/0/alarm"])


def test_a_rank_that_is_stuck_as_sigterm_comes_says_where_and_ends(
    watches: tuple[dist.TCPStore, Callable[[int, float], _Watch]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a read or a reward it would be killed without a word: no step's end, no collective, no timeout comes before."""
    said: list[str] = []
    monkeypatch.setattr(_Watch, "_end", lambda self, text: said.append(text))
    monkeypatch.setattr(watch_module, "_GATHER", 0.1)
    monkeypatch.setattr(watch_module, "_TERM", 0.3)
    _, make = watches
    watch = make(0, 2.0)
    progress.tick("asking the reward function")
    watch.start()
    time.sleep(1.0)
    assert not said  # nobody has asked it to end
    monkeypatch.setattr(preemption, "_ended", time.monotonic())
    time.sleep(1.5)
    watch.close()
    where = r"test_watchdog.py:\d+ test_a_rank_that_is_stuck\w+, in asking the reward function"
    assert re.match(
        rf"parallel-rl: error \(rank 0\): SIGTERM came \d s ago, but the rank has been stuck for \d s at {where}; it exits",
        said[0],
    )


def test_a_rank_that_writes_a_checkpoint_as_sigterm_comes_is_not_stuck(
    watches: tuple[dist.TCPStore, Callable[[int, float], _Watch]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The main thread waits for the disk in one call, for longer than a read or a reward would be given."""
    said: list[str] = []
    monkeypatch.setattr(_Watch, "_end", lambda self, text: said.append(text))
    monkeypatch.setattr(watch_module, "_GATHER", 0.1)
    monkeypatch.setattr(watch_module, "_TERM", 0.2)
    monkeypatch.setattr(preemption, "_ended", time.monotonic())
    store, make = watches
    watch = make(0, 2.0)
    progress.tick("writing a checkpoint", saving=True)
    watch.start()
    store.wait(["parallel_rl/watch/0/beat/0"], timedelta(seconds=60))
    time.sleep(0.8)
    assert not said
    progress.tick("asking the reward function")
    time.sleep(0.8)
    watch.close()
    assert "in asking the reward function" in said[0]


def test_an_error_of_the_gpu_is_not_taken_for_a_lost_store(
    watches: tuple[dist.TCPStore, Callable[[int, float], _Watch]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process would end with "torchrun's agent is gone" in place of the error itself."""

    class Broken:
        def query(self) -> bool:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    for name in ("is_available", "is_initialized"):
        monkeypatch.setattr(torch.cuda, name, lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "default_stream", lambda device: Broken())
    store, make = watches
    watch = make(0, 0.4)
    ended: list[str] = []
    monkeypatch.setattr(watch, "_end", ended.append)
    watch.start()
    store.wait(["parallel_rl/watch/0/beat/0"], timedelta(seconds=60))
    time.sleep(0.5)
    assert watch._thread.is_alive() and not ended
    watch.close()
    assert not store.check(["parallel_rl/watch/0/alarm"])


def test_a_tick_costs_nothing() -> None:
    began = time.thread_time()  # of this thread alone, whatever else the machine does
    for _ in range(10_000):
        progress.tick("training")
    assert (time.thread_time() - began) / 10_000 < 20e-6
