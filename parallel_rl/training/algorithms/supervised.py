"""One supervised step: the warm-up, or supervised fine-tuning itself."""

from __future__ import annotations

from parallel_rl.experience import Samples
from parallel_rl.training.batching.micro_batches import local_share, target_rows
from parallel_rl.training.config.algorithms import SupervisedConfig
from parallel_rl.training.models.learner import combine_updates
from parallel_rl.training.models.train_step import StepMetrics
from parallel_rl.training.progress import TrainProgress
from parallel_rl.training.session import Session


def supervised_step(session: Session, config: SupervisedConfig, at: TrainProgress) -> StepMetrics:
    """The next `batch_size` examples."""
    policy = session.policy
    rows, _ = policy.balance(example_rows(session, at.next("examples"), config.batch_size))
    return combine_updates([policy.update(policy.batches(rows), at.step)])


def example_rows(session: Session, first: int, count: int) -> Samples:
    """This data rank's share of the next `count` demonstrations."""
    mine = local_share(range(first, first + count), session.engine.groups)
    examples = session.data.read(session.data.examples, mine)
    return target_rows([example.prompt for example in examples], [example.target for example in examples])
