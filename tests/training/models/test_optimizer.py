"""Which Adam a run gets."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from parallel_rl.testing.pool import run_world
from parallel_rl.training.config.load import load_config
from tests.training.checkpointing.saves import Small, arguments

pytest.importorskip("megatron.core")


class Fused(torch.optim.AdamW):
    """Takes what Transformer Engine's takes, and raises for what that raises for."""

    def __init__(self, params: Any, adam_w_mode: bool, **options: Any) -> None:
        assert adam_w_mode
        super().__init__(params, **options)

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            if any(parameter.dtype == torch.float64 for parameter in group["params"]):
                raise RuntimeError("FusedAdam only support fp16, bf16 and fp32.")
        super().step(closure)


Fused.__module__ = "transformer_engine.pytorch.optimizers.fused_adam"


def _made(rank: int, given: list[str]) -> tuple[str, bool, str]:
    """The class of the optimizer, after its first step; whether Megatron's own choice is as before; what preflight says."""
    from megatron.core import optimizer

    from parallel_rl.training.preflight.choices import choices

    with mock.patch.multiple(optimizer, Adam=Fused, USING_PYTORCH_OPTIMIZER=False):
        made = Small(given).contents.optimizer
        assert made is not None
        said = {choice.part: choice.text for choice in choices(load_config(given[0], given[1:]))}["optimizer"]
        return type(made.optimizer).__name__, not optimizer.USING_PYTORCH_OPTIMIZER, said


@pytest.mark.parametrize(
    ("dtype", "kind", "says"),
    [
        ("float64", "AdamW", "Megatron's, with Adam of torch: transformer_engine's takes no float64"),
        ("float32", "Fused", "Megatron's, with Adam of transformer_engine"),
        ("bfloat16", "Fused", "Megatron's, with Adam of transformer_engine"),
    ],
)
def test_float64_steps_where_a_fused_adam_is_installed(dtype: str, kind: str, says: str, tmp_path: Path) -> None:
    """On a card such a run ended in its first step; elsewhere the installed package is torch, and nothing shows."""
    [found] = run_world(1, _made, arguments(tmp_path, run__dtype=dtype))
    assert found == (kind, True, says)
