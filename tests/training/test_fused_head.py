"""The trainer's option `model.fused_head`: which configs it goes with."""

from __future__ import annotations

import pytest

from parallel_rl.training.load import load_config
from tests.training.helpers import CONFIGS


def test_losses_on_log_probs_take_it() -> None:
    for name in ("grpo_arithmetic.yaml", "dpo_arithmetic.yaml"):
        assert load_config(str(CONFIGS / name), ["--model.fused_head=true"]).model.fused_head


def test_a_loss_that_reads_the_output_itself_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"model.fused_head = True does not go with preference.loss.name = 'preference'"
    ):
        load_config(
            str(CONFIGS / "dpo_arithmetic.yaml"),
            ["--model.fused_head=true", "--preference.loss.name=preference", "--preference.loss.options={}"],
        )
