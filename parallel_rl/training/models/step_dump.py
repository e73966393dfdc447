"""`--dump-step N`: files of one optimizer step of the main phase's policy, for `parallel-rl explain`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from parallel_rl.explain.dump import DumpError, StepInfo, dump_step
from parallel_rl.groups import ParallelGroups
from parallel_rl.losses.core.call import LossFunction
from parallel_rl.training.config.train import TrainConfig


@dataclass(frozen=True)
class StepDump:
    """Optimizer step to dump, by its `number` from 1, and its destination."""

    number: int
    folder: Path
    title: str
    text_of_token: Callable[[int], str]
    pipeline: int

    @classmethod
    def of(
        cls, config: TrainConfig, phase: str, number: int | None, decode: Callable[[list[int]], str]
    ) -> StepDump | None:
        """Make the dump of a run's optimizer step, in its folder; None if none is requested."""
        if number is None:
            return None
        run, name = Path(config.run.dir), f"{phase} step {number}"
        folder = run / "dumps" / f"{phase}_step_{number:06d}"
        return cls(number, folder, f"{run.name}, {name}", partial(_text, decode), config.parallel.pipeline)

    @contextmanager
    def around(self, loss_fn: LossFunction, done: int, groups: ParallelGroups) -> Iterator[LossFunction]:
        """Wrap the loss of the step after `done` ones; a failed dump is reported on stderr only."""
        if done + 1 != self.number:
            yield loss_fn
            return
        try:
            info = StepInfo(self.title, self.text_of_token, self.pipeline)
            with dump_step(self.folder, loss_fn, groups=groups, info=info) as recording:
                yield recording
        except DumpError as error:
            print(f"parallel-rl: {error}", file=sys.stderr, flush=True)


def _text(decode: Callable[[list[int]], str], token: int) -> str:
    """Decode a token inside others: some tokenizers drop the space before the first."""
    return decode([token, token])[len(decode([token])) :]
