"""Losses on whole rows of logits, one by one: all at once, or in chunks from hidden states."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from parallel_rl.counts import Aggregation, unit_of
from parallel_rl.losses.core.aggregation import aggregate
from parallel_rl.losses.core.base import LossFn
from parallel_rl.losses.core.batch import ModelOutput, TokenBatch
from parallel_rl.losses.core.loss import ConfigT, Reader
from parallel_rl.losses.core.measures import count_true, token_means
from parallel_rl.losses.core.readers import check_vocabulary
from parallel_rl.metrics import Metric, Metrics
from parallel_rl.vocab.backends.torch_backend import compiles, math_dtype
from parallel_rl.vocab.linear.row_values import check_teacher_head, chunk_size, row_values

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch.distributed import ProcessGroup

    from parallel_rl.losses.core.local_batch import LocalBatch
    from parallel_rl.vocab.linear.lm_head import LMHeadInput
    from parallel_rl.vocab.shards import VocabShard

TEACHER = "teacher_logits"


def mean_of_values(
    batch: TokenBatch, mode: Aggregation, max_length: int | None, measured: tuple[str, ...] = ()
) -> tuple[Tensor, Metrics]:
    """Aggregate each row's value; metrics: loss, num_valid_samples and the means of `measured`."""
    values = batch.head[:, 0] if measured else batch.head
    loss = aggregate(batch, values, mode, max_length)
    metrics = {
        "loss": Metric("share", loss, per=unit_of(mode, batch.local.requirements.token_weights)),
        "num_valid_samples": count_true(batch, batch.sequence_mask),
    }
    if measured:
        metrics |= token_means(batch, dict(zip(measured, batch.head[:, 1:].unbind(1), strict=True)))
    return loss, Metrics(metrics)


@dataclass(frozen=True, eq=False)
class LogitRows:
    """Rows [n, W] of logits, all of this rank or those at `places` [n], with the teacher's if it is read.

    `local` holds the data of all tokens of this rank.
    """

    logits: Tensor
    shard: VocabShard
    local: LocalBatch
    places: Tensor | None = None
    teacher: Tensor | None = None

    @property
    def mask(self) -> Tensor:
        return self._of_rows(self.local.mask)

    def field(self, name: str) -> Tensor:
        """Return [n, ...] of a field of the data, 0 at masked places."""
        return self._of_rows(self.local.field(name))

    def _of_rows(self, x: Tensor) -> Tensor:
        return x if self.places is None else x[self.places]


class RowLoss(LossFn[ConfigT]):
    """Base of losses linear in one value per row of logits: `value` computes it, `batch.head` holds it.

    With an `LMHeadInput`, rows are projected in chunks and gradients computed in forward; `teacher_logits` may then be an
    `LMHeadInput`, too.
    """

    in_place: bool = False  # the gradient of `value` may overwrite the logits (`shard.consume_logits`)

    @property
    def measured(self) -> tuple[str, ...]:
        """Return the names of what `value` measures in addition."""
        return ()

    @abstractmethod
    def value(self, rows: LogitRows) -> Tensor:
        """Compute [n] values of rows, differentiable in the logits, 0 with gradient 0 at masked rows.

        If the loss measures, return [n, 1 + M]: the value, then M measures without gradient.
        """

    def check_rows(self, logits: Tensor, data: Mapping[str, Tensor], tensor_group: ProcessGroup | None) -> None:
        """Raise ValueError for fields that do not fit the logits' vocabulary, such as a teacher's."""

    @property
    def reader(self) -> RowReader:
        return RowReader(self)


@dataclass(frozen=True, eq=False)
class RowReader(Reader):
    loss: RowLoss

    def check(self, logits: Tensor, data: Mapping[str, Tensor], tensor_group: ProcessGroup | None) -> None:
        check_vocabulary(self.loss, logits, data, tensor_group)
        self.loss.check_rows(logits, data, tensor_group)

    def read(self, local: LocalBatch, logits: Tensor, tensor_group: ProcessGroup | None) -> TokenBatch:
        shard = self.loss.options.for_batch(local).shard(logits.shape[-1], tensor_group)
        teacher = local.unmasked(TEACHER) if TEACHER in self.loss.requirements.names else None
        return TokenBatch(
            local, ModelOutput(head=self.loss.value(LogitRows(logits.flatten(0, -2), shard, local, teacher=teacher)))
        )

    def read_head(
        self, local: LocalBatch, head: LMHeadInput, tensor_group: ProcessGroup | None
    ) -> tuple[TokenBatch, Tensor | None]:
        in_place = self.loss.in_place and head.softcap is None
        whole = compiles(head.logits_like(tensor_group), self.loss.options.backend)  # worthwhile over all chunks
        shard = self.loss.options.for_batch(local).shard(len(head.weight), tensor_group)
        scale = shard.logit_scale * head.logit_scale
        shard = replace(shard, consume_logits=in_place, backend="compiled" if whole else "eager", logit_scale=scale)

        def value(z: Tensor, places: Tensor, teacher: Tensor | None) -> Tensor:
            return self.loss.value(LogitRows(z, shard.at(places), local, places, teacher))

        def batch_of(values: Tensor) -> TokenBatch:
            return TokenBatch(local, ModelOutput(head=values))

        columns = 1 + len(self.loss.measured) if self.loss.measured else None
        slope: Tensor | None = None
        if head.needs_gradient:  # the loss is linear in the values, so its slope is known before them
            shape = local.mask.shape if columns is None else (*local.mask.shape, columns)
            unknown = torch.zeros(shape, dtype=math_dtype(head.hidden.dtype), device=head.device, requires_grad=True)
            (slope,) = torch.autograd.grad(self.loss.compute(batch_of(unknown))[0], unknown)
            slope = slope if columns is None else slope[:, 0]
        teacher: LMHeadInput | Tensor | None = None
        if TEACHER in self.loss.requirements.names:
            teacher = local.heads.get(TEACHER, local.unmasked(TEACHER))
        values, carrier = row_values(head, local.mask, shard, value, teacher, slope, in_place, columns)
        return batch_of(values), carrier

    def check_heads(
        self, head: LMHeadInput | None, heads: Mapping[str, LMHeadInput], tensor_group: ProcessGroup | None
    ) -> None:
        teacher = heads.get(TEACHER)
        super().check_heads(head, {name: field for name, field in heads.items() if name != TEACHER}, tensor_group)
        if head is None:
            if teacher is not None:
                raise ValueError(
                    f"{TEACHER} is an LMHeadInput and the student gives logits; give both as logits, or both as an LMHeadInput"
                )
            return
        shard = self.loss.options.shard(len(head.weight), tensor_group)
        if head.mode == "resident":
            raise ValueError(
                f"mode = 'resident' is not valid for {type(self.loss).__name__}, which keeps no logits; 'auto' computes "
                "gradients in forward"
            )
        if teacher is not None:
            check_teacher_head(teacher, head, partial(self.loss.options.shard, group=tensor_group), shard)
        chunk_size(head, shard, teacher, self.loss.in_place and head.softcap is None)
