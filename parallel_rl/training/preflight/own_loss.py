"""The loss that a run's main phase trains on, as the trainer builds it, for a check on a small batch."""

from __future__ import annotations

from dataclasses import replace

from parallel_rl.losses.prm import PRMLossFn
from parallel_rl.testing.batches import PLACEHOLDER, REWARD_IDS
from parallel_rl.testing.subjects import Given
from parallel_rl.training.algorithms.phases import phases
from parallel_rl.training.config.train import TrainConfig
from parallel_rl.vocab.truncation import KEEP_ALL


def own_loss(config: TrainConfig) -> Given:
    """The run's loss with its options, temperature and truncation; only token ids are those of the small vocabulary."""
    phase = phases(config)[-1]
    sampling = config.sampling if config.rl is not None else None
    loss = phase.loss.build(
        temperature=1.0 if sampling is None else sampling.temperature,
        truncation=KEEP_ALL if sampling is None else sampling.truncation,
    )
    if isinstance(loss, PRMLossFn):
        loss.config = replace(loss.config, placeholder_token_id=PLACEHOLDER, reward_token_ids=tuple(REWARD_IDS))
    return Given(loss)
