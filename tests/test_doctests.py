"""The examples in docstrings run, and what is public has one."""

from __future__ import annotations

import doctest
import inspect
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest

from parallel_rl.losses import registry

ROOT = Path(__file__).parents[1]
FILES = sorted((ROOT / "parallel_rl").rglob("*.py"))
NAMES = {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path for path in FILES}
WITH_EXAMPLES = [name for name, path in NAMES.items() if ">>> " in path.read_text(encoding="utf-8")]
PUBLIC = ("parallel_rl", *(f"parallel_rl.{room}" for room in ("losses", "advantages", "experience", "megatron")))
FUNCTIONAL = [name for name in NAMES if name.startswith("parallel_rl.functional.")]
LACKING = [  # is to become empty; a line goes when its example comes
    # parallel_rl
    # functional.ratio
    # megatron
    "megatron.broadcast_from_last_stage",
    "megatron.build_config",
    "megatron.build_model",
    "megatron.clip_grads_",
    "megatron.copy_trunk",
    "megatron.destroy",
    "megatron.enable_cpu",
    "megatron.forward_backward",
    "megatron.forward_logits",
    "megatron.forward_only",
    "megatron.fuse_head",
    "megatron.global_parameters",
    "megatron.grad_norm",
    "megatron.gradient",
    "megatron.has_transformer_engine",
    "megatron.initialize",
    "megatron.initialize_weights",
    "megatron.is_last_stage",
    "megatron.layer_spec",
    "megatron.local_shard",
    "megatron.megatron_loss_func",
    "megatron.packed_batch",
    "megatron.packed_bounds",
    "megatron.packed_input",
    "megatron.padded_batch",
    "megatron.padded_input",
    "megatron.padded_vocab_size",
    "megatron.replicas",
    "megatron.sum_gradients",
    "megatron.unwrap",
    "megatron.wrap_model",
]


@pytest.mark.parametrize("name", WITH_EXAMPLES)
def test_the_examples_of_a_module_run(name: str) -> None:
    before = dict(registry._LOSSES)
    try:
        found = doctest.testmod(import_module(name), optionflags=doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS)
    finally:
        registry._LOSSES.clear()
        registry._LOSSES.update(before)
    assert found.failed == 0, "see the captured output"


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
    assert without <= set(LACKING), "write a short example that runs (>>>)"
