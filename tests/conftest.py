"""Hooks for the whole suite. The process that only hands tests out to others imports no torch."""

import contextlib
import gc
import multiprocessing.forkserver
import multiprocessing.util
import os
import sys
from collections.abc import Iterator
from typing import NoReturn

import pytest

pytest.register_assert_rewrite("tests.training.helpers")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """What is imported and collected stays: the collector would look through it again and again, now and in every test."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


#: files whose slow tests take a minute and more in one process, the longest first
LONG = (
    "vocab/test_triton_interpreter", "distributed/test_law", "training/algorithms/test_recipes", "tools/test_gpu_check",
    "distributed/test_megatron_law", "testing/whole_step", "cluster/test_preemption", "distributed/test_l", "benchmarks/test_",
)  # fmt: skip


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with those: begun last, one would be waited for at the end."""

    def place(item: pytest.Item) -> int:
        name = item.path.as_posix()
        return next((number for number, start in enumerate(LONG) if f"/tests/{start}" in name), len(LONG))

    items.sort(key=place)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Fork the server of the ranks off this process, which has imported the test modules whose functions they run."""
    import torch

    from parallel_rl.testing import pool

    torch.set_num_threads(1)  # OpenMP threads that wait for a busy core cost more than they bring
    modules = {module.__name__: module for item in session.items if (module := getattr(item, "module", None))}
    worlds = [name for name, module in modules.items() if hasattr(module, "run_world")]
    pool.preload(*worlds)
    if worlds and not session.config.option.collectonly:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(multiprocessing.util, "spawnv_passfds", _fork)
            patch.setenv("OMP_NUM_THREADS", "1")
            multiprocessing.forkserver.ensure_running()


def _fork(program: bytes, arguments: list[str], descriptors: list[int]) -> int:
    """Run a server's code in a fork of this process, in place of an interpreter that would import all modules again."""
    if "forkserver" not in arguments[-1]:
        return _spawn(program, arguments, descriptors)
    if (process := os.fork()) == 0:
        _serve(arguments[-1], *descriptors)
    return process


_spawn = multiprocessing.util.spawnv_passfds


def _serve(code: str, listener: int, alive: int) -> NoReturn:
    """Run the server's code until the last process that holds the other end of `alive` has ended."""
    try:
        for descriptor in map(int, os.listdir("/proc/self/fd")):
            with contextlib.suppress(OSError):
                if descriptor != alive and os.path.sameopenfile(descriptor, alive):
                    os.close(descriptor)  # this process's copy of the other end
        gc.enable()
        exec(code, {})
    finally:
        os._exit(0)


def pytest_sessionfinish(session: pytest.Session) -> None:
    gc.unfreeze()  # or extension modules call what is left at the end a leak
    if "parallel_rl.testing.pool" in sys.modules:
        sys.modules["parallel_rl.testing.pool"].close()
