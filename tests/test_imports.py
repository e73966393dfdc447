"""What `import parallel_rl` brings, and what it leaves alone."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest

import parallel_rl

HEAVY = ("megatron", "transformer_engine", "triton", "tensorboard", "matplotlib", "rich", "yaml")
PEEK = """
import json, sys, torch
before = set(sys.modules)
import parallel_rl
print(json.dumps([sorted(before), sorted(sys.modules)]))
"""


def test_a_fresh_process_imports_nothing_heavy() -> None:
    out = subprocess.run([sys.executable, "-c", PEEK], capture_output=True, text=True, check=True, timeout=300)
    before, after = (set(names) for names in json.loads(out.stdout))
    assert "parallel_rl.losses.clipped_pg" in after
    brought = {name.partition(".")[0] for name in after - before}
    assert brought.isdisjoint(HEAVY)
    assert not any(name.startswith(("parallel_rl.megatron", "parallel_rl.training")) for name in after)


def test_the_public_names_exist_and_are_all_there_is() -> None:
    assert len(set(parallel_rl.__all__)) == len(parallel_rl.__all__)
    for name in parallel_rl.__all__:
        assert hasattr(parallel_rl, name), name
    own = {
        name
        for name, value in vars(parallel_rl).items()
        if not name.startswith("_") and getattr(value, "__module__", "").startswith("parallel_rl.")
    }
    assert own == set(parallel_rl.__all__)


def public() -> Iterator[tuple[str, Callable]]:
    """Every public name, and the public methods of the classes."""
    for name in parallel_rl.__all__:
        value = getattr(parallel_rl, name)
        yield name, value
        if inspect.isclass(value):
            for method, function in inspect.getmembers(value, callable):
                if not method.startswith("_") and getattr(function, "__module__", "").startswith("parallel_rl"):
                    yield f"{name}.{method}", function


@pytest.mark.parametrize(("name", "value"), list(public()), ids=lambda value: value if isinstance(value, str) else "")
def test_docstrings_say_what_raises(name: str, value: Callable) -> None:
    text = inspect.getdoc(value) or ""
    assert text.strip(), f"{name} has no docstring"
    if not inspect.isclass(value) and "raise ValueError" in inspect.getsource(value):
        assert "Raises:" in text, f"{name} raises and does not say so"


def test_every_loss_says_where_its_errors_are_told() -> None:
    for name, loss in parallel_rl.losses().items():
        if loss.__module__.startswith("parallel_rl."):
            assert "Raises:" in (loss.__doc__ or "") or "errors: see `LossFn`" in (loss.__doc__ or ""), name
