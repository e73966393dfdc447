"""One step of each objective but RL, from its sequences to the optimizer; and the evaluation."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from parallel_rl.training.batching.micro_batches import Rows, make_rows
from parallel_rl.training.checkpointing.manifest import Position
from parallel_rl.training.config.algorithms import LABELS, DistillationConfig, PreferenceConfig, SupervisedConfig
from parallel_rl.training.data.examples import Pair, Prompt
from parallel_rl.training.data.records.agree import read_together
from parallel_rl.training.data.records.source import Records
from parallel_rl.training.models.scoring import with_teacher_logits
from parallel_rl.training.rollouts.sampler import ROWS_AT_A_TIME, sample
from parallel_rl.training.session import Numbers, Session, numbers_of


def supervised_step(session: Session, config: SupervisedConfig, at: Position) -> Numbers:
    """The next `batch_size` examples."""
    rows, _ = session.balance(_examples(session, at.next("examples"), config.batch_size))
    loss_fn = session.loss(config.loss)
    return numbers_of([session.update(session.batches(rows), loss_fn, config.optimizer, at.step, config.steps)])


def preference_step(session: Session, config: PreferenceConfig, at: Position) -> Numbers:
    """The next `pairs` pairs: rows (chosen, rejected), ..., or labelled ones for a loss that reads labels."""
    together = rows_of_pair(config)
    make = _paired if together == 2 else _labelled
    rows, _ = session.balance(make(_pairs(session, at.next("pairs"), config.pairs), session), together=together)
    if session.reference is not None:
        # in the same micro-batches as the policy: as long as both are the same model, their log-probs are the same bits
        logprobs = session.log_probs(session.reference, rows, together=together)
        rows = rows.with_fields(reference_policy_logprobs=logprobs)
    loss_fn = session.loss(config.loss)
    batches = session.batches(rows, together)
    return numbers_of([session.update(batches, loss_fn, config.optimizer, at.step, config.steps)])


def rows_of_pair(config: PreferenceConfig) -> int:
    """Rows that a pair gives: (chosen, rejected), or labelled ones and a mismatched one."""
    return 3 if LABELS in config.loss.reads else 2


def distillation_step(session: Session, config: DistillationConfig, at: Position) -> Numbers:
    """The next `batch_size` examples, or completions of the student's, with the teacher's distributions."""
    assert session.teacher is not None
    make, source = (_examples, "examples") if config.rows == "examples" else (_completions, "train")
    rows, _ = session.balance(make(session, at.next(source), config.batch_size))
    batches = with_teacher_logits(session.engine, session.teacher, session.batches(rows))
    loss_fn = session.loss(config.loss)
    return numbers_of([session.update(batches, loss_fn, config.optimizer, at.step, config.steps)])


def held_out_reward(session: Session, samples: int) -> float:
    """Mean reward of `samples` completions of each held-out prompt; the draws are the same ones every time."""
    engine, prompts = session.engine, session.data.held_out
    count, groups = len(prompts) * samples, session.engine.groups
    mine = range(groups.dp_rank * count // groups.dp_size, (groups.dp_rank + 1) * count // groups.dp_size)
    size, most, rewards = ROWS_AT_A_TIME * groups.cp_size, -(-count // groups.dp_size), []
    for first in range(0, most, size):  # as often on every rank
        ids = mine[first : first + size]
        chosen = read_together(partial(_each, prompts, [index // samples for index in ids]), engine.device)
        completions: list[list[int]] = []
        if chosen:
            seed = 2 * engine.config.run.seed + 1  # even seeds are training's
            drawn = sample(engine, [prompt.tokens for prompt in chosen], ids, seed, engine.config.sampling)
            completions = drawn.completions()
        rewards.append(session.rewards(chosen, completions))
    return session.mean(torch.cat(rewards))


def _each(prompts: Records[Prompt], places: Sequence[int]) -> list[Prompt]:
    return [prompts[place] for place in places]


def _pairs(session: Session, first: int, count: int) -> list[tuple[Pair, Pair]]:
    """This data rank's pairs, each with the one that follows it in the step (the first follows the last)."""
    mine = session.local(range(count))
    pairs = session.read(session.data.pairs, [first + place for place in mine])
    following = session.read(session.data.pairs, [first + (place + 1) % count for place in mine])
    return list(zip(pairs, following, strict=True))


def _paired(pairs: Sequence[tuple[Pair, Pair]], session: Session) -> Rows:
    sides = [(pair.prompt, side) for pair, _ in pairs for side in (pair.chosen, pair.rejected)]
    return make_rows(sides, session.engine.numbers)


def _labelled(pairs: Sequence[tuple[Pair, Pair]], session: Session) -> Rows:
    """(chosen, +1), (rejected, −1) and the mismatched row (prompt, chosen of the next pair; 0) of each pair."""
    rows, labels = [], []
    for pair, following in pairs:
        rows += [(pair.prompt, pair.chosen), (pair.prompt, pair.rejected), (pair.prompt, following.chosen)]
        labels += [1.0, -1.0, 0.0]
    numbers = session.engine.numbers
    return make_rows(rows, numbers).with_fields(**{LABELS: torch.tensor(labels, dtype=numbers)})


def _examples(session: Session, first: int, count: int) -> Rows:
    examples = session.read(session.data.examples, session.local(range(first, first + count)))
    return make_rows([(example.prompt, example.completion) for example in examples], session.engine.numbers)


def _completions(session: Session, first: int, count: int) -> Rows:
    engine, ids = session.engine, session.local(range(first, first + count))
    chosen = [prompt.tokens for prompt in session.read(session.data.train, ids)]
    drawn = sample(engine, chosen, ids, 2 * engine.config.run.seed, engine.config.sampling)
    return make_rows(list(zip(chosen, drawn.completions(), strict=True)), engine.numbers)
