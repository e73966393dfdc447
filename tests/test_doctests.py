"""The examples in docstrings run, and what is public has one."""

from __future__ import annotations

import doctest
import inspect
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest

from parallel_rl.losses import registry
from parallel_rl.testing.pool import run_world

ROOT = Path(__file__).parents[1]
FILES = sorted((ROOT / "parallel_rl").rglob("*.py"))
NAMES = {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path for path in FILES}
WITH_EXAMPLES = [name for name, path in NAMES.items() if ">>> " in path.read_text(encoding="utf-8")]
PUBLIC = ("parallel_rl", *(f"parallel_rl.{room}" for room in ("losses", "advantages", "experience", "megatron")))
FUNCTIONAL = [name for name in NAMES if name.startswith("parallel_rl.functional.")]
MEGATRON = "parallel_rl.megatron"  # in a world of its own
FLAGS = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS


@pytest.mark.parametrize("name", [name for name in WITH_EXAMPLES if not name.startswith(MEGATRON)])
def test_the_examples_of_a_module_run(name: str) -> None:
    before = dict(registry._LOSSES)
    try:
        found = doctest.testmod(import_module(name), optionflags=FLAGS)
    finally:
        registry._LOSSES.clear()
        registry._LOSSES.update(before)
    assert found.failed == 0, "see the captured output"


def test_the_examples_of_megatron_run() -> None:
    pytest.importorskip("megatron.core")
    [failed] = run_world(1, megatron_examples, [name for name in WITH_EXAMPLES if name.startswith(MEGATRON)])
    assert failed == "", failed


def megatron_examples(rank: int, names: list[str]) -> str:
    """Those of the package first: they make the model and the data that the others start from."""
    import torch

    from parallel_rl import NLLLoss, count_valid

    shared = {**vars(import_module(MEGATRON)), "torch": torch, "NLLLoss": NLLLoss, "count_valid": count_valid}
    found: list[str] = []
    runner = doctest.DocTestRunner(optionflags=FLAGS)
    for name in [MEGATRON, *sorted(set(names) - {MEGATRON})]:
        module = import_module(name)
        for test in doctest.DocTestFinder().find(module, name, globs={}):
            test.globs = shared if name == MEGATRON else {**shared, **vars(module)}
            runner.run(test, out=found.append, clear_globs=False)
    assert runner.tries > len(names)
    return "".join(found)


def public() -> Iterator[tuple[str, object]]:
    """What users call: functions, and the first page's classes but for plain results; options are shown by what takes them."""
    for name in PUBLIC:
        module = import_module(name)
        for one in module.__all__:
            value = getattr(module, one)
            called = name == "parallel_rl" and inspect.isclass(value) and not issubclass(value, tuple)
            if inspect.isfunction(value) or called:
                yield f"{name}.{one}", value
    for name in FUNCTIONAL:
        for one, value in inspect.getmembers(import_module(name), inspect.isfunction):
            if not one.startswith("_") and value.__module__ == name:
                yield f"{name}.{one}", value


def test_what_is_public_has_an_example() -> None:
    without = {name.removeprefix("parallel_rl.") for name, value in public() if ">>>" not in (value.__doc__ or "")}
    assert without == set(), "write a short example that runs (>>>)"
