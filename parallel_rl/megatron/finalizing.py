"""Checks at the end of a step of Megatron's schedule, when every rank finalizes the gradients of its model."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from megatron.core import parallel_state
from megatron.core.utils import get_model_config

from parallel_rl.agreement import raise_on_all_ranks
from parallel_rl.groups import ParallelGroups
from parallel_rl.megatron.auxiliary import has_auxiliary_loss
from parallel_rl.megatron.loop_checks import facts_of_replicas, facts_of_weights, remember_gradients, warn
from parallel_rl.megatron.row_checks import ROWS, gathered_rows, warn_of_same_rows
from parallel_rl.megatron.settings import check_scaling_of_wrappers
from parallel_rl.replicated import Replicated

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_config import TransformerConfig
    from torch import Tensor


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
