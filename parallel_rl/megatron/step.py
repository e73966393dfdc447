"""Forward and backward of one optimizer step on Megatron's schedules, in one call."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial, reduce
from operator import add
from typing import TypeVar, cast

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.utils import get_model_config
from torch import Tensor

from parallel_rl.counts import ValidCounts, count_rows
from parallel_rl.groups import ParallelGroups, group_rank
from parallel_rl.losses.core.call import LossCall, LossFunction
from parallel_rl.losses.nll import NLLLoss
from parallel_rl.megatron.auxiliary import (
    RoutedTokens,
    RouterBalance,
    count_routed,
    forget_scales,
    has_auxiliary_loss,
    needs_balance,
    without_auxiliary_losses,
)
from parallel_rl.megatron.callbacks import postponed
from parallel_rl.megatron.cpu import plain_torch
from parallel_rl.megatron.forward import broadcast_from_last_stage, forward_logits, forward_only, is_last_stage
from parallel_rl.megatron.grads import sum_gradients
from parallel_rl.megatron.lm_head import FusedHead, add_mtp_loss, split_heads
from parallel_rl.megatron.loop_checks import begin_step, check_normalised, is_checked, remember_gradients, steps_of
from parallel_rl.megatron.loss import LossReport, check_scaling, scaled_loss_func
from parallel_rl.megatron.micro_batch import MicroBatch
from parallel_rl.megatron.prepare import prepare, split_partial
from parallel_rl.megatron.process_groups import context_group
from parallel_rl.metrics import Metrics, reduce_metrics
from parallel_rl.statistics import Statistics

ResultT = TypeVar("ResultT")
Queue = Iterator[tuple[MicroBatch, RoutedTokens | None]]


@dataclass(frozen=True)
class StepReport:
    """Metrics and global counts of one optimizer step, equal on every rank.

    metrics: name → float64 scalar on the device, as of one process with the whole global batch; `loss` is L, `empty_rows` the
    rows with sample_mask 1 and no valid token, which count as sequences. counts: over all data ranks and micro-batches.
    """

    metrics: dict[str, Tensor]
    counts: ValidCounts

    def floats(self) -> dict[str, float]:
        """Copy the metrics to the host; call it after the optimizer's step, so the device does not wait."""
        return dict(zip(self.metrics, torch.stack(list(self.metrics.values())).tolist(), strict=True))


