"""A warm pool of gloo ranks: `run_world(n, fn, *args)` runs `fn(rank, *args)` on n real processes.

Workers are forked from a server with torch preloaded, since forking a large pytest process deadlocks and spawning imports
torch per rank. They stay for the session; each call gets a fresh process group and state.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import multiprocessing
import os
import pickle
import shutil
import signal
import sys
import tempfile
import time
import types
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, NoReturn

from parallel_rl.testing.worker import work

MAX_WORLD = 8
START_TIMEOUT = 300.0  # a cold import of torch on a busy machine
SHORT_GRACE = 1.5  # for other ranks' errors after the first failure
GRACE = 8.0  # then the failed ranks' groups are closed, to end waiting collectives; the rest is killed

_SERIAL = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
_preload = ["torch", "torch.distributed"]


class WorldError(RuntimeError):
    """Failure of a rank: `errors` and `tracebacks` by rank, and `silent` ranks without an answer."""

    def __init__(self, errors: dict[int, str], tracebacks: dict[int, str], silent: list[int], why: str) -> None:
        self.errors, self.tracebacks, self.silent = errors, tracebacks, silent
        parts = [why, *(f"--- rank {rank}\n{text}" for rank, text in sorted(tracebacks.items()))]
        super().__init__("\n".join(parts))


def preload(*modules: str) -> None:
    """Import `modules` once in the server; call it before the first run_world."""
    _preload.extend(name for name in modules if name not in _preload)


def run_world(world_size: int, fn: Callable[..., Any], *args: Any, timeout: float = 120.0) -> list[Any]:
    """Run `fn(rank, *args)` on each rank of a gloo world and return the results in rank order.

    Args:
        world_size: 1 to 8.
        fn: a function with a picklable result. A function that warm ranks cannot import, e.g. of a notebook, gets ranks forked
            for this call.
        timeout: seconds for the whole call and for the process group.

    Raises:
        WorldError: a rank raised, died or hung. Silent ranks are shown with their stacks, killed and replaced.
    """
    if not 1 <= world_size <= MAX_WORLD:
        raise ValueError(f"world_size = {world_size} is not valid; 1 to {MAX_WORLD}")
    return _pool.run(world_size, fn, args, timeout)


def close() -> None:
    """End all workers; pytest does this at the end of the session."""
    _pool.close()


class _Pool:
    def __init__(self) -> None:
        self.workers: list[tuple[BaseProcess, Connection]] = []
        self.folder = ""
        self.calls = 0

    def run(self, world_size: int, fn: Callable[..., Any], args: tuple[Any, ...], timeout: float) -> list[Any]:
        task = _by_name(fn, args)
        if task is None:
            return _run_forked(world_size, fn, args, timeout)
        self._start(world_size)
        self.calls += 1
        store = os.path.join(self.folder, f"store{self.calls}")
        try:
            for rank in range(world_size):
                self._send(rank, (world_size, store, timeout), task)
            return self._collect(world_size, timeout)
        except (KeyboardInterrupt, SystemExit, BrokenPipeError):
            self.close()
            raise
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(store)

    def _send(self, rank: int, setting: tuple[int, str, float] | None, task: bytes) -> None:
        connection = self.workers[rank][1]
        connection.send_bytes(pickle.dumps(setting))
        connection.send_bytes(task)

    def _forget(self, rank: int) -> None:
        """Close a rank's groups and reset its state."""
        with contextlib.suppress(BrokenPipeError):  # it died meanwhile; the next start replaces it
            self._send(rank, None, b"")

    def _collect(self, world_size: int, timeout: float) -> list[Any]:
        ranks = {connection: rank for rank, (_, connection) in enumerate(self.workers[:world_size])}
        results: dict[int, Any] = {}
        errors: dict[int, str] = {}
        tracebacks: dict[int, str] = {}
        dead: set[int] = set()
        woken = False
        pending = set(ranks)
        deadline = time.monotonic() + timeout
        while pending:
            answered = wait(list(pending), timeout=max(0.0, deadline - time.monotonic()))
            if not answered:
                if woken or not errors:
                    break
                for rank in set(errors) - dead:  # ends the others' waiting collectives
                    self._forget(rank)
                woken, deadline = True, time.monotonic() + GRACE
            for connection in answered:
                assert isinstance(connection, Connection)
                pending.remove(connection)
                rank = ranks[connection]
                try:
                    kind, *answer = pickle.loads(connection.recv_bytes())  # nosec B301 # of a child, by a pipe
                except (EOFError, ConnectionResetError):
                    process = self.workers[rank][0]
                    process.join(5)
                    kind, answer = "error", [f"the process died, exit code {process.exitcode}"] * 2
                    dead.add(rank)
                if kind == "result":
                    results[rank] = answer[0]
                    continue
                if not errors:
                    deadline = min(deadline, time.monotonic() + SHORT_GRACE)
                errors[rank], tracebacks[rank] = answer
        for rank in set(ranks.values()) - dead:  # a gloo group's threads never rest
            self._forget(rank)
        if not (errors or pending):
            return [results[rank] for rank in range(world_size)]
        self._fail(errors, tracebacks, sorted(ranks[connection] for connection in pending), bool(dead), timeout)

    def _fail(
        self, errors: dict[int, str], tracebacks: dict[int, str], silent: list[int], dead: bool, timeout: float
    ) -> NoReturn:
        if errors:
            why = f"rank {', '.join(map(str, sorted(errors)))} failed"
            why += f"; rank {', '.join(map(str, silent))} gave no answer after that" if silent else ""
        else:
            why = f"rank {', '.join(map(str, silent))} gave no answer in {timeout:g} s"
        stacks = {rank: f"killed; it was at\n{self._stack(rank)}" for rank in silent}
        if silent or dead:
            self.close()
        raise WorldError(errors, {**tracebacks, **stacks}, silent, why)

    def _stack(self, rank: int) -> str:
        """Return a silent rank's stack, by faulthandler's SIGUSR1."""
        with contextlib.suppress(OSError, TypeError):
            os.kill(self.workers[rank][0].pid or 0, signal.SIGUSR1)
            time.sleep(0.2)
            with open(os.path.join(self.folder, f"stack{rank}"), encoding="utf-8") as file:
                return file.read()
        return "(unknown)"

    def _start(self, world_size: int) -> None:
        """Start the missing workers among 0 .. world_size - 1, together."""
        if any(not process.is_alive() for process, _ in self.workers):
            self.close()
        first = len(self.workers)
        if first >= world_size:
            return
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(_importable(_preload))
        self.folder = self.folder or tempfile.mkdtemp(prefix="parallel_rl_pool_")
        with _environment(**_SERIAL), _no_main():
            for rank in range(first, world_size):
                ours, theirs = context.Pipe()
                process = context.Process(target=work, args=(rank, theirs, self.folder), daemon=True)
                process.start()
                theirs.close()
                self.workers.append((process, ours))
        for rank, (_, connection) in enumerate(self.workers[first:], first):
            try:
                ready = connection.poll(START_TIMEOUT) and connection.recv_bytes() == b"ready"
            except (EOFError, ConnectionResetError):
                ready = False
            if not ready:
                self.close()
                raise WorldError({}, {}, [rank], f"rank {rank} did not start in {START_TIMEOUT:g} s, or died doing so")

    def close(self) -> None:
        for process, connection in self.workers:
            connection.close()  # an idle worker ends with its pipe
            process.join(0.02)
        for process, _ in self.workers:
            process.kill()
            process.join()
        self.workers = []
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder = ""


