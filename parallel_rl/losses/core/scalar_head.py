"""Losses on a scalar head: one number per token or per row in place of logits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from parallel_rl.groups import group_size
from parallel_rl.layout import CPLayout, SequenceLayout
from parallel_rl.losses.core.base import LossFn
from parallel_rl.losses.core.batch import ModelOutput, TokenBatch
from parallel_rl.losses.core.loss import ConfigT, Reader
from parallel_rl.losses.core.requirements import Requirements
from parallel_rl.vocab.backends.torch_backend import math_dtype
from parallel_rl.vocab.stats import check_dense

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from parallel_rl.losses.core.local_batch import LocalBatch


class ScalarHeadLoss(LossFn[ConfigT]):
    """Base of losses on a scalar head, [B, S/cp, 1] or packed [1, T/cp, 1], equal on tensor ranks.

    The constructor has no vocabulary options; the call is that of `LossFn`.
    """

    def __init__(self, config: ConfigT | Mapping | None = None, *, cp_layout: CPLayout = "zigzag") -> None:
        super().__init__(config, cp_layout=cp_layout)

    @cached_property
    def requirements(self) -> Requirements:
        return Requirements(reads="scalar")

    @property
    def reader(self) -> Reader:
        return ScalarReader(self)


class PooledHeadLoss(ScalarHeadLoss[ConfigT]):
    """Base of losses on one score per row: [B] or [B, 1], whole on every context rank, or one per token.

    Of token scores [B, S/cp, 1] or packed [1, T/cp, 1], the one at a row's last valid token is used. A pooled head needs no
    input_ids and no token_mask.
    """

    @property
    def reader(self) -> Reader:
        return PooledReader(self)


class ScalarReader(Reader):
    def check(self, logits: Tensor, data: Mapping[str, Tensor], tensor_group: ProcessGroup | None) -> None:
        if not logits.is_floating_point() or (logits.dim() == 3 and logits.shape[-1] != 1):
            raise ValueError(
                f"a scalar head's output must be floating point [B, S/cp, 1], got {logits.dtype} {list(logits.shape)}"
            )
        check_dense("a scalar head's output", logits)

    def read(self, local: LocalBatch, logits: Tensor, tensor_group: ProcessGroup | None) -> TokenBatch:
        return TokenBatch(local, ModelOutput(head=torch.where(local.mask, _flat(logits), 0)))


class PooledReader(ScalarReader):
    def add_fields(self, logits: Tensor | None, data: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        if (logits is not None and logits.dim() == 3) or "sample_mask" not in data:
            return data
        rows = data["sample_mask"].new_ones(data["sample_mask"].numel(), 1)  # no token is read
        rows = torch.ones_like(data.get("token_mask", data.get("input_ids", rows)))
        return {"input_ids": rows.to(torch.int64), "token_mask": rows, **data}

    def layout(
        self, logits: Tensor, rows: int, width: int, context_group: ProcessGroup | None
    ) -> SequenceLayout | None:
        if logits.dim() == 3:
            return None
        if tuple(logits.shape) not in ((rows,), (rows, 1)):
            raise ValueError(f"one reward a row must be [B] or [B, 1] with B = {rows}, got {list(logits.shape)}")
        return replace(SequenceLayout.padded(rows, width, device=logits.device), cp_size=group_size(context_group))

    def read(self, local: LocalBatch, logits: Tensor, tensor_group: ProcessGroup | None) -> TokenBatch:
        if logits.dim() < 3:
            return TokenBatch(local, ModelOutput(head=torch.where(local.sequence_mask, _flat(logits), 0)))
        # the last valid token of each row, at the position that holds it; may be column 0
        mask = local.data["token_mask"].bool() & local.sequence_mask[:, None]
        place = torch.arange(mask.shape[1], device=mask.device)
        last = mask & (place == torch.where(mask, place, -1).amax(1, keepdim=True))
        here = local.layout.shard(last, shift=False, fill=False)
        scores = torch.where(here, _flat(logits), 0)
        return TokenBatch(local, ModelOutput(head=local.layout.segment_sum(scores, local.context_group)))


def _flat(logits: Tensor) -> Tensor:
    return logits.reshape(-1).to(math_dtype(logits.dtype))
