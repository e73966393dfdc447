"""What `import parallel_rl` and the command bring, what they leave alone, and what is public."""

from __future__ import annotations

import ast
import inspect
import linecache
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import parallel_rl

HEAVY = ("torch", "numpy", "megatron", "transformer_engine", "triton", "tensorboard", "matplotlib", "rich")


def brought(code: str) -> set[str]:
    """The modules that a fresh process holds after `code`, without those that it names `before`."""
    run = [sys.executable, "-c", f"import sys\nbefore = set()\n{code}\nprint(*set(sys.modules) - before)"]
    out = subprocess.run(run, capture_output=True, text=True, check=True, timeout=300, cwd=Path(__file__).parents[1])
    return set(out.stdout.splitlines()[-1].split())


@pytest.mark.parametrize(
    "code",
    [
        "import parallel_rl\nassert 'get_loss' in dir(parallel_rl) and parallel_rl.__version__",
        "from parallel_rl.cli import main\nassert main(['recipes']) == 0",
        "from parallel_rl.cli import main\ntry:\n    main(['--help'])\nexcept SystemExit:\n    pass",
    ],
    ids=["import", "recipes", "help"],
)
def test_names_and_help_come_without_torch(code: str) -> None:
    assert {name.partition(".")[0] for name in brought(code)}.isdisjoint(HEAVY)


@pytest.mark.slow
def test_losses_come_without_what_only_some_need() -> None:
    """And subpackages are attributes once the package is imported."""
    found = brought(
        "import torch\nbefore = set(sys.modules)\nfrom parallel_rl import ClippedPGLossFn\nimport parallel_rl\n"
        "assert parallel_rl.losses.NLLLossConfig().aggregation and parallel_rl.vocab.shards"
    )
    assert {"parallel_rl.losses.clipped_pg", "parallel_rl.losses.nll"} <= found
    assert not hasattr(parallel_rl, "__main__") and not hasattr(parallel_rl, "lossses")
    tops = {name.partition(".")[0] for name in found}
    assert tops.isdisjoint({*HEAVY, "yaml"} - {"torch", "numpy"})
    assert not any(name.startswith(("parallel_rl.megatron", "parallel_rl.training")) for name in found)


def test_the_public_names_exist_for_readers_type_checkers_and_at_run_time() -> None:
    public_names = parallel_rl.__all__
    assert len(set(public_names)) == len(public_names) and set(dir(parallel_rl)) == {*public_names, "__version__"}
    source = ast.parse(inspect.getsource(parallel_rl))
    typed = {alias.name for node in ast.walk(source) if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert typed - {"annotations", "import_module", "TYPE_CHECKING"} == set(public_names)
    for name in public_names:
        assert getattr(parallel_rl, name).__name__ == name
    with pytest.raises(AttributeError, match="has no attribute 'PolicyLoss'"):
        parallel_rl.PolicyLoss  # type: ignore[attr-defined]  # noqa: B018


def public() -> Iterator[tuple[str, Callable]]:
    """Every public name, and the public methods of the classes."""
    for name in parallel_rl.__all__:
        value = getattr(parallel_rl, name)
        yield name, value
        if inspect.isclass(value):
            for method, function in inspect.getmembers(value, callable):
                if not method.startswith("_") and getattr(function, "__module__", "").startswith("parallel_rl"):
                    yield f"{name}.{method}", function


def source(function: Callable) -> str:
    """By its lines; `inspect.getsource` looks through every module of the process, which takes longer than all else here."""
    code = inspect.unwrap(function).__code__
    return "".join(inspect.getblock(linecache.getlines(code.co_filename)[code.co_firstlineno - 1 :]))


def test_docstrings_say_what_raises() -> None:
    texts = {name: (value, inspect.getdoc(value) or "") for name, value in public()}
    assert [name for name, (_, text) in texts.items() if not text.strip()] == [], "without a docstring"
    silent = [
        name
        for name, (value, text) in texts.items()
        if not inspect.isclass(value)
        and "Raises:" not in text
        and "ValueError" not in text
        and "raise ValueError" in source(value)
    ]
    assert silent == [], "they raise and do not say so"


def test_every_loss_says_where_its_errors_are_told() -> None:
    from parallel_rl.losses.registry import losses

    for name, loss in losses().items():
        if loss.__module__.startswith("parallel_rl."):
            assert "Raises:" in (loss.__doc__ or "") or "errors: see `LossFn`" in (loss.__doc__ or ""), name
