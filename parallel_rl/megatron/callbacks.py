"""Loss callbacks of a step under Megatron's schedule, and its end: faults raised on every rank, counts checked."""

from __future__ import annotations

import contextlib
import weakref
import zlib
from collections.abc import Callable, Mapping, Sequence
from math import isclose
from typing import TYPE_CHECKING

import torch
from megatron.core import parallel_state
from megatron.core.utils import get_model_config
from torch import Tensor

from parallel_rl.agreement import communication_device, raise_on_all_ranks
from parallel_rl.counts import check_masks, own_counts
from parallel_rl.groups import ParallelGroups, reduce_
from parallel_rl.labels import with_labels
from parallel_rl.losses.core.call import LossFunction
from parallel_rl.megatron.auxiliary import has_auxiliary_loss
from parallel_rl.megatron.loop_checks import (
    fact_of_validation,
    facts_of_loss,
    facts_of_replicas,
    facts_of_weights,
    is_checked,
    remember_gradients,
    warn,
)
from parallel_rl.megatron.row_checks import ROWS, gathered_rows, warn_of_same_rows
from parallel_rl.megatron.settings import check_scaling_of_wrappers
from parallel_rl.metrics import Metrics
from parallel_rl.replicated import Replicated

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_config import TransformerConfig
    from torch.distributed import ProcessGroup

    from parallel_rl.statistics import Statistics


class Finalizing:
    """Replacement of `config.finalize_model_grads_func` in one step; checks model and rows first."""

    def __init__(self, config: TransformerConfig, *, first: bool, compares: bool = True) -> None:
        self.config, self.first, self.compares, self.complete = config, first, compares, False
        self.fault: ValueError | None = None  # of a micro-batch, which the end of the step raises
        self.inner = config.finalize_model_grads_func
        self.rows: int | None = 0  # a checksum of this stage's data, if it has any
        config.finalize_model_grads_func = self

    def add(self, data: Mapping[str, Tensor] | None, last: bool) -> None:
        self.complete = last
        if not isinstance(data, Mapping) or self.rows is None:
            self.rows = None
        else:
            self.rows = zlib.crc32(Replicated([data], ROWS).checksum().to_bytes(4, "big"), self.rows)

    def end(self) -> None:
        """Restore the config's function before the next step; warn if nothing called this one."""
        if self.config.finalize_model_grads_func is self:
            self.config.finalize_model_grads_func = self.inner
            if self.complete and parallel_state.get_data_parallel_world_size(with_context_parallel=True) > 1:
                warn(
                    "nothing called config.finalize_model_grads_func after the last step's backward: the schedule ran with "
                    "forward_only=True, config= is another model's, or you call backward yourself; its gradients are not "
                    "summed over ranks, unless your loop calls Megatron's finalize_model_grads directly"
                )

    def __call__(
        self, models: Sequence[torch.nn.Module], num_tokens: Tensor | None = None, *args: object, **kwargs: object
    ) -> object:
        """Finalize once the ranks agree in the model, else raise ValueError; on all ranks if it `compares`."""
        self.config.finalize_model_grads_func = self.inner
        if self.fault is not None and not self.compares:
            raise self.fault
        self._check(models, num_tokens)
        result = self.inner(models, num_tokens, *args, **kwargs)
        remember_gradients(models)
        return result

    def _check(self, models: Sequence[torch.nn.Module], num_tokens: Tensor | None) -> None:
        """Refuse weights, wrappers, rows and token counts with which ranks would finalize other gradients."""
        groups, config = ParallelGroups.from_megatron(), get_model_config(models[0])
        pipeline = parallel_state.get_pipeline_model_parallel_group()
        of_stages = gathered_rows(self.rows, pipeline)

        def check() -> None:
            if self.fault is not None:
                raise self.fault
            check_scaling_of_wrappers(models, config)
            tokens = 0 if num_tokens is None or has_auxiliary_loss(config) else int(num_tokens)
            if tokens:
                raise ValueError(
                    f"the schedule got {tokens} tokens from the callbacks in place of 0, and Megatron divides the gradients by "
                    "them; return what the callback of megatron_loss_func returns as it is"
                )
            if len({rows for rows in of_stages if rows is not None}) > 1:
                raise ValueError(
                    "input_ids or masks of this step differ between pipeline stages; the last stage scores what the first one "
                    "embeds: seed the sampler by the data rank alone"
                )

        raise_on_all_ranks(
            lambda: raise_on_all_ranks(
                lambda: raise_on_all_ranks(
                    check, [groups.tensor], same=facts_of_replicas(models) if self.first else None
                ),
                [pipeline],
            ),
            [groups.data_context or groups.data],
            same=facts_of_weights(models),
        )
        if self.first:
            warn_of_same_rows(self.rows, groups.data)


