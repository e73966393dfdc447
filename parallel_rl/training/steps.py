"""One step of each objective but RL, from its sequences to the optimizer; and the evaluation."""

from __future__ import annotations

import torch

from parallel_rl.training.batching import Rows, make_rows
from parallel_rl.training.data import Pair
from parallel_rl.training.datasets import take
from parallel_rl.training.objectives import LABELS, DistillationConfig, PreferenceConfig, SupervisedConfig
from parallel_rl.training.rollout import sample
from parallel_rl.training.scoring import with_teacher_logits
from parallel_rl.training.session import Numbers, Session, numbers_of


def supervised_step(session: Session, config: SupervisedConfig, step: int) -> Numbers:
    """The next `batch_size` examples."""
    rows = _examples(session, step, config.batch_size)
    loss_fn = session.loss(config.loss)
    return numbers_of([session.update(session.batches(rows), loss_fn, config.optimizer, step, config.steps)])


def preference_step(session: Session, config: PreferenceConfig, step: int) -> Numbers:
    """The next `pairs` pairs: rows (chosen, rejected), ..., or labelled ones for a loss that reads labels."""
    rows = (_labelled if LABELS in config.loss.reads else _paired)(session, config, step)
    if session.reference is not None:
        rows = rows.with_fields(reference_policy_logprobs=session.log_probs(session.reference, rows))
    loss_fn = session.loss(config.loss)
    return numbers_of([session.update(session.batches(rows), loss_fn, config.optimizer, step, config.steps)])


def distillation_step(session: Session, config: DistillationConfig, step: int) -> Numbers:
    """The next `batch_size` examples, or completions of the student's, with the teacher's distributions."""
    assert session.teacher is not None
    rows = (_examples if config.rows == "examples" else _completions)(session, step, config.batch_size)
    batches = with_teacher_logits(session.engine, session.teacher, session.batches(rows))
    loss_fn = session.loss(config.loss)
    return numbers_of([session.update(batches, loss_fn, config.optimizer, step, config.steps)])


def held_out_reward(session: Session, samples: int) -> float:
    """Mean reward of `samples` completions of each held-out prompt; the draws are the same ones every time."""
    engine, prompts = session.engine, session.data.held_out
    count, groups = len(prompts) * samples, session.engine.groups
    mine = range(groups.dp_rank * count // groups.dp_size, (groups.dp_rank + 1) * count // groups.dp_size)
    chosen = [prompts[index // samples] for index in mine]
    completions: list[list[int]] = []
    if chosen:
        seed = 2 * engine.config.run.seed + 1  # even seeds are training's
        drawn = sample(engine, [prompt.tokens for prompt in chosen], list(mine), seed, engine.config.sampling)
        completions = drawn.completions()
    return session.mean(session.rewards(chosen, completions))


def _pairs(session: Session, config: PreferenceConfig, step: int) -> list[tuple[Pair, Pair]]:
    """This data rank's pairs, each with the one that follows it in the step (the first follows the last)."""
    pairs = session.data.pairs
    order = take(len(pairs), step * config.pairs, config.pairs, session.engine.config.run.seed)
    return [
        (pairs[order[place]], pairs[order[(place + 1) % len(order)]]) for place in session.local(range(config.pairs))
    ]


def _paired(session: Session, config: PreferenceConfig, step: int) -> Rows:
    chosen = [pair for pair, _ in _pairs(session, config, step)]
    sides = [(pair.prompt, side) for pair in chosen for side in (pair.chosen, pair.rejected)]
    return make_rows(sides, session.engine.numbers)


def _labelled(session: Session, config: PreferenceConfig, step: int) -> Rows:
    """(chosen, +1), (rejected, −1) and the mismatched row (prompt, chosen of the next pair; 0) of each pair."""
    rows, labels = [], []
    for pair, following in _pairs(session, config, step):
        rows += [(pair.prompt, pair.chosen), (pair.prompt, pair.rejected), (pair.prompt, following.chosen)]
        labels += [1.0, -1.0, 0.0]
    numbers = session.engine.numbers
    return make_rows(rows, numbers).with_fields(**{LABELS: torch.tensor(labels, dtype=numbers)})


def _examples(session: Session, step: int, count: int) -> Rows:
    engine, examples = session.engine, session.data.examples
    chosen = session.local(take(len(examples), step * count, count, engine.config.run.seed))
    return make_rows([(examples[index].prompt, examples[index].completion) for index in chosen], engine.numbers)


def _completions(session: Session, step: int, count: int) -> Rows:
    engine, prompts = session.engine, session.data.train
    order = take(len(prompts), step * count, count, engine.config.run.seed)
    places = session.local(range(count))
    chosen = [prompts[order[place]].tokens for place in places]
    ids = [step * count + place for place in places]
    drawn = sample(engine, chosen, ids, 2 * engine.config.run.seed, engine.config.sampling)
    return make_rows(list(zip(chosen, drawn.completions(), strict=True)), engine.numbers)