def forward_backward(
    model: torch.nn.Module | Sequence[torch.nn.Module],
    loss_fn: LossFunction | partial[tuple[Tensor, Metrics]],
    batches: Sequence[MicroBatch | Mapping[str, Tensor]],
    *,
    head: FusedHead | None = None,
    mtp_loss: NLLLoss | None = None,
    groups: ParallelGroups | None = None,
    before_forward: Callable[[], None] | None = None,
    allow_dropout: bool = False,
) -> StepReport:
    """Run all micro-batches of one optimizer step; every parameter's `gradient` is then the global loss's.

        ∇L of Σ over data ranks, context ranks and micro-batches of loss_fn(logits, data, N_seq, N_tok, ...) = L

    It counts valid sequences and tokens, and the loss's own counts, over the step; collects the loss's statistics of the
    current policy (a pass without gradient, if it `needs_collect`); runs Megatron's schedule for the layout (pipeline stages
    and virtual chunks included), undoes Megatron's factors, and reduces the metrics. In a loss's first micro-batches the host
    waits to compare recorded log-probs with the policy's, and warns if they are shifted by one place or of another temperature.
    With Megatron's DDP the gradient is in `main_grad`, otherwise summed over ranks in `grad`. Zero gradients before; clip and
    step after it:

    >>> model.zero_grad_buffer()
    >>> report = forward_backward(model, NLLLoss(vocab_size=8), [data])
    >>> clip_grads_([model], 1.0, grad_norm([model]))
    >>> sorted(report.floats())
    ['empty_rows', 'loss', 'num_unmasked_tokens', 'num_valid_samples']

    A model's first step warns of dropout, fp16 without `config.grad_scale_func`, untrained MTP heads, and rows that are the
    same on all data ranks. The second and third (all with `set_validation("always")`) warn of gradients that were not zeroed;
    the host waits for this. With DDP, `grad` is emptied before the first micro-batch. An optimizer of torch that steps without
    `grad` causes a warning: it needs `copy_main_grads`. In its first three steps, so do gradients that are all 0 or that grew
    after the backward.

    Args:
        model: this rank's model, wrapped by `wrap_model` or by Megatron's training code; under an interleaved schedule the
            list of its chunks.
        loss_fn: any loss of this package or registered objective; `functools.partial(loss_fn, statistics=...)` passes the
            step's statistics, which are otherwise computed here.
        batches: this data rank's micro-batches, the same on its tensor, context and pipeline ranks. A mapping is rows padded
            to one width, moved to the model's device, see `padded_batch`; for packed rows see `packed_batch`. Data ranks may
            hold different numbers; one without any runs a masked one. With `context_group=` each has its own context group of
            data ranks that all pass it (dynamic context parallelism).
        head: from `fuse_head`, if the model (its last chunk) has a fused head.
        mtp_loss: trains the heads of multi-token prediction of a model with `mtp_num_layers`: adds their mean, times
            `mtp_loss_scaling_factor`, to L, see `add_mtp_loss`. None: they do not train.
        groups: defaults to `ParallelGroups.from_megatron()`.
        before_forward: called before each forward of a micro-batch, such as a heartbeat.
        allow_dropout: allow the config's dropout, which makes numbers depend on the layout.

    Ranks compare checksums of input_ids, masks and the loss's fields: on CPUs in every step; on GPUs, at the cost of a host
    sync, in a model's first three steps and with `set_validation("always")`. The same steps check the values of the loss's
    fields and compare the weights of data ranks. All other checks read shapes, configs and the host's ids and run in every
    step. Rank 0 warns once of a padded vocabulary if the loss has no `vocab_size`, and of a policy loss whose token_mask is 1
    everywhere.

    Raises:
        ValueError: on all ranks (see `set_validation`), before anything runs: groups of other sizes than Megatron's; a field
            that is missing or of a wrong shape, dtype or value; ids that the model does not embed; rows padded on the left;
            data that does not suit the layout; dropout with a loss that reads recorded log-probs; micro-batches that differ
            within a data rank, such as rows already cut over context ranks; logits gathered over tensor ranks
            (`parallel_output = False`); micro-batches of different shapes in a pipeline built for one; a wrapper without
            `finalize_model_grads_func`, torch's DDP, or one made with another `calculate_per_token_loss`; a fused head that
            is not given or another model's; no trained parameter. After the schedule: no micro-batch on any data rank; errors
            of `loss_fn`.
    """
    models = [model] if isinstance(model, torch.nn.Module) else list(model)
    loss_fn, statistics = split_partial(loss_fn)
    groups = groups or ParallelGroups.from_megatron()
    config, ddp = get_model_config(models[0]), hasattr(models[0], "finish_grad_sync")
    with plain_torch():
        prepared = prepare(models, loss_fn, batches, head, mtp_loss, groups, allow_dropout=allow_dropout)
        begin_step(models, ddp)
        counts, empty_rows = count_rows(_counted(prepared), groups.data)

    inputs = [batch.input for batch in prepared]
    routed: Sequence[RoutedTokens | None] = [None] * len(inputs)
    if has_auxiliary_loss(config):
        routed = count_routed(inputs, config=config, groups=groups, made_up=not batches)
    balance: RouterBalance | None = None
    if needs_balance(config):
        divisor = routed[0].step if config.calculate_per_token_loss and routed[0] else len(prepared) * groups.dp_size
        balance = RouterBalance(models, prepared, config=config, groups=groups, divisor=divisor)

    def forward(model: torch.nn.Module, batch: MicroBatch, mtp: bool = False) -> Tensor:
        if before_forward is not None:
            before_forward()
        group = batch.context_group
        if balance is not None:
            balance.enter(batch)
        with nullcontext() if group == "model" else context_group(model, group):
            output = forward_logits(model, batch.input, mtp=mtp)
        if balance is not None:
            balance.follow(output, batch)
        return output

    if statistics is None:
        statistics = _statistics(forward, models, loss_fn, prepared, counts, head, groups, idle=not batches)

    if balance is not None and balance.counts_first:
        with balance.counting():
            _pass(partial(forward, mtp=mtp_loss is not None), models, prepared, lambda *_: None)

    faults: list[ValueError] = []
    stages = parallel_state.get_pipeline_model_parallel_world_size()

    def postpone(fault: ValueError) -> bool:
        faults.append(fault)
        return stages > 1

    looks = head is None and groups.tp_size > 1 and is_checked(steps_of(models) - 1)

    def share(output: Tensor, batch: MicroBatch) -> tuple[Tensor, Metrics]:
        if looks and loss_fn.requirements.reads != "scalar":
            check_normalised(output)
        if mtp_loss is None:
            return loss_fn.run(_call(output, batch, counts, head, groups, statistics))
        parts = groups.tp_size if config.sequence_parallel and head is None else 1
        output, *heads = split_heads(output, config.mtp_num_layers, parts)
        call = _call(output, batch, counts, head, groups, statistics)
        inputs = [hidden if head is None else head(hidden) for hidden in heads]
        return add_mtp_loss(loss_fn.run(call), mtp_loss, call, inputs, config.mtp_loss_scaling_factor)

    check_scaling(config, len(prepared), ddp, routed[0])
    forget_scales(config)
    if config.no_sync_func is not None:
        # a schedule reads only the first chunk's config, which may hold the function of another model that shares it
        config.no_sync_func = [chunk.no_sync for chunk in models] if len(models) > 1 else models[0].no_sync

    def step(queue: Queue, model: torch.nn.Module) -> tuple[Tensor, Callable[[Tensor], object]]:
        batch, routed_tokens = next(queue)
        loss_func = scaled_loss_func(
            partial(postponed, lambda output: share(output, batch), postpone),
            config=config,
            num_microbatches=len(prepared),
            ddp=ddp,
            groups=groups,
            routed=routed_tokens,
        )
        return forward(model, batch, mtp_loss is not None), loss_func

    iterators = [iter(list(zip(prepared, routed, strict=True))) for _ in models]
    with (
        nullcontext() if batches else without_auxiliary_losses(config),
        nullcontext() if balance is None else balance.installed(),
    ):
        reports: list[LossReport] = get_forward_backward_func()(
            forward_step_func=step,
            data_iterator=iterators if len(models) > 1 else iterators[0],
            model=models,
            num_microbatches=len(prepared),
            seq_length=prepared[0].width,
            micro_batch_size=prepared[0].input.tokens.shape[0],
            forward_only=False,
        )
    if not ddp:
        sum_gradients(models)
    elif is_checked(steps_of(models) - 1):
        remember_gradients(models)
    with plain_torch():
        reduced = _reduced([report["metrics"] for report in reports] if batches else [], groups, faults)
    return StepReport({**reduced, "empty_rows": empty_rows.double()}, counts)


