"""One step on given records: examples, labelled solutions, preferences, or a teacher's distributions."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from parallel_rl.experience import Samples, padded_samples
from parallel_rl.training.batching.micro_batches import local_share, target_rows, with_user_fields
from parallel_rl.training.config.algorithms import DistillationConfig, SupervisedConfig
from parallel_rl.training.config.data import LABELS, STEP_LABELS
from parallel_rl.training.config.preference import PreferenceConfig
from parallel_rl.training.data.checking import begin_of
from parallel_rl.training.data.examples import Answer, Example, Pair
from parallel_rl.training.data.parsers import Solution
from parallel_rl.training.data.records.source import permutation
from parallel_rl.training.models.learner import combine_updates
from parallel_rl.training.models.scoring import with_teacher_logits, with_teacher_topk
from parallel_rl.training.models.train_step import StepMetrics
from parallel_rl.training.rollouts.sampler import sample
from parallel_rl.training.session import Session, TrainProgress


def supervised_step(session: Session, config: SupervisedConfig, at: TrainProgress) -> StepMetrics:
    """Train on the next `batch_size` examples or solutions."""
    policy, first = session.policy, at.next(config.source)
    if config.source == "solutions":
        rows = _solution_rows(session, config, first)
    else:
        rows = example_rows(session, first, config.batch_size)
    rows, _ = policy.balance(rows)
    return combine_updates([policy.update(policy.batches(rows), at.step)])


def example_rows(session: Session, first: int, count: int) -> Samples:
    """Read this data rank's part of the next `count` demonstrations."""
    mine = local_share(range(first, first + count), session.engine.groups)
    examples = session.data.read(session.data.examples, mine)
    return rows_of(session, "examples", examples)


def rows_of(session: Session, source: str, records: Sequence[Example | Solution]) -> Samples:
    """Make the row of each example or solution, with the user's own fields of the source."""
    prompts, engine = [record.prompt for record in records], session.engine
    rows, user_values = (
        target_rows(prompts, [record.target for record in records]),
        [record.user_values for record in records],
    )
    fields = engine.config.user_fields(source)
    return with_user_fields(rows, user_values, fields, [len(prompt) for prompt in prompts], engine.float_dtype)


def _solution_rows(session: Session, config: SupervisedConfig, first: int) -> Samples:
    """Read this data rank's part of the next solutions, with each step's label at its last token."""
    mine = local_share(range(first, first + config.batch_size), session.engine.groups)
    solutions = session.data.read(session.data.solutions, mine)
    rows = rows_of(session, "solutions", solutions)
    # a truncated solution has lost its last steps
    kept = rows.token_mask.sum(1).tolist()
    labels = [label for solution, steps in zip(solutions, kept, strict=True) for label in solution.labels[:steps]]
    values, options = torch.tensor(labels, dtype=session.engine.float_dtype), config.loss.options
    if not options.get("soft_labels"):
        good, bad = torch.tensor(options["reward_token_ids"])
        values = torch.where(values == 1, good, bad)
    at_steps = torch.full(rows.input_ids.shape, -100, dtype=values.dtype)
    at_steps[rows.token_mask] = values
    return rows.with_fields(**{STEP_LABELS: at_steps})


def distillation_step(session: Session, config: DistillationConfig, at: TrainProgress) -> StepMetrics:
    """Train on the next examples, or on completions of the student, towards the teacher's distributions."""
    assert session.teacher is not None
    policy = session.policy
    if config.rows == "examples":
        rows = example_rows(session, at.next("examples"), config.batch_size)
    else:
        rows = _completions(session, config, at)
    rows, _ = policy.balance(rows)
    batches = policy.batches(rows)
    if config.top_k is None:
        batches = with_teacher_logits(policy.engine, session.teacher, batches)
    else:
        option = config.loss.options.get("teacher_temperature")
        temperature = float(option) if isinstance(option, (int, float)) else 1.0
        batches = with_teacher_topk(policy.engine, session.teacher, batches, config.top_k, temperature)
    return combine_updates([policy.update(batches, at.step)])


def _completions(session: Session, config: DistillationConfig, at: TrainProgress) -> Samples:
    engine, data, served = session.engine, session.data, session.served
    ids = local_share(range(at.next("train"), at.next("train") + config.batch_size), engine.groups)
    chosen = [prompt.tokens for prompt in data.read(data.train, ids)]
    if served is None:
        drawn = sample(engine, chosen, ids, 2 * engine.config.run.seed, engine.config.sampling)
    else:
        assert config.server is not None
        if at.step % config.server.update_every == 0 or not served.updated:
            served.bring(engine.config.policy_version(at.step))
        drawn, *_, fault = served.take(chosen, ids)
        session.failures.report_unread(fault)
    return padded_samples(chosen, drawn.responses())


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
    sides = zip((pair.chosen, pair.rejected), pair.user_values, strict=True)
    return [Example(pair.prompt, target, values) for target, values in sides]


def _labelled(pairs: Sequence[tuple[Pair, Pair]], session: Session) -> Samples:
    """Make rows (chosen, +1), (rejected, −1) and the mismatched (prompt, next chosen; 0) of each pair."""
    limit = session.data.limit
    rows = [
        row
        for pair, following in pairs
        for row in (
            *_sides(pair),
            Example(pair.prompt, begin_of(following.chosen, limit - len(pair.prompt)), following.user_values[0]),
        )
    ]
    labels = torch.tensor([1.0, -1.0, 0.0], dtype=session.engine.float_dtype).repeat(len(pairs))
    return rows_of(session, "pairs", rows).with_fields(**{LABELS: labels})


def _answer_rows(answers: Sequence[tuple[Answer, Answer | None]], session: Session) -> Samples:
    """Make the row (answer, ±1) of each record, and the mismatched (prompt, other answer; 0)."""
    limit = session.data.limit
    rows, labels = list[Example](), list[float]()
    for answer, other in answers:
        rows.append(Example(answer.prompt, answer.target, answer.user_values))
        labels.append(1.0 if answer.desirable else -1.0)
        if other is not None:
            rows.append(Example(answer.prompt, begin_of(other.target, limit - len(answer.prompt)), other.user_values))
            labels.append(0.0)
    return rows_of(session, "answers", rows).with_fields(
        **{LABELS: torch.tensor(labels, dtype=session.engine.float_dtype)}
    )
