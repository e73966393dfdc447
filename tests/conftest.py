"""Hooks for the whole suite. The process that only hands tests out to others imports no torch."""

import gc
import sys
from collections.abc import Iterator

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


#: files whose slow tests take a minute and more in one process, the longest first; at the end those that mostly wait
LONG = (
    "distributed/test_law", "testing/whole_step", "vocab/test_triton_interpreter", "training/algorithms/test_recipes",
    "tools/test_gpu_check", "benchmarks/test_", "plan/test_memory", "distributed/test_l", "distributed/test_megatron_law",
    "prefix_tree/test_law", "megatron/hf/test_round_trip", "cluster/test_preemption", "verify/test_",
    "training/preflight/test_gate", "test_cli", "training/rollouts/test_", "testing/test_failures",
)  # fmt: skip


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with those: begun last, one would be waited for at the end."""

    def place(item: pytest.Item) -> int:
        name = item.path.as_posix()
        return next((number for number, start in enumerate(LONG) if f"/tests/{start}" in name), len(LONG))

    items.sort(key=place)


def pytest_collection_finish(session: pytest.Session) -> None:
    """The ranks run functions of the test modules: imported once, not by every rank."""
    import torch

    from parallel_rl.testing import pool

    torch.set_num_threads(1)  # OpenMP threads that wait for a busy core cost more than they bring
    modules = {module.__name__: module for item in session.items if (module := getattr(item, "module", None))}
    pool.preload(*(name for name, module in modules.items() if hasattr(module, "run_world")))


def pytest_sessionfinish(session: pytest.Session) -> None:
    gc.unfreeze()  # or extension modules call what is left at the end a leak
    if "parallel_rl.testing.pool" in sys.modules:
        sys.modules["parallel_rl.testing.pool"].close()