def _statistics(
    forward: Callable[[torch.nn.Module, MicroBatch], Tensor],
    models: Sequence[torch.nn.Module],
    loss_fn: LossFunction,
    batches: Sequence[MicroBatch],
    counts: ValidCounts,
    head: FusedHead | None,
    groups: ParallelGroups,
    *,
    idle: bool,
) -> Statistics | None:
    """Collect the step's statistics over all ranks, if needed; stages without loss return the counts."""
    if not loss_fn.needs_statistics:
        return None
    counted = loss_fn.count(_counted(batches), groups.data)
    if not loss_fn.needs_collect:
        return counted

    def collect(output: Tensor, index: int) -> Statistics:
        return loss_fn.run_collect(_call(output, batches[index], counts, head, groups))

    collected = _pass(forward, models, batches, collect)
    if collected is None:
        return counted
    return counted | (Statistics({}) if idle else reduce(add, collected)).reduce(groups)


def _pass(
    forward: Callable[[torch.nn.Module, MicroBatch], Tensor],
    models: Sequence[torch.nn.Module],
    batches: Sequence[MicroBatch],
    collect: Callable[[Tensor, int], ResultT],
) -> list[ResultT] | None:
    return forward_only(
        forward,
        models,
        batches,
        collect,
        seq_length=batches[0].width,
        micro_batch_size=batches[0].input.tokens.shape[0],
    )


def _counted(batches: Sequence[MicroBatch]) -> list[Mapping[str, Tensor]]:
    """List the data that this data rank counts; a context group of data ranks counts on its first rank."""
    return [batch.data for batch in batches if batch.context_group == "model" or group_rank(batch.context_group) == 0]


def _call(
    output: Tensor,
    batch: MicroBatch,
    counts: ValidCounts,
    head: FusedHead | None,
    groups: ParallelGroups,
    statistics: Statistics | None = None,
) -> LossCall:
    context = groups.context if batch.context_group == "model" else batch.context_group
    call = LossCall.of(
        batch.loss_input(output, head), {**batch.data, **batch.heads}, (counts.seqs, counts.toks),
        groups.tp_rank, (groups.tensor, context), statistics,
    )  # fmt: skip
    return replace(call, packed_sequences=batch.packed, tree=batch.input.tree, may_wait=True)


def _reduced(of_batches: Sequence[Metrics], groups: ParallelGroups, faults: Sequence[ValueError]) -> dict[str, Tensor]:
    """Return the last stage's metrics, or raise its first fault, on every stage."""
    metrics: dict[str, Tensor] = {}
    fault: ValueError | None = None
    if is_last_stage():
        try:
            metrics = reduce_metrics([] if faults else of_batches, groups)
        except ValueError as error:
            cure = f"batches is empty on this data rank, and {error}; give the step a micro-batch on one data rank"
            fault = error if of_batches else ValueError(cure)
        fault = faults[0] if faults else fault
    if parallel_state.get_pipeline_model_parallel_world_size() > 1:
        common: list[object] = [list(metrics), fault]
        source = parallel_state.get_pipeline_model_parallel_last_rank()
        dist.broadcast_object_list(common, src=source, group=parallel_state.get_pipeline_model_parallel_group())
        names, fault = cast("tuple[list[str], ValueError | None]", common)
        if fault is None:
            values = torch.stack(list(metrics.values())) if metrics else None
            broadcast = broadcast_from_last_stage(values, shape=(len(names),), dtype=torch.float64)
            metrics = dict(zip(names, broadcast.unbind(), strict=True))
    if fault is not None:
        raise fault
    return metrics