_of_configs: dict[int, StepOfCallbacks] = {}  # by id: a config has no hash


def callbacks_of(config: TransformerConfig) -> StepOfCallbacks:
    """Return the current step of the model with this config; chunks of a model may have a config each."""
    key = id(config)
    if key not in _of_configs:
        newest = next(reversed(_of_configs.values()), None)
        step = newest if newest is not None and newest.lacks(config) else StepOfCallbacks(config)
        step.configs += 1
        _of_configs[key] = step
        weakref.finalize(config, _of_configs.pop, key, None)
    return _of_configs[key]


def postponed(
    loss: Callable[[Tensor], tuple[Tensor, Metrics]], postpone: Callable[[ValueError], bool], output: Tensor
) -> tuple[Tensor, Metrics]:
    """Run the loss of a micro-batch; give its ValueError to `postpone` and return zero."""
    try:
        return loss(output)
    except ValueError as error:
        if not isinstance(output, torch.Tensor) or not postpone(error):
            raise
        return output.sum() * 0, Metrics({})


class StepOfCallbacks:
    """One optimizer step, up to the callback of the last micro-batch on this rank's last model chunk.

    A pipeline stage that raised at once would leave the others waiting. So a stage raises a fault of the first micro-batch when
    as many micro-batches have begun as stages follow, itself included, and other faults before gradients are finalized.
    """

    def __init__(self, config: TransformerConfig) -> None:
        self.chunks: int = config.virtual_pipeline_model_parallel_size or 1
        self.configs = 0  # of its chunks, so far
        self.sizes = self.chunks, config.num_layers, config.hidden_size
        self.shares_experts = bool(config.num_moe_experts) and config.expert_model_parallel_size > 1
        self.steps = 0
        self.made = 0  # callbacks of the current step
        self.sums: Tensor | None = None
        self.data: list[Mapping[str, Tensor]] = []
        self.fault: ValueError | None = None
        self.finalizing: Finalizing | None = None
        self.ending: TransformerConfig | None = None  # of a pipeline whose schedule finalizes gradients

    def lacks(self, config: TransformerConfig) -> bool:
        """Return whether a config in the first step may be that of another chunk of the model."""
        sizes = config.virtual_pipeline_model_parallel_size or 1, config.num_layers, config.hidden_size
        return self.made > 0 and self.steps == 0 and self.configs < self.chunks and self.sizes == sizes

    def add(
        self,
        check: Callable[[bool], None],
        data: Mapping[str, Tensor] | None,
        counts: tuple[object, object],
        num_microbatches: int,
        groups: ParallelGroups,
        *,
        config: TransformerConfig,
        ddp: bool,
        loss_fn: object,
        head: object,
        statistics: Statistics | None,
    ) -> bool:
        """Add the step's next callback and raise its faults; return whether a later step's backward follows.

        In the first three steps, or with `set_validation("always")`, ranks of a stage exchange the first callback's faults,
        and after the last callback `counts` are compared with those of the data.

        Args:
            check: settings and data; its argument is True for the very first callback.
            data: of this micro-batch; None on a stage without data. counts: by which the loss divides.
            config: of the chunk; the schedule reads that of a step's first callback.
            loss_fn, head: the loss, in which the ranks of a stage must agree.
            statistics: of the loss; those of the data are counted again after the last callback and compared.
            ddp: data ranks run the schedule together; without DDP one may be idle, and is not waited for.
        """
        looks = self.made == 0 and self.steps > 0 and is_checked(self.steps)
        checked = is_checked(self.steps) and groups == ParallelGroups.from_megatron()
        first, last = self.made == 0, self.made + 1 >= num_microbatches * self.chunks
        stages = parallel_state.get_pipeline_model_parallel_world_size()
        self.made += 1
        if first:
            finalizes = ddp and stages > 1 and config.finalize_model_grads_func is not None
            self.ending = config if finalizes else None
        if first and self.finalizing is not None:
            self.finalizing.end()
            self.finalizing = None
        fault: ValueError | None = None
        try:
            if first and (checked or self.steps == 0):
                same = {**facts_of_loss(loss_fn, head, config), **fact_of_validation()}
                if self.shares_experts:
                    same["the number of micro-batches (with expert parallelism; add masked ones)"] = num_microbatches
                raise_on_all_ranks(
                    lambda: check(self.steps == 0),
                    [groups.tensor, groups.context, groups.data if ddp else None],
                    same=same,
                )
            else:
                check(False)
        except ValueError as error:
            fault = error
        if first and checked and ddp:
            self.finalizing = Finalizing(config, first=self.steps == 0)
        if fault is not None:
            every_stage_begins = first and self.chunks == 1 and num_microbatches >= stages
            if every_stage_begins or not self.postpone(fault):
                self.fault = self.fault or fault
        following = stages - parallel_state.get_pipeline_model_parallel_rank()
        if self.fault is not None and (self.chunks > 1 or self.made >= following or last):
            fault = self.fault
            self._forget()
            if self.finalizing is not None:
                self.finalizing.end()
                self.finalizing = None
            raise fault
        if self.finalizing is not None:
            self.finalizing.add(data, last)
        if checked and self.fault is None and isinstance(data, Mapping):
            self._count(data)
            self.data.append(data)
        if last:
            sums, batches = self.sums, self.data
            self.steps += 1
            self._forget()
            if checked and sums is not None:
                try:
                    self._compare(sums, counts, num_microbatches, groups, ddp)
                    if statistics is not None and self.chunks == 1 and ddp and isinstance(loss_fn, LossFunction):
                        _compare_statistics(loss_fn.count(batches, groups.data), statistics, groups.data)
                except ValueError as error:
                    if stages == 1:
                        raise
                    if not self.postpone(error):
                        # the other stages still work on this step; each raises in its next step
                        warn(str(error))
                        self.fault = error
        return looks

    def postpone(self, fault: ValueError) -> bool:
        """Leave a fault to the end of the step; return False if nothing finalizes its gradients."""
        if self.ending is None:
            return False
        if self.finalizing is None:
            self.finalizing = Finalizing(self.ending, first=False, compares=False)
        self.finalizing.fault = self.finalizing.fault or fault
        return True

    def _forget(self) -> None:
        self.made, self.sums, self.fault, self.data = 0, None, None, []

    def _count(self, data: Mapping[str, Tensor]) -> None:
        with contextlib.suppress(ValueError):  # a user's function may read other data
            data = with_labels(data)
            check_masks(data)
            counts = torch.stack(own_counts(data))
            self.sums = counts if self.sums is None else self.sums + counts

    def _compare(
        self,
        sums: Tensor,
        counts: tuple[object, object],
        num_microbatches: int,
        groups: ParallelGroups,
        ddp: bool,
    ) -> None:
        others = groups.data if ddp else None
        at_least = not ddp and groups.dp_size > 1  # the other data ranks' counts are unknown
        sums = sums.to(communication_device(others, sums.device)) // self.chunks
        here = sums.tolist()
        step = reduce_(sums, others).clamp_(min=1).tolist()

        def check() -> None:
            for name, count, local, total in zip(("seqs", "toks"), counts, here, step, strict=True):
                number = int(torch.as_tensor(count))
                if number not in (total, 1) and not (at_least and number > total):  # 1: the caller divides
                    raise ValueError(
                        f"global_valid_{name} = {number}, but the {num_microbatches} micro-batches of this step hold {local} "
                        f"on this data rank and {total} on all data ranks. Call count_valid once a step on all its "
                        "micro-batches, over the data group without context ranks, and pass the schedule's num_microbatches"
                    )

        raise_on_all_ranks(check, [others])


def _compare_statistics(counted: Statistics, statistics: Statistics, data_group: ProcessGroup | None) -> None:
    def check() -> None:
        for name, value in counted.items():
            number = float(statistics[name])
            if not isclose(number, float(value), rel_tol=1e-3):
                raise ValueError(
                    f"statistics has {name} = {number:g}, the micro-batches of this step {float(value):g}. Call "
                    "loss_fn.count once a step on all its micro-batches, over the data group without context ranks"
                )

    raise_on_all_ranks(check, [data_group])
