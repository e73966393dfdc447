"""Losses on a scalar head's output, one number per position: their base, and the value loss."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from parallel_rl.config.strict import positive
from parallel_rl.counts import Aggregation, check_aggregation, unit_of
from parallel_rl.groups import group_size
from parallel_rl.layout import CPLayout, SequenceLayout
from parallel_rl.losses.core.aggregation import aggregate, with_units
from parallel_rl.losses.core.base import LossFn
from parallel_rl.losses.core.batch import ModelOutput, TokenBatch
from parallel_rl.losses.core.loss import ConfigT, Reader
from parallel_rl.losses.core.measures import count_true, token_means, token_ranges
from parallel_rl.losses.core.requirements import Field, Requirements
from parallel_rl.losses.registry import register_loss
from parallel_rl.metrics import Metric, Metrics
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


def squared_error(values: Tensor, returns: Tensor) -> Tensor:
    """Compute (V − R)², all of one shape.

    >>> squared_error(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 4.0]))
    tensor([0., 4.])
    """
    return (values - returns).square()


def clipped_squared_error(values: Tensor, returns: Tensor, old_values: Tensor, cliprange: float) -> Tensor:
    """Compute max((V − R)², (V_old + clamp(V − V_old, −c, c) − R)²), pessimistic like PPO; one shape.

    Papers: arXiv 1506.02438 (the trust region), 1707.06347, 2005.12729.

    >>> clipped_squared_error(torch.tensor([2.0]), torch.tensor([3.0]), old_values=torch.tensor([1.0]), cliprange=0.5)
    tensor([2.2500])
    """
    plain, moved = values - returns, values - old_values
    # V_old − R first: at V = 300 a float32 sum with V_old is off by more than 1e-5
    clipped = old_values - returns + moved.clamp(-cliprange, cliprange)
    clipped = torch.where(moved.abs() <= cliprange, plain, clipped)
    return torch.maximum(plain.square(), clipped.square())


@dataclass(frozen=True)
class ValueLossConfig:
    """Options of `ValueLossFn`.

    scale: factor of the loss, in addition to ½. cliprange: c, V is clipped to within c of `values`; None is off.
    aggregation: how tokens are averaged. max_length: divisor of "constant-length".
    head_position: "predictor": column t of the data belongs to the head's output at t − 1, the state before token t. "token"
        (NeMo-RL): to the output at t, so a valid column 0 enters every sum, although N_tok does not count it.
    """

    scale: float = 1.0
    cliprange: float | None = None
    aggregation: Aggregation = "token-mean"
    max_length: int | None = None
    head_position: Literal["predictor", "token"] = "predictor"

    def __post_init__(self) -> None:
        positive(self, "scale")
        if self.cliprange is not None and not self.cliprange > 0:
            raise ValueError(f"cliprange = {self.cliprange} must be positive; None is off")
        check_aggregation(self.aggregation, self.max_length)


@register_loss("value")
class ValueLossFn(ScalarHeadLoss[ValueLossConfig]):
    """Squared error of a value head, clipped or not; the local loss.

        L = ½·scale·AGG(x),    x = (V − R)², with clipping max((V − R)², (V_old + clamp(V − V_old, −c, c) − R)²)

    In place of logits it takes the head's output [B, S/cp, 1], packed [1, T/cp, 1], equal on tensor ranks. `data` holds
    returns [B, S] and, with clipping, values [B, S] (V_old, of the same head before the step), float, token-aligned:
    `values[:, t]` is the head's output at t − 1, see `head_position`.

    Metrics: loss; means over all valid tokens: vf_clipfrac (the clipped error is larger), returns_mean, values_mean,
    returns_sq_mean, residual_sq_mean; explained variance = 1 − (residual_sq_mean − (returns_mean − values_mean)²) /
    (returns_sq_mean − returns_mean²); values_min, values_max, num_valid_samples. Call and errors: see `LossFn`.
    Papers: arXiv 1506.02438, 1707.06347.

    >>> import torch
    >>> from parallel_rl import ValueLossFn, count_valid
    >>> data = {"input_ids": torch.tensor([[0, 1, 2]]), "token_mask": torch.ones(1, 3), "sample_mask": torch.ones(1)}
    >>> data["returns"] = torch.ones(1, 3)
    >>> loss, _ = ValueLossFn()(torch.zeros(1, 3, 1), data, *count_valid(data))
    >>> round(loss.item(), 4)
    0.5
    """

    config_class = ValueLossConfig

    @cached_property
    def requirements(self) -> Requirements:
        names = ("returns",) if self.config.cliprange is None else ("returns", "values")
        shift = self.config.head_position == "predictor"
        needs = Requirements(tuple(Field(name) for name in names), reads="scalar", shift=shift)
        return with_units(needs, self.config.aggregation)

    def compute(self, batch: TokenBatch) -> tuple[Tensor, Metrics]:
        cfg, values, returns = self.config, batch.head, batch["returns"]
        plain = error = squared_error(values, returns)
        if cfg.cliprange is not None:
            error = clipped_squared_error(values, returns, batch["values"], cfg.cliprange)
        loss = 0.5 * cfg.scale * aggregate(batch, error, cfg.aggregation, cfg.max_length)
        means = {
            "vf_clipfrac": error > plain,
            "returns_mean": returns,
            "values_mean": values,
            "returns_sq_mean": returns.square(),
            "residual_sq_mean": plain,
        }
        metrics = token_means(batch, means) | token_ranges(batch, {"values": values})
        metrics |= {
            "loss": Metric("share", loss, per=unit_of(cfg.aggregation)),
            "num_valid_samples": count_true(batch, batch.sequence_mask),
        }
        return loss, Metrics(metrics)