_pool = _Pool()
atexit.register(close)


def _by_name(fn: Callable[..., Any], args: tuple[Any, ...]) -> bytes | None:
    """Pickle the task; None if part of it exists only in this process."""
    try:
        task = pickle.dumps((fn, args))
    except (pickle.PicklingError, AttributeError, TypeError):
        return None
    return None if b"__main__" in task else task


def _run_forked(world_size: int, fn: Callable[..., Any], args: tuple[Any, ...], timeout: float) -> list[Any]:
    """Run on ranks forked off this process for this call."""
    torch = sys.modules.get("torch")
    if torch is not None and (torch.cuda.is_initialized() or torch.distributed.is_initialized()):
        raise ValueError(
            "a loss that is defined in a notebook or a script reaches its ranks by fork, which a process with a GPU or a "
            "process group in use cannot do; put it into a module and import it"
        )
    pool, context = _Pool(), multiprocessing.get_context("fork")
    pool.folder = tempfile.mkdtemp(prefix="parallel_rl_pool_")
    setting = (world_size, os.path.join(pool.folder, "store"), timeout)
    try:
        with _environment(**_SERIAL):
            for rank in range(world_size):
                ours, theirs = context.Pipe()
                first = (setting, lambda: (fn, args))
                process = context.Process(target=work, args=(rank, theirs, pool.folder, first), daemon=True)
                process.start()
                theirs.close()
                pool.workers.append((process, ours))
        for _, connection in pool.workers:
            with contextlib.suppress(EOFError, ConnectionResetError):
                connection.recv_bytes()  # ready
        return pool._collect(world_size, timeout)
    finally:
        pool.close()


@contextlib.contextmanager
def _no_main() -> Iterator[None]:
    """Hide the script, which a started process would import and so run again."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def _importable(modules: list[str]) -> list[str]:
    """Leave out modules whose import would end the server: it survives only an ImportError."""
    good = []
    for name in [*modules, "parallel_rl", *(["pytest"] if "pytest" in sys.modules else [])]:
        with contextlib.suppress(Exception):
            importlib.import_module(name)
            good.append(name)
    return good


@contextlib.contextmanager
def _environment(**values: str) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
