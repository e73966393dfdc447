"""A step towards a teacher's distributions."""

from __future__ import annotations

from parallel_rl.experience import Samples, padded_samples
from parallel_rl.training.algorithms.supervised import example_rows
from parallel_rl.training.batching.micro_batches import local_share
from parallel_rl.training.config.algorithms import DistillationConfig
from parallel_rl.training.models.learner import combine_updates
from parallel_rl.training.models.scoring import with_teacher_logits, with_teacher_topk
from parallel_rl.training.models.train_step import StepMetrics
from parallel_rl.training.progress import TrainProgress
from parallel_rl.training.rollouts.sampler import sample
from parallel_rl.training.session import Session


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
        given = config.loss.options.get("teacher_temperature")
        temperature = float(given) if isinstance(given, (int, float)) else 1.0
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
