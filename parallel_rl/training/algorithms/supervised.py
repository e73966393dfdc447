"""One supervised step: the warm-up, or supervised fine-tuning itself."""

from __future__ import annotations

from parallel_rl.training.batching.micro_batches import Rows, make_rows
from parallel_rl.training.config.algorithms import SupervisedConfig
from parallel_rl.training.models.train_step import StepMetrics
from parallel_rl.training.progress import TrainProgress
from parallel_rl.training.session import Session, numbers_of


def supervised_step(session: Session, config: SupervisedConfig, at: TrainProgress) -> StepMetrics:
    """The next `batch_size` examples."""
    rows, _ = session.balance(example_rows(session, at.next("examples"), config.batch_size))
    assert session.loss_fn is not None
    return numbers_of([session.update(session.batches(rows), session.loss_fn, config.optimizer, at.step, config.steps)])


def example_rows(session: Session, first: int, count: int) -> Rows:
    """This data rank's share of the next `count` demonstrations."""
    examples = session.read(session.data.examples, session.local(range(first, first + count)))
    return make_rows([(example.prompt, example.completion) for example in examples], session.engine.float_dtype)
