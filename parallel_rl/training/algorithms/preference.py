"""One step on preferences: pairs, or single answers that are labelled good or bad."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from parallel_rl.experience import Samples
from parallel_rl.training.algorithms.supervised import rows_of
from parallel_rl.training.batching.micro_batches import local_share
from parallel_rl.training.config.fields import LABELS
from parallel_rl.training.config.preference import PreferenceConfig
from parallel_rl.training.data.examples import Answer, Example, Pair
from parallel_rl.training.data.fit import begin_of
from parallel_rl.training.data.records.source import permutation
from parallel_rl.training.models.learner import combine_updates
from parallel_rl.training.models.train_step import StepMetrics
from parallel_rl.training.progress import TrainProgress
from parallel_rl.training.session import Session

_SHIFT = 0x4B4C  # keys the order of mismatched answers


def preference_step(session: Session, config: PreferenceConfig, at: TrainProgress) -> StepMetrics:
    """Train on the next `pairs` pairs or `answers` answers, as the rows that the loss reads."""
    policy, first = session.policy, at.next(config.source)
    if config.source == "answers":
        rows = _answer_rows(_answers(session, config, first), session)
    else:
        rows = (_paired if config.rows == 2 else _labelled)(_pairs(session, first, config.records), session)
    rows, _ = policy.balance(rows, together=config.rows)
    if session.reference is not None:
        # the policy's micro-batches: equal models then give bit-equal log-probs
        logprobs = policy.log_probs(rows, session.reference, together=config.rows)
        rows = rows.with_fields(reference_policy_logprobs=logprobs)
    return combine_updates([policy.update(policy.batches(rows, config.rows), at.step)])


def _pairs(session: Session, first: int, count: int) -> list[tuple[Pair, Pair]]:
    """List this data rank's pairs, each with its successor in the step (the last with the first)."""
    data = session.data
    mine = local_share(range(count), session.engine.groups)
    pairs = data.read(data.pairs, [first + place for place in mine])
    following = data.read(data.pairs, [first + (place + 1) % count for place in mine])
    return list(zip(pairs, following, strict=True))


def _answers(session: Session, config: PreferenceConfig, first: int) -> list[tuple[Answer, Answer | None]]:
    """List this data rank's answers, each with the one that its mismatched row takes, a seeded shift away."""
    data, count = session.data, config.records
    mine = local_share(range(count), session.engine.groups)
    answers = data.read(data.answers, [first + place for place in mine])
    if not config.mismatched:
        return [(answer, None) for answer in answers]
    shift = 1 + int(permutation(count - 1, data.seed, first, _SHIFT)[0])
    others = data.read(data.answers, [first + (place + shift) % count for place in mine])
    return list(zip(answers, others, strict=True))


def _paired(pairs: Sequence[tuple[Pair, Pair]], session: Session) -> Samples:
    return rows_of(session, "pairs", [row for pair, _ in pairs for row in _sides(pair)])


def _sides(pair: Pair) -> list[Example]:
    sides = zip((pair.chosen, pair.rejected), pair.own, strict=True)
    return [Example(pair.prompt, target, values) for target, values in sides]


def _labelled(pairs: Sequence[tuple[Pair, Pair]], session: Session) -> Samples:
    """Make rows (chosen, +1), (rejected, −1) and the mismatched (prompt, next chosen; 0) of each pair."""
    limit = session.data.limit
    rows = [
        row
        for pair, following in pairs
        for row in (
            *_sides(pair),
            Example(pair.prompt, begin_of(following.chosen, limit - len(pair.prompt)), following.own[0]),
        )
    ]
    labels = torch.tensor([1.0, -1.0, 0.0], dtype=session.engine.float_dtype).repeat(len(pairs))
    return rows_of(session, "pairs", rows).with_fields(**{LABELS: labels})


def _answer_rows(answers: Sequence[tuple[Answer, Answer | None]], session: Session) -> Samples:
    """Make the row (answer, ±1) of each record, and the mismatched (prompt, other answer; 0)."""
    limit = session.data.limit
    rows, labels = list[Example](), list[float]()
    for answer, other in answers:
        rows.append(Example(answer.prompt, answer.target, answer.own))
        labels.append(1.0 if answer.desirable else -1.0)
        if other is not None:
            rows.append(Example(answer.prompt, begin_of(other.target, limit - len(answer.prompt)), other.own))
            labels.append(0.0)
    return rows_of(session, "answers", rows).with_fields(
        **{LABELS: torch.tensor(labels, dtype=session.engine.float_dtype)}
    )
