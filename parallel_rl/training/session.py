"""What the steps of a run share: models, data, and how rows become micro-batches and updates."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.optimizer import MegatronOptimizer
from torch import Tensor

from parallel_rl.experience.rewards import reward_function, score_once
from parallel_rl.losses.base import LossFn
from parallel_rl.training.batching import MicroBatch, Rows, micro_batches, share, width_unit
from parallel_rl.training.data import Prompt
from parallel_rl.training.datasets import Datasets
from parallel_rl.training.engine import Engine, StepResult, train_step
from parallel_rl.training.loss_choice import LossChoice
from parallel_rl.training.schedule import learning_rate
from parallel_rl.training.scoring import log_probs, values
from parallel_rl.training.sections import OptimizerConfig
from parallel_rl.training.tokenizer import CharTokenizer

Numbers = dict[str, float]


@dataclass(frozen=True)
class Critic:
    """A value function in training."""

    engine: Engine
    optimizer: MegatronOptimizer


@dataclass(frozen=True)
class Session:
    """`reference` is the frozen policy that the objective began with, `teacher` another frozen one, `critic` a value function,
    `policy_loss` that of RL, which may keep a state: each where the objective has one."""

    engine: Engine
    tokenizer: CharTokenizer
    data: Datasets
    optimizer: MegatronOptimizer
    reference: torch.nn.Module | None = None
    teacher: torch.nn.Module | None = None
    critic: Critic | None = None
    policy_loss: LossFn | None = None

    @property
    def temperature(self) -> float:
        """Of the policy that is sampled from and trained."""
        return self.engine.config.sampling.temperature

    def loss(self, choice: LossChoice, temperature: float = 1.0) -> LossFn:
        """The loss for this model's output."""
        fused = self.engine.config.model.fused_head  # it has no logits to give up
        return choice.build(vocab_size=self.engine.vocab_size, temperature=temperature, consume_logits=not fused)

    def batches(self, rows: Rows) -> list[MicroBatch]:
        config, sizes = self.engine.config, self.engine.config.parallel
        unit = width_unit(tensor=sizes.tensor, context=sizes.context, sequence_parallel=sizes.sequence_parallel)
        size, packing = config.batch.micro_batch_size, config.batch.packing
        return micro_batches(rows, size, packing=packing, unit=unit, device=self.engine.device)

    def update(
        self, batches: Sequence[MicroBatch], loss_fn: LossFn, optimizer: OptimizerConfig, done: int, total: int
    ) -> StepResult:
        """One optimizer step on this data rank's micro-batches; `done` of `total` were made in this phase before."""
        rate = learning_rate(optimizer, done, total)
        return train_step(self.engine, self.optimizer, batches, loss_fn, lr=rate, clip=optimizer.clip)

    def update_critic(
        self, batches: Sequence[MicroBatch], loss_fn: LossFn, optimizer: OptimizerConfig, done: int, total: int
    ) -> StepResult:
        """The same for the critic."""
        assert self.critic is not None
        rate = learning_rate(optimizer, done, total)
        return train_step(self.critic.engine, self.critic.optimizer, batches, loss_fn, lr=rate, clip=optimizer.clip)

    def log_probs(self, model: torch.nn.Module, rows: Rows, temperature: float = 1.0) -> Tensor:
        """[N, S] log-probs of this data rank's rows."""
        return self._whole(rows, lambda batches: log_probs(self.engine, model, batches, temperature))

    def values(self, rows: Rows) -> Tensor:
        """[N, S] the critic's values of this data rank's rows."""
        critic = self.critic
        assert critic is not None
        return self._whole(rows, lambda batches: values(critic.engine, batches))

    def local(self, items: Sequence[int]) -> list[int]:
        """This data rank's share of a list that every rank knows."""
        return list(items[share(len(items), self.engine.groups.dp_rank, self.engine.groups.dp_size)])

    def places(self, count: int, parts: int) -> list[int]:
        """This data rank's share of range(count) cut into equal parts, one after the other."""
        size = count // parts
        return [place for part in range(parts) for place in self.local(range(part * size, (part + 1) * size))]

    def rewards(self, prompts: Sequence[Prompt], completions: Sequence[Sequence[int]]) -> Tensor:
        """[N] float64 rewards; every rank calls it, N may be 0. A reward function that fails on one rank is an error on all."""
        score = reward_function(self.engine.config.reward)
        texts = [self.tokenizer.decode(completion) for completion in completions]
        asked, answers = [prompt.text for prompt in prompts], [prompt.answer for prompt in prompts]
        groups = self.engine.groups
        sharing = [groups.tensor, groups.context, parallel_state.get_pipeline_model_parallel_group()]
        return score_once(lambda: score(asked, texts, answers), len(texts), sharing, groups.data)

    def total(self, number: int) -> int:
        """The sum over data ranks."""
        found = torch.tensor(number, device=self.engine.device)
        dist.all_reduce(found, group=self.engine.groups.data)
        return int(found)

    def mean(self, numbers: Tensor) -> float:
        """The mean over data ranks."""
        engine = self.engine
        total = torch.tensor([float(numbers.sum()), float(numbers.numel())], dtype=torch.float64, device=engine.device)
        dist.all_reduce(total, group=engine.groups.data)
        return float(total[0] / total[1])

    def _whole(self, rows: Rows, score: Callable[[list[MicroBatch]], list[Tensor]]) -> Tensor:
        width = rows.fields["input_ids"].shape[1]
        found = score(self.batches(rows))
        fitted = [torch.nn.functional.pad(part, (0, max(0, width - part.shape[1])))[:, :width] for part in found]
        return torch.cat(fitted).cpu()


def numbers_of(results: Sequence[StepResult]) -> Numbers:
    """The updates of one step as one row: extrema stay extrema, everything else is their mean."""
    row: Numbers = {}
    for name in results[0].metrics:
        found = [result.metrics[name] for result in results]
        ends = {"_min": min, "_max": max}
        row[name] = next(
            (pick(found) for suffix, pick in ends.items() if name.endswith(suffix)), sum(found) / len(found)
        )
    row["grad_norm"] = sum(result.grad_norm for result in results) / len(results)
    row["tokens"] = float(sum(result.tokens for result in results))
    return row
