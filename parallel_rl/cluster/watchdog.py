"""The watchdog: a thread that notices when nothing progresses, and reports which rank waits for which.

A rank raises the alarm if it fails, or waits in a collective for nearly `run.timeout` seconds. Every rank then writes its
position to a store outside the ranks, prints all positions and ends. Work outside collectives is not limited.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import NoReturn

import torch
import torch.distributed as dist

from parallel_rl.cluster import preemption, progress
from parallel_rl.cluster.progress import ENDED, NAMED, Kind, Post, name_of, post_of, report, where

FRACTION = 0.9  # of the groups' timeout: the alarm comes before the collectives fail one by one
_LOOK = 1.0  # seconds between looks
_BEAT = 10.0  # between signs of life
_GATHER = 4.0  # for the other ranks' reports
_LINGER = 1.5  # for the others to print, and for the failed rank to end first
_ANSWER = 5.0  # of the store
_TERM = 15.0  # after SIGTERM; torchrun kills after 30


@contextlib.contextmanager
def watching(timeout: float) -> Iterator[None]:
    """Watch the ranks of a launched world; `timeout` is the process groups', in seconds.

    If a collective fails or nothing moves, print the report and exit with status 1; torchrun ends the others. Other exceptions
    pass through once the other ranks have been notified.
    """
    progress.reset()
    if int(os.environ.get("WORLD_SIZE", "1")) == 1 or "MASTER_ADDR" not in os.environ or dist.is_initialized():
        yield
        return
    watch = _Watch(timeout)
    watch.start()
    try:
        yield
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # torch's CheckpointException is no Exception
        watch.fail(error)
        raise
    finally:
        watch.close()


def lost_peer(error: BaseException) -> BaseException | None:
    """Find, among an error and its causes, the collective that failed because a peer is gone or late."""
    cause: BaseException | None = error
    while cause is not None:
        text = str(cause)
        if isinstance(cause, dist.DistError) or (isinstance(cause, RuntimeError) and "/gloo/" in text):
            return cause
        cause = cause.__cause__ or cause.__context__
    return None


class _Watch:
    """Watch of one rank: the main thread calls `start`, `close`, `fail`; its own thread uses the store."""

    def __init__(self, timeout: float) -> None:
        self._timeout, self._rank, self._world = timeout, int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self._look_every = min(_LOOK, timeout / 20)
        self._beat_every = min(_BEAT, timeout / 10)
        self._host = socket.gethostname()
        self._agent = os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else None
        self._wake, self._told = threading.Event(), threading.Event()
        self._closed = False
        self._failure: Post | None = None
        self._lost: Post | None = None
        self._moved = self._looked = time.monotonic()
        self._mark: tuple[int, tuple[tuple[int, int], ...]] | None = None
        self._place = progress.Place(None, "")
        self._next_beat = 0.0
        self._prefix = f"parallel_rl/watch/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
        self._thread = threading.Thread(target=self._run, name="hang watch", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._closed = True
        self._wake.set()
        self._thread.join(_GATHER + _ANSWER)

    def fail(self, error: BaseException) -> None:
        """Report to the others; exit if `error` is a failed collective."""
        gone = lost_peer(error)
        if gone is None:
            text = str(error).strip().splitlines()
            self._failure = self._post("failed", f"{type(error).__name__}: {text[0]}" if text else type(error).__name__)
        else:
            reason = str(gone).split("] ", 1)[-1].split(". This is typically")[0].splitlines()[0]
            self._lost = self._post("waits", str(progress.of_traceback(gone.__traceback__)), reason)
        self._wake.set()
        if not self._told.wait(_GATHER + _LINGER + 2 * _ANSWER) and self._lost is not None:
            self._end(self._storeless("does not answer"))

    def _run(self) -> None:
        try:
            self._connect()
            while not self._closed:
                self._look()
                self._wake.wait(self._look_every)
        except (dist.DistError, RuntimeError):
            self._wake.clear()
            if self._lost is None:
                self._wake.wait(2 * self._look_every)  # the run may end anyway, and the store a little earlier
            if not (self._closed or self._failure):
                self._end(self._storeless("is gone"))
        finally:
            self._told.set()

    def _connect(self) -> None:
        """Connect to torchrun's store; without torchrun, to that of the first rank."""
        self._store = dist.TCPStore(
            os.environ["MASTER_ADDR"],
            int(os.environ["MASTER_PORT"]),
            is_master=False,
            wait_for_workers=False,
            timeout=timedelta(seconds=self._timeout),
        )
        self._store.set_timeout(timedelta(seconds=_ANSWER))

    def _look(self) -> None:
        now = time.monotonic()
        place, frames = progress.main_thread()
        mark = (progress.moves(), frames)
        suspended = now - self._looked > 10 * self._look_every
        self._looked = now
        if mark != self._mark or suspended:
            self._mark, self._moved, self._place = mark, now, place
        if self._failure is not None:
            self._tell(self._failure)
        elif self._lost is not None:
            self._alarm(self._lost)
        elif self._orphaned():
            self._tell(self._post("failed", self._agent_gone()))
            self._end(f"parallel-rl: error{name_of(self._rank, progress.step_name())}: {self._agent_gone()}\n")
        elif self._stuck(now) and not self._store.check([self._key("alarm")]):
            self._tell(self._post("failed", f"stuck at {self._place} as {ENDED} came", ENDED))
            self._end(f"parallel-rl: error{name_of(self._rank, progress.step_name())}: {self._stuck(now)}\n")
        elif self._store.check([self._key("alarm")]):
            self._answer()
        elif now - self._moved > FRACTION * self._timeout and self._waits():
            self._alarm(self._mine())
        elif now >= self._next_beat:
            self._next_beat = now + self._beat_every
            self._store.set(self._key(f"beat/{self._rank}"), f"{time.time()} {self._mine().to_json()}")

    def _tell(self, post: Post) -> None:
        self._leave(post, "failed")
        self._told.set()
        self._closed = True

    def _answer(self) -> None:
        if self._store.get(self._key("alarm")) == b"failed":
            end = time.monotonic() + 2 * self._look_every  # this one may be about to fail alike
            while time.monotonic() < end and not (self._failure or self._lost or self._closed):
                time.sleep(0.02)
        if self._closed:
            return
        if self._failure is not None:
            return self._tell(self._failure)
        self._alarm(self._lost or self._mine())

    def _alarm(self, mine: Post) -> NoReturn:
        self._leave(mine, "waits")
        lines = self._store.get(self._key("posts")).decode().splitlines()
        posts = {post.rank: post for post in map(post_of, lines)}
        heard = {}
        for rank in [rank for rank in range(self._world) if rank not in posts][:NAMED]:
            if self._store.check([self._key(f"beat/{rank}")]):
                when, text = self._store.get(self._key(f"beat/{rank}")).decode().split(" ", 1)
                heard[rank] = post_of(text), max(0.0, time.time() - float(when))
        self._say(report(mine, posts, heard, self._world))
        self._store.add(self._key("said"), 1)
        failed = any(
            post.kind == "failed" for post in posts.values()
        )  # it ends first: torchrun calls that the root cause
        self._until("said", self._world if failed else len(posts), _LINGER)
        self._end("")

    def _leave(self, post: Post, why: str) -> None:
        """Send this rank's report and the alarm, then wait briefly for the other reports."""
        self._store.append(self._key("posts"), post.to_json() + "\n")  # type: ignore[attr-defined]  # torch's stub lacks it
        if why == "failed" or not self._store.check([self._key("alarm")]):
            self._store.set(self._key("alarm"), why)
        self._store.add(self._key("posted"), 1)
        self._until("posted", self._world, _GATHER)

    def _until(self, counter: str, count: int, seconds: float) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end and self._store.add(self._key(counter), 0) < count:
            time.sleep(0.05)

    def _mine(self) -> Post:
        if not self._waits():
            return self._post("busy", str(self._place))
        place = self._place if self._place.collective else progress.Place("the GPU", self._place.line)
        return self._post("waits", str(place))

    def _post(self, kind: Kind, what: str, reason: str = "") -> Post:
        age = time.monotonic() - self._moved
        return Post(kind, self._rank, self._host, what, progress.step_name(), progress.doing(), age, reason)

    def _stuck(self, now: float) -> str:
        """Return the activity that has not moved since SIGTERM; "" during a checkpoint's long write."""
        ending, still = preemption.ending(), now - self._moved
        if ending is None or min(ending, still) < _TERM or progress.saving() or self._waits():
            return ""
        return (
            f"SIGTERM came {ending:.0f} s ago, but the rank has been stuck for {still:.0f} s at {self._place}, in "
            f"{progress.doing()}; it exits without saving, and the last checkpoint is kept"
        )

    def _orphaned(self) -> bool:
        return self._agent is not None and os.getppid() != self._agent

    def _agent_gone(self) -> str:
        return (
            f"torchrun's agent (process {self._agent}) on this rank's node, {self._host}, is gone, and with it the run"
        )

    def _storeless(self, how: str) -> str:
        mine = self._lost or self._mine()
        who = "torchrun's agent" if self._agent is not None else "rank 0"
        address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        cause = f"{who} on the first node ({address}) {how}, and with it the run"
        if self._orphaned():
            cause = self._agent_gone()
        return f"parallel-rl: error{name_of(self._rank, mine.step)}: {cause}; this rank {where(mine)}\n"

    def _waits(self) -> bool:
        if self._place.collective is not None:
            return True
        if not (torch.cuda.is_available() and torch.cuda.is_initialized()):
            return False
        try:
            device = int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count()
            return not torch.cuda.default_stream(device).query()
        except RuntimeError:  # a GPU fault: the main thread raises it at its next call
            return False

    def _key(self, name: str) -> str:
        return f"{self._prefix}/{name}"

    def _say(self, text: str) -> None:
        os.write(2, text.encode())  # whole, among other ranks'

    def _end(self, text: str) -> NoReturn:
        sys.stdout.flush()
        self._say(text)
        os._exit(1)
