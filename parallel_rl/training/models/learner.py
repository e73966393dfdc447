"""A trained policy or critic: micro-batches, scores, optimizer steps, and steps skipped for nonfinite gradients."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial

import torch
import torch.distributed as dist
from megatron.core.optimizer import MegatronOptimizer
from torch import Tensor

from parallel_rl.agreement import gather_results
from parallel_rl.experience.samples import Samples, SamplesT
from parallel_rl.groups import all_gather
from parallel_rl.losses.choice import LossConfig
from parallel_rl.losses.core.base import LossFn
from parallel_rl.training.batching.bin_packing import Capacity, balance, pack
from parallel_rl.training.batching.micro_batches import MicroBatch, fit, in_order, micro_batches, width_unit
from parallel_rl.training.batching.prefix_trees import (
    ScoredTokens,
    every_token,
    group_tokens,
    pack_trees,
    tree_micro_batches,
    tree_tokens,
    unit_rooms,
)
from parallel_rl.training.config.sections import OptimizerConfig, SamplingConfig
from parallel_rl.training.models.engine import Engine, build_optimizer
from parallel_rl.training.models.scoring import token_scores_of, values
from parallel_rl.training.models.train_step import StepDump, StepMetrics, StepResult, train_step
from parallel_rl.vocab.shards import KEEP_ALL, Truncation

_SHOWN = 3  # places in a message


@dataclass
class Skips:
    """Count of skipped optimizer steps: since the process began, and consecutive now."""

    total: int = 0
    in_a_row: int = 0

    def judge(self, norm: float, config: OptimizerConfig, where: str) -> None:
        """Count one more; ValueError if the config allows none, or the count is above `max_skips`."""
        text = f"the gradient norm is {norm:g}{where}"
        if config.on_nonfinite == "error":
            raise ValueError(
                f"{text}. The last good checkpoint is kept, see metrics.jsonl; optimizer.on_nonfinite = 'skip' leaves such a "
                "step out"
            )
        self.total, self.in_a_row = self.total + 1, self.in_a_row + 1
        if self.in_a_row > config.max_skips:
            raise ValueError(
                f"{text}. {self.in_a_row} steps in a row had such a norm, and optimizer.max_skips = {config.max_skips}. The "
                "last good checkpoint is kept, see metrics.jsonl"
            )


def where_nonfinite(engine: Engine, loss_fn: LossFn, batches: Sequence[MicroBatch]) -> str:
    """Describe the micro-batches and rows with nonfinite data or scores; a forward over all, on all ranks."""
    if loss_fn.requirements.reads == "scalar":
        name, scores = "values", values(engine, batches)
    else:
        name, scores = "log-probs", [scored[0] for scored in token_scores_of(engine, engine.model, batches, 1.0)]

    def find() -> list[str]:
        mine = []
        for index, (batch, score) in enumerate(zip(batches, scores, strict=True)):
            fields = {key: x for key, x in batch.data.items() if isinstance(x, Tensor) and x.is_floating_point()}
            for key, x in {name: score, **fields}.items():
                rows = _rows(x, batch)
                if rows:
                    what = f"{key} of row{'s' if len(rows) > 1 else ''} {', '.join(map(str, rows[:_SHOWN]))}"
                    mine.append(f"data rank {engine.groups.dp_rank}, micro-batch {index}: {what}")
        return mine

    all_lines = list(dict.fromkeys(line for lines in gather_results(find) for line in lines))
    if not all_lines:
        return ": every score and field is finite, the backward is not"
    more = f" and {len(all_lines) - _SHOWN} more" if len(all_lines) > _SHOWN else ""
    return f"; not finite: {'; '.join(all_lines[:_SHOWN])}{more} (on {dist.get_world_size()} ranks)"


def _rows(x: Tensor, batch: MicroBatch) -> list[int]:
    """List the rows, by place in the step, of a [B] or [B, S] tensor with nonfinite counted values."""
    if x.dim() not in (1, 2) or x.shape[0] != len(batch.indices):
        return []
    bad, mask = ~x.isfinite(), batch.data["token_mask"].bool()
    if x.dim() == 2:
        bad = (bad & mask if mask.shape == x.shape else bad).any(1)
    return [batch.indices[row] for row in bad.nonzero().flatten().tolist()]


def learning_rate(config: OptimizerConfig, done: int, total: int) -> float:
    """Return the rate after `done` of `total` steps: a linear rise, then constant or half a cosine down."""
    if done < config.warmup_steps:
        return config.lr * (done + 1) / config.warmup_steps
    if config.schedule == "constant":
        return config.lr
    fraction = (done - config.warmup_steps) / max(1, total - config.warmup_steps)
    return config.lr * (config.final_fraction + (1 - config.final_fraction) * 0.5 * (1 + math.cos(math.pi * fraction)))


@dataclass(frozen=True)
class Learner:
    """A model, its loss and its optimizer in one phase, with its learning rate over `updates` steps.

    `skips` counts skipped optimizer steps, see `OptimizerConfig.on_nonfinite`.
    """

    engine: Engine
    optimizer: MegatronOptimizer
    loss_fn: LossFn
    config: OptimizerConfig
    updates: int
    skips: Skips = field(default_factory=Skips)
    dump: StepDump | None = None

    @classmethod
    def start(cls, engine: Engine, loss_fn: LossFn, config: OptimizerConfig, updates: int) -> Learner:
        return cls(engine, build_optimizer(engine, config), loss_fn, config, updates)

    @property
    def capacity(self) -> Capacity | None:
        """Return the capacity of a micro-batch, if `batch.tokens` is set."""
        return Capacity.of_config(self.engine.config.batch, self.engine.config.parallel)

    def balance(
        self, rows: SamplesT, parts: int = 1, together: int = 1, beside: Sequence[Samples] = ()
    ) -> tuple[SamplesT, list[int]]:
        """Rebalance rows if `batch.tokens` is set (see `balance`); return them, and the number in each part.

        `beside` has this rank's further rows in each part.
        """
        if self.capacity is None:
            return rows, [len(rows) // parts] * parts
        shares = self.engine.config.batch.share_prefixes
        loads = [tree_tokens(part) if shares else int(part.lengths.sum()) for part in beside]
        weights = group_tokens(rows, parts, together) if shares else None
        rooms = unit_rooms(rows, self.capacity, together) if shares else None
        group, device = self.engine.groups.data, self.engine.device
        options = {"parts": parts, "together": together}
        return balance(rows, self.capacity, group, device, **options, loads=loads, weights=weights, rooms=rooms)

    def batches(self, rows: Samples, together: int = 1) -> list[MicroBatch]:
        """Make the micro-batches of an optimizer step; under `batch.tokens`, `together` rows stay in one."""
        return self._batches(rows, together, self.loss_fn.scored)

    def _batches(self, rows: Samples, together: int = 1, scored: ScoredTokens | None = None) -> list[MicroBatch]:
        """Make micro-batches; `scored` marks tokens [B, S] read in addition to those of token_mask."""
        config, sizes, capacity = self.engine.config, self.engine.config.parallel, self.capacity
        unit = width_unit(tensor=sizes.tensor, context=sizes.context, sequence_parallel=sizes.sequence_parallel)
        packing, device = config.batch.packing, self.engine.device
        if config.batch.share_prefixes:
            bins = (
                in_order(len(rows), config.batch.sequences)
                if capacity is None
                else pack_trees(rows, capacity, together)
            )
            return tree_micro_batches(rows, bins, device=device, scored=scored)
        if capacity is None:
            bins, row_unit = in_order(len(rows), config.batch.sequences), None
        else:
            bins, row_unit = pack(rows.lengths.tolist(), capacity, together), capacity.row
        return micro_batches(rows, bins, packing=packing, unit=unit, device=device, row_unit=row_unit)

    def update(self, batches: Sequence[MicroBatch], done: int) -> StepResult:
        """Make one optimizer step of the phase's `updates`; ValueError if the gradient norm is refused."""
        rate, clip, spike = learning_rate(self.config, done, self.updates), self.config.clip, self.config.spike
        loss_fn, dump = self.loss_fn, self.dump
        with nullcontext(loss_fn) if dump is None else dump.around(loss_fn, done, self.engine.groups) as step_loss:
            result = train_step(self.engine, self.optimizer, batches, step_loss, lr=rate, clip=clip, spike=spike)
        if result.skipped:
            finite = math.isfinite(result.grad_norm)
            where = (
                f", above optimizer.spike = {spike:g}"
                if finite
                else where_nonfinite(self.engine, self.loss_fn, batches)
            )
            self.skips.judge(result.grad_norm, self.config, where)
            return result
        self.skips.in_a_row = 0
        self.loss_fn.after_step(result.metrics)
        return replace(result, metrics={**result.metrics, **self._fill_metrics(batches)})

    def log_probs(
        self,
        rows: Samples,
        model: torch.nn.Module | None = None,
        *,
        temperature: float = 1.0,
        truncation: Truncation = KEEP_ALL,
        together: int = 1,
    ) -> Tensor:
        """Score this data rank's rows, [N, S] log-probs, under the model or a frozen one of the same shape.

        The micro-batches are those of `batches` with `together`, so equal models give equal bits.
        """
        scored = self.engine.model if model is None else model
        score = partial(token_scores_of, self.engine, scored, temperature=temperature, truncation=truncation)
        return self._score(rows, score, together)[0]

    def log_probs_and_squares(self, rows: Samples, *, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
        """Score rows in one pass: [N, S] log-probs, and Σ_v π_v² of the distributions."""
        score = partial(token_scores_of, self.engine, self.engine.model, temperature=temperature, sum_pi_squared=True)
        logprobs, squares = self._score(rows, score)
        return logprobs, squares

    def values(self, rows: Samples) -> Tensor:
        """Score this data rank's rows by the scalar head, [N, S]."""
        return self._score(rows, partial(values, self.engine), scored=every_token)[0]

    def _fill_metrics(self, batches: Sequence[MicroBatch]) -> StepMetrics:
        """Measure micro-batches' fill, data ranks' imbalance (`batch.tokens`), and prefix trees' savings."""
        shares = self.engine.config.batch.share_prefixes
        if self.capacity is None and not shares:
            return {}
        groups = self.engine.groups
        padded = sum(batch.input.tokens.numel() for batch in batches) * groups.cp_size
        sums = [sum(batch.computed for batch in batches), sum(batch.tokens for batch in batches), padded, len(batches)]
        sums += [sum(batch.groups_cut for batch in batches), sum(batch.tokens_repeated for batch in batches)]
        by_rank = all_gather(torch.tensor(sums, device=self.engine.device), groups.data).double().cpu()
        computed, trained, total_padded, packed_rows, cut, repeated = by_rank.sum(0).tolist()
        metrics: StepMetrics = {}
        if self.capacity is not None:
            metrics |= {
                "packing_efficiency": computed / (packed_rows * self.capacity.usable),
                "padding_fraction": 1 - computed / total_padded,
                "data_imbalance": float(by_rank[:, 0].max() / by_rank[:, 0].mean()),
            }
        if shares:
            metrics |= {"tokens_computed": computed, "tokens_trained": trained, "shared": 1 - computed / trained}
            metrics |= {"groups_cut": cut, "tokens_repeated": repeated}
        return metrics

    def _score(
        self,
        rows: Samples,
        score: Callable[[list[MicroBatch]], list[Tensor]],
        together: int = 1,
        scored: ScoredTokens | None = None,
    ) -> Tensor:
        """Compute [K, N, S] from a score of micro-batches, [K, B, S] or [B, S]."""
        batches = self._batches(rows, together, scored)
        scores = score(batches)
        count = scores[0].shape[0] if scores and scores[0].dim() == 3 else 1
        out = torch.zeros(count, *rows.input_ids.shape, dtype=self.engine.float_dtype)
        for batch, part in zip(batches, scores, strict=True):
            for scored_rows, x in zip(out, part.view(count, *part.shape[-2:]), strict=True):
                scored_rows[batch.indices] = fit(x, out.shape[2]).cpu()
        return out


def build_loss(engine: Engine, config: LossConfig, sampling: SamplingConfig | None = None) -> LossFn:
    """Build the loss; `sampling` adds the policy's temperature and truncation."""
    return config.build(
        vocab_size=engine.vocab_size,
        temperature=1.0 if sampling is None else sampling.temperature,
        consume_logits=not engine.config.model.fused_head,  # a fused head has no logits to consume
        truncation=KEEP_ALL if sampling is None else sampling.truncation,
    )


def combine_updates(results: Sequence[StepResult]) -> StepMetrics:
    """Combine the updates' metrics to a step's: extrema, sums of tokens and groups, means of the rest.

    Skipped updates count in `tokens` and `skipped_updates`.
    """
    combined: StepMetrics = {}
    extrema = {"_min": min, "_max": max}
    applied = [result for result in results if not result.skipped]
    for name in applied[0].metrics if applied else ():
        of_updates = [result.metrics[name] for result in applied]
        extremum = next((pick for suffix, pick in extrema.items() if name.endswith(suffix)), None)
        divisor = 1 if name.startswith(("tokens_", "groups_")) else len(of_updates)
        combined[name] = sum(of_updates) / divisor if extremum is None else extremum(of_updates)
    if "tokens_trained" in combined:
        combined["shared"] = 1 - combined["tokens_computed"] / combined["tokens_trained"]
    if applied:
        combined["grad_norm"] = sum(result.grad_norm for result in applied) / len(applied)
    if len(applied) < len(results):
        combined["skipped_updates"] = float(len(results) - len(applied))
    combined["tokens"] = float(sum(result.tokens for result in results))
    return combined
