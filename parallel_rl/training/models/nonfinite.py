"""Nonfinite gradients and spikes: their origin, and whether the run skips the step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor

from parallel_rl.agreement import gather_results
from parallel_rl.losses.core.base import LossFn
from parallel_rl.training.batching.micro_batches import MicroBatch
from parallel_rl.training.config.sections import OptimizerConfig
from parallel_rl.training.models.engine import Engine
from parallel_rl.training.models.scoring import token_scores_of, values

_SHOWN = 3  # places in a message


@dataclass
class Skips:
    """Count of skipped optimizer steps: since the process began, and consecutive now."""

    total: int = 0
    in_a_row: int = 0

    def judge(self, norm: float, config: OptimizerConfig, where: str) -> None:
        """Count one more; ValueError if the config allows none, or the count is above `max_skips`."""
        text = f"the gradient norm is {norm:g}{where}"
        if config.on_nonfinite == "error":
            raise ValueError(
                f"{text}. The last good checkpoint is kept, see metrics.jsonl; optimizer.on_nonfinite = 'skip' leaves such a "
                "step out"
            )
        self.total, self.in_a_row = self.total + 1, self.in_a_row + 1
        if self.in_a_row > config.max_skips:
            raise ValueError(
                f"{text}. {self.in_a_row} steps in a row had such a norm, and optimizer.max_skips = {config.max_skips}. The "
                "last good checkpoint is kept, see metrics.jsonl"
            )


def where_nonfinite(engine: Engine, loss_fn: LossFn, batches: Sequence[MicroBatch]) -> str:
    """Describe the micro-batches and rows with nonfinite data or scores; a forward over all, on all ranks."""
    if loss_fn.requirements.reads == "scalar":
        name, scores = "values", values(engine, batches)
    else:
        name, scores = "log-probs", [scored[0] for scored in token_scores_of(engine, engine.model, batches, 1.0)]

    def find() -> list[str]:
        mine = []
        for index, (batch, score) in enumerate(zip(batches, scores, strict=True)):
            fields = {key: x for key, x in batch.data.items() if isinstance(x, Tensor) and x.is_floating_point()}
            for key, x in {name: score, **fields}.items():
                rows = _rows(x, batch)
                if rows:
                    what = f"{key} of row{'s' if len(rows) > 1 else ''} {', '.join(map(str, rows[:_SHOWN]))}"
                    mine.append(f"data rank {engine.groups.dp_rank}, micro-batch {index}: {what}")
        return mine

    all_lines = list(dict.fromkeys(line for lines in gather_results(find) for line in lines))
    if not all_lines:
        return ": every score and field is finite, the backward is not"
    more = f" and {len(all_lines) - _SHOWN} more" if len(all_lines) > _SHOWN else ""
    return f"; not finite: {'; '.join(all_lines[:_SHOWN])}{more} (on {dist.get_world_size()} ranks)"


def _rows(x: Tensor, batch: MicroBatch) -> list[int]:
    """List the rows, by place in the step, of a [B] or [B, S] tensor with nonfinite counted values."""
    if x.dim() not in (1, 2) or x.shape[0] != len(batch.indices):
        return []
    bad, mask = ~x.isfinite(), batch.data["token_mask"].bool()
    if x.dim() == 2:
        bad = (bad & mask if mask.shape == x.shape else bad).any(1)
    return [batch.indices[row] for row in bad.nonzero().flatten().tolist()]
