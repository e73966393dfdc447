"""A user's own scheduled loss is stepped and checkpointed by the trainer, which knows no loss by its name."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor

from parallel_rl import LossFn, Metrics, TokenBatch, register_loss
from parallel_rl.losses import NoConfig
from parallel_rl.metrics import Metric
from parallel_rl.testing.pool import run_world
from tests.training.helpers import DATA, cut, run, train_rows


@register_loss("doc_warming")
class Warming(LossFn[NoConfig]):
    """NLL whose weight grows by one with each optimizer step."""

    config_class = NoConfig
    steps = 0

    def after_step(self, metrics: Mapping[str, float]) -> None:
        assert metrics["weight"] == self.steps + 1
        self.steps += 1

    def state_dict(self) -> dict[str, float]:
        return {"steps": self.steps}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        self.steps = int(state["steps"])

    def compute(self, batch: TokenBatch) -> tuple[Tensor, Metrics]:
        weight = self.steps + 1
        loss = batch.weighted_sum(-weight * batch.logprobs, (1 / batch.counts.toks).expand(len(batch.sequence_mask)))
        return loss, Metrics({"loss": Metric("share", loss), "weight": Metric("max", torch.full_like(loss, weight))})


LOSS = "{name: doc_warming}"
RUNS = {
    "rl": (
        "grpo_arithmetic.yaml",
        {"warmup": "null", "data": f"{{rollouts: {DATA / 'arithmetic_rollouts.jsonl'}}}", "reward": "exact_match",
         "rl__steps": 3, "rl__prompts": 4, "rl__group_size": 4, "rl__updates": 2, "rl__loss": LOSS},
        [1.5, 3.5, 5.5],  # the mean over two updates
    ),
    "sft": ("sft_arithmetic.yaml", {"sft__steps": 3, "sft__batch_size": 8, "sft__loss": LOSS}, [1.0, 2.0, 3.0]),
}  # fmt: skip


def train_here(rank: int, arguments: list[str]) -> list[dict[str, float | int | str]]:
    """As a function of this module it has the rank import it, and the loss with it."""
    return train_rows(rank, arguments)


@pytest.mark.parametrize("objective", RUNS)
def test_a_scheduled_loss_moves_and_its_state_goes_on(objective: str, tmp_path: Path) -> None:
    config, options, weights = RUNS[objective]
    small = {"model__hidden": 16, "evaluation": "null", "data__held_out": "null", "parallel": "{}"}
    small |= {"run__checkpoint_every": 1, "run__keep_checkpoints": 5}
    [rows] = run_world(1, train_here, run(config, run__dir=tmp_path / "whole", **small, **options))
    assert [row["weight"] for row in rows] == weights
    cut(tmp_path / "whole", tmp_path / "stopped", 2)
    [later] = run_world(1, train_here, run(config, run__dir=tmp_path / "stopped", **small, **options))
    assert later == rows[2:]
