"""One step towards a teacher's distributions."""

from __future__ import annotations

from parallel_rl.training.algorithms.supervised import example_rows
from parallel_rl.training.batching.micro_batches import Rows, make_rows
from parallel_rl.training.config.algorithms import DistillationConfig
from parallel_rl.training.models.scoring import with_teacher_logits
from parallel_rl.training.models.train_step import StepMetrics
from parallel_rl.training.progress import TrainProgress
from parallel_rl.training.rollouts.sampler import sample
from parallel_rl.training.session import Session, numbers_of


def distillation_step(session: Session, config: DistillationConfig, at: TrainProgress) -> StepMetrics:
    """The next `batch_size` examples, or completions of the student's, with the teacher's distributions."""
    assert session.teacher is not None
    make, source = (example_rows, "examples") if config.rows == "examples" else (_completions, "train")
    rows, _ = session.balance(make(session, at.next(source), config.batch_size))
    batches = with_teacher_logits(session.engine, session.teacher, session.batches(rows))
    assert session.loss_fn is not None
    return numbers_of([session.update(batches, session.loss_fn, config.optimizer, at.step, config.steps)])


def _completions(session: Session, first: int, count: int) -> Rows:
    engine, ids = session.engine, session.local(range(first, first + count))
    chosen = [prompt.tokens for prompt in session.read(session.data.train, ids)]
    drawn = sample(engine, chosen, ids, 2 * engine.config.run.seed, engine.config.sampling)
    return make_rows(list(zip(chosen, drawn.completions(), strict=True)), engine.float_dtype)
