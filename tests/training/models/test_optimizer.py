"""Which Adam a run gets."""

from __future__ import annotations

from pathlib import Path

import pytest

from parallel_rl.testing.pool import run_world
from parallel_rl.training.config.load import load_config
from tests.training.checkpointing.saves import Small, arguments
from tests.training.fused_adam import fused_adam_installed

pytest.importorskip("megatron.core")


def _made(rank: int, given: list[str]) -> tuple[str, bool, str]:
    """The class of the optimizer, after its first step; whether Megatron's own choice is as before; what preflight says."""
    from megatron.core import optimizer

    from parallel_rl.training.preflight.facts import choices

    with fused_adam_installed():
        made = Small(given).contents.optimizer
        assert made is not None
        said = {choice.part: choice.text for choice in choices(load_config(given[0], given[1:]))}["optimizer"]
        return type(made.optimizer).__name__, not optimizer.USING_PYTORCH_OPTIMIZER, said


@pytest.mark.parametrize(
    ("dtype", "kind", "says"),
    [
        ("float64", "AdamW", "Megatron's, with Adam of torch: transformer_engine's takes no float64"),
        ("float32", "FusedAdam", "Megatron's, with Adam of transformer_engine"),
        ("bfloat16", "FusedAdam", "Megatron's, with Adam of transformer_engine"),
    ],
)
def test_float64_steps_where_a_fused_adam_is_installed(dtype: str, kind: str, says: str, tmp_path: Path) -> None:
    """On a card such a run ended in its first step; elsewhere the installed package is torch, and nothing shows."""
    [found] = run_world(1, _made, arguments(tmp_path, run__dtype=dtype))
    assert found == (kind, True, says)
