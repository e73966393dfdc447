"""One step on preference pairs."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from parallel_rl.experience import Samples
from parallel_rl.training.batching.micro_batches import local_share, target_rows
from parallel_rl.training.config.algorithms import PreferenceConfig, rows_of_pair
from parallel_rl.training.config.fields import LABELS
from parallel_rl.training.data.examples import Pair
from parallel_rl.training.models.learner import combine_updates
from parallel_rl.training.models.train_step import StepMetrics
from parallel_rl.training.progress import TrainProgress
from parallel_rl.training.session import Session


def preference_step(session: Session, config: PreferenceConfig, at: TrainProgress) -> StepMetrics:
    """The next `pairs` pairs: rows (chosen, rejected), ..., or labelled ones for a loss that reads labels."""
    policy, together = session.policy, rows_of_pair(config)
    make = _paired if together == 2 else _labelled
    rows, _ = policy.balance(make(_pairs(session, at.next("pairs"), config.pairs), session), together=together)
    if session.reference is not None:
        # in the same micro-batches as the policy: as long as both are the same model, their log-probs are the same bits
        logprobs = policy.log_probs(rows, session.reference, together=together)
        rows = rows.with_fields(reference_policy_logprobs=logprobs)
    return combine_updates([policy.update(policy.batches(rows, together), at.step)])


def _pairs(session: Session, first: int, count: int) -> list[tuple[Pair, Pair]]:
    """This data rank's pairs, each with the one that follows it in the step (the first follows the last)."""
    data = session.data
    mine = local_share(range(count), session.engine.groups)
    pairs = data.read(data.pairs, [first + place for place in mine])
    following = data.read(data.pairs, [first + (place + 1) % count for place in mine])
    return list(zip(pairs, following, strict=True))


def _paired(pairs: Sequence[tuple[Pair, Pair]], session: Session) -> Samples:
    prompts = [pair.prompt for pair, _ in pairs for _ in range(2)]
    return target_rows(prompts, [side for pair, _ in pairs for side in (pair.chosen, pair.rejected)])


def _labelled(pairs: Sequence[tuple[Pair, Pair]], session: Session) -> Samples:
    """(chosen, +1), (rejected, −1) and the mismatched row (prompt, chosen of the next pair; 0) of each pair."""
    prompts = [pair.prompt for pair, _ in pairs for _ in range(3)]
    targets = [side for pair, following in pairs for side in (pair.chosen, pair.rejected, following.chosen)]
    labels = torch.tensor([1.0, -1.0, 0.0], dtype=session.engine.float_dtype).repeat(len(pairs))
    return target_rows(prompts, targets).with_fields(**{LABELS: labels})
