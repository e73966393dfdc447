"""The learning rate of each optimizer step of a phase."""

from __future__ import annotations

import math

from parallel_rl.training.config.sections import OptimizerConfig


def learning_rate(config: OptimizerConfig, done: int, total: int) -> float:
    """Return the rate after `done` of `total` steps: a linear rise, then constant or half a cosine down."""
    if done < config.warmup_steps:
        return config.lr * (done + 1) / config.warmup_steps
    if config.schedule == "constant":
        return config.lr
    fraction = (done - config.warmup_steps) / max(1, total - config.warmup_steps)
    return config.lr * (config.final_fraction + (1 - config.final_fraction) * 0.5 * (1 + math.cos(math.pi * fraction)))
