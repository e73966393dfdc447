"""What the steps of a run share: models, data, and how rows become micro-batches and updates."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.optimizer import MegatronOptimizer
from torch import Tensor

from parallel_rl.agreement import raise_on_all_ranks
from parallel_rl.cluster.heartbeat import tick
from parallel_rl.experience.kl_control import AdaptiveKLController
from parallel_rl.experience.rewards import reward_function, score_once
from parallel_rl.groups import all_gather
from parallel_rl.losses.choice import LossConfig
from parallel_rl.losses.core.base import LossFn
from parallel_rl.training.batching.balance import balance
from parallel_rl.training.batching.bin_packing import Capacity, pack
from parallel_rl.training.batching.micro_batches import (
    MicroBatch,
    Rows,
    fit,
    in_order,
    micro_batches,
    share,
    width_unit,
)
from parallel_rl.training.config.sections import OptimizerConfig
from parallel_rl.training.data.datasets import Datasets
from parallel_rl.training.data.examples import Prompt
from parallel_rl.training.data.records.source import Records, RecordT
from parallel_rl.training.models.engine import Engine
from parallel_rl.training.models.lr_schedule import learning_rate
from parallel_rl.training.models.scoring import log_probs, values
from parallel_rl.training.models.train_step import StepMetrics, StepResult, train_step
from parallel_rl.training.rollouts.remote import RemoteRollouts
from parallel_rl.training.tokenizer import CharTokenizer
from parallel_rl.vocab.truncation import KEEP_ALL, Truncation


@dataclass(frozen=True)
class Critic:
    """A value function in training."""

    engine: Engine
    optimizer: MegatronOptimizer
    loss_fn: LossFn


@dataclass(frozen=True)
class Session:
    """`reference` is the frozen policy that the objective began with, `teacher` another frozen one, `critic` a value function,
    `loss_fn` that of the present phase, which may keep a state, `served` the source of its samples,
    `kl_controller` the coefficient of the KL in its reward: each where the objective has one."""

    engine: Engine
    tokenizer: CharTokenizer
    data: Datasets
    optimizer: MegatronOptimizer
    reference: torch.nn.Module | None = None
    teacher: torch.nn.Module | None = None
    critic: Critic | None = None
    loss_fn: LossFn | None = None
    served: RemoteRollouts | None = None
    kl_controller: AdaptiveKLController | None = None

    @property
    def temperature(self) -> float:
        """Of the policy that is sampled from and trained."""
        return self.engine.config.sampling.temperature

    @property
    def truncation(self) -> Truncation:
        """Of the same."""
        return self.engine.config.sampling.truncation

    def loss(
        self,
        choice: LossConfig,
        temperature: float = 1.0,
        truncation: Truncation = KEEP_ALL,
    ) -> LossFn:
        """The loss for this model's output."""
        fused = self.engine.config.model.fused_head  # it has no logits to give up
        return choice.build(
            vocab_size=self.engine.vocab_size,
            temperature=temperature,
            consume_logits=not fused,
            truncation=truncation,
        )

    @property
    def capacity(self) -> Capacity | None:
        """Of a micro-batch, where they are filled by tokens."""
        config = self.engine.config
        return Capacity.of_config(config.batch, config.parallel)

    def balance(
        self, rows: Rows, parts: int = 1, together: int = 1, beside: Sequence[Rows] = ()
    ) -> tuple[Rows, list[int]]:
        """Where micro-batches are filled by tokens, rows dealt anew among the data ranks, see `balance`; else as they are.

        Args:
            rows: equal parts, one for each optimizer step.
            parts: how many.
            together: rows that stay together.
            beside: what this rank trains on beside them in each part.

        Returns:
            the rows, part after part, and how many there are in each.
        """
        if self.capacity is None:
            return rows, [len(rows) // parts] * parts
        loads = [int(part.lengths.sum()) for part in beside]
        group, device = self.engine.groups.data, self.engine.device
        return balance(rows, self.capacity, group, device, parts=parts, together=together, loads=loads)

    def batches(self, rows: Rows, together: int = 1) -> list[MicroBatch]:
        """Micro-batches of a part of the step; `together` rows are not parted where they are filled by tokens."""
        config, sizes, capacity = self.engine.config, self.engine.config.parallel, self.capacity
        unit = width_unit(tensor=sizes.tensor, context=sizes.context, sequence_parallel=sizes.sequence_parallel)
        if capacity is None:
            bins, row_unit = in_order(len(rows), config.batch.sequences), None
        else:
            bins, row_unit = pack(rows.lengths.tolist(), capacity, together), capacity.row
        packing, device = config.batch.packing, self.engine.device
        return micro_batches(rows, bins, packing=packing, unit=unit, device=device, row_unit=row_unit)

    def update(
        self, batches: Sequence[MicroBatch], loss_fn: LossFn, optimizer: OptimizerConfig, done: int, total: int
    ) -> StepResult:
        """One optimizer step on this data rank's micro-batches; `done` of `total` were made in this phase before."""
        rate = learning_rate(optimizer, done, total)
        result = train_step(self.engine, self.optimizer, batches, loss_fn, lr=rate, clip=optimizer.clip)
        loss_fn.after_step()
        return self._filled(batches, result)

    def update_critic(
        self, batches: Sequence[MicroBatch], loss_fn: LossFn, optimizer: OptimizerConfig, done: int, total: int
    ) -> StepResult:
        """The same for the critic."""
        assert self.critic is not None
        rate = learning_rate(optimizer, done, total)
        engine, moments = self.critic.engine, self.critic.optimizer
        result = train_step(engine, moments, batches, loss_fn, lr=rate, clip=optimizer.clip)
        loss_fn.after_step()
        return self._filled(batches, result)

    def log_probs(
        self,
        model: torch.nn.Module,
        rows: Rows,
        temperature: float = 1.0,
        together: int = 1,
        truncation: Truncation = KEEP_ALL,
    ) -> Tensor:
        """[N, S] log-probs of this data rank's rows; in the micro-batches that `batches` makes of them with `together`."""
        score = partial(log_probs, self.engine, model, temperature=temperature, truncation=truncation)
        return self._whole(rows, score, together)

    def values(self, rows: Rows) -> Tensor:
        """[N, S] the critic's values of this data rank's rows."""
        critic = self.critic
        assert critic is not None
        return self._whole(rows, lambda batches: values(critic.engine, batches))

    def read(self, records: Records[RecordT], numbers: Sequence[int]) -> list[RecordT]:
        """Records `numbers` of the shuffled stream; what is wrong with them on any rank is an error on all."""
        return raise_on_all_ranks(lambda: records.stream(numbers, self.data.seed))

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

        def ask() -> Tensor:
            tick("asking the reward function")
            return score(asked, texts, answers)

        rewards = score_once(ask, len(texts), sharing, groups.data)
        tick("the step's numbers")
        return rewards

    def total(self, number: int) -> int:
        """The sum over data ranks."""
        found = torch.tensor(number, device=self.engine.device)
        dist.all_reduce(found, group=self.engine.groups.data)
        return int(found)

    def largest(self, number: int) -> int:
        """The largest over data ranks."""
        found = torch.tensor(number, device=self.engine.device)
        dist.all_reduce(found, dist.ReduceOp.MAX, group=self.engine.groups.data)
        return int(found)

    def mean(self, numbers: Tensor) -> float:
        """The mean over data ranks."""
        engine = self.engine
        total = torch.tensor([float(numbers.sum()), float(numbers.numel())], dtype=torch.float64, device=engine.device)
        dist.all_reduce(total, group=engine.groups.data)
        return float(total[0] / total[1])

    def _filled(self, batches: Sequence[MicroBatch], result: StepResult) -> StepResult:
        """With how full the micro-batches were and how uneven the data ranks, where micro-batches are filled by tokens."""
        if self.capacity is None:
            return result
        groups = self.engine.groups
        tokens = sum(batch.tokens for batch in batches)
        padded = sum(batch.input.tokens.numel() for batch in batches) * groups.cp_size
        mine = torch.tensor([tokens, padded, len(batches)], device=self.engine.device)
        of_ranks = all_gather(mine, groups.data).double().cpu()
        tokens_of_all, padded_of_all, rows = of_ranks.sum(0).tolist()
        numbers = {
            "packing_efficiency": tokens_of_all / (rows * self.capacity.usable),
            "padding_fraction": 1 - tokens_of_all / padded_of_all,
            "data_imbalance": float(of_ranks[:, 0].max() / of_ranks[:, 0].mean()),
        }
        return replace(result, metrics={**result.metrics, **numbers})

    def _whole(self, rows: Rows, score: Callable[[list[MicroBatch]], list[Tensor]], together: int = 1) -> Tensor:
        batches = self.batches(rows, together)
        out = torch.zeros(rows.fields["input_ids"].shape, dtype=self.engine.float_dtype)
        for batch, part in zip(batches, score(batches), strict=True):
            out[batch.places] = fit(part, out.shape[1]).cpu()
        return out


def numbers_of(results: Sequence[StepResult]) -> StepMetrics:
    """The updates of one step as one row: extrema stay extrema, everything else is their mean."""
    row: StepMetrics = {}
    for name in results[0].metrics:
        found = [result.metrics[name] for result in results]
        ends = {"_min": min, "_max": max}
        row[name] = next(
            (pick(found) for suffix, pick in ends.items() if name.endswith(suffix)), sum(found) / len(found)
        )
    row["grad_norm"] = sum(result.grad_norm for result in results) / len(results)
    row["tokens"] = float(sum(result.tokens for result in results))
    return row
