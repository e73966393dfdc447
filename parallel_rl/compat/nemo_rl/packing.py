"""NeMo-RL's way from logits to a loss: preparing its input, and the wrappers of a packed row."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from parallel_rl.compat.dense import Count
from parallel_rl.compat.nemo_rl.base import LogProbLoss, Result, checked
from parallel_rl.compat.nemo_rl.distributions import DistillationLossFn
from parallel_rl.compat.nemo_rl.interfaces import LossFunction
from parallel_rl.compat.nemo_rl.reading import Data, ShardedOutput
from parallel_rl.groups import group_size
from parallel_rl.losses.core.one_row import PackedSequences

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

LossInput = tuple[dict[str, "Tensor | None"], Data]
Prepare = Callable[..., LossInput]

_LEAST, _MOST = ("probs_ratio_min", "probs_ratio_clamped_min"), ("probs_ratio_max", "probs_ratio_clamped_max")


class SequencePackingLossWrapper:
    """Loss on packed logits [1, T/cp, V/tp] and unpacked data [B, S], in the documented or present form.

    Documented: `SequencePackingLossWrapper(loss_fn, cu_seqlens_q, cu_seqlens_q_padded)`, groups in the call. The whole row's
    log-probs are read at once, with the numbers of one call per sequence: divisors of the call's rows become each sequence's
    (Q4). Pairs stay together (Q9: the origin separates them).

    Present: with prepare_fn, groups in the constructor. The loss is called per sequence on prepare_fn's result; losses and
    metrics add up, but for extrema of ratios (Q8: those of values add up too). The caller's own losses are called so too,
    without prepare_fn by the documented call.
    """

    def __init__(
        self,
        loss_fn: LossFunction | Callable[..., Result],
        cu_seqlens_q: Tensor,
        cu_seqlens_q_padded: Tensor | None = None,
        *,
        prepare_fn: Prepare | None = None,
        vocab_parallel_rank: int | None = None,
        vocab_parallel_group: ProcessGroup | None = None,
        context_parallel_group: ProcessGroup | None = None,
    ) -> None:
        self.loss_fn, self.prepare_fn = loss_fn, prepare_fn
        self.cu_seqlens_q, self.cu_seqlens_q_padded = cu_seqlens_q, cu_seqlens_q_padded
        self.groups = vocab_parallel_rank, vocab_parallel_group, context_parallel_group

    def __call__(
        self,
        next_token_logits: Tensor,
        data: Data,
        global_valid_seqs: Count | None,
        global_valid_toks: Count | None,
        vocab_parallel_rank: int | None = None,
        vocab_parallel_group: ProcessGroup | None = None,
        context_parallel_group: ProcessGroup | None = None,
    ) -> Result:
        """Return the loss and its metrics; ValueError for bounds that do not fit."""
        given = vocab_parallel_rank, vocab_parallel_group, context_parallel_group
        groups = self.groups if given == (None, None, None) else given
        counts = global_valid_seqs, global_valid_toks
        if self.prepare_fn is not None or not isinstance(self.loss_fn, LossFunction):
            return self._by_sequence(next_token_logits, data, counts, groups)
        packed = PackedSequences(self.cu_seqlens_q, self.cu_seqlens_q_padded)
        output = ShardedOutput.of(next_token_logits, *groups, packed)
        data = _within(checked(data), self.cu_seqlens_q)
        if isinstance(self.loss_fn, DistillationLossFn):
            return self.loss_fn.from_topk(self.loss_fn.read(output, data, masked=True), data, global_valid_toks)
        if not isinstance(self.loss_fn, LogProbLoss):
            raise ValueError(f"{type(self.loss_fn).__name__} reads no log-probs; a packed row of it needs a prepare_fn")
        logprobs = output.next_token_logprobs(data, self.loss_fn.rows(data))
        return self.loss_fn.from_logprobs(logprobs, data, *counts, by_row=True)

    def _by_sequence(
        self, logits: Tensor, data: Data, counts: tuple[Count | None, Count | None], groups: tuple
    ) -> Result:
        lengths, cp = self.cu_seqlens_q.diff().tolist(), group_size(groups[2])
        padded = self.cu_seqlens_q if self.cu_seqlens_q_padded is None else self.cu_seqlens_q_padded
        bounds = (padded // cp).tolist()
        total: Tensor | float = 0.0
        metrics: dict[str, float | Tensor] = {}
        for row, length in enumerate(lengths):
            one = {key: x[row : row + 1] for key, x in data.items()}
            own: Data = {key: x[:, :length] if _has_tokens(x) else x for key, x in one.items()}
            loss, found = self._one(logits[:, bounds[row] : bounds[row + 1]], own, counts, groups)
            total = total + loss
            for key, value in found.items():
                metrics[key] = _joined(key, metrics.get(key), float(value))
        assert isinstance(total, Tensor)
        return total, metrics

    def _one(self, logits: Tensor, data: Data, counts: tuple[Count | None, Count | None], groups: tuple) -> Result:
        if self.prepare_fn is None:
            assert callable(self.loss_fn)
            return self.loss_fn(logits, data, *counts, **_by_name(groups))
        inputs, data = _prepared(self.prepare_fn, logits, data, self.loss_fn, groups)
        return _called(self.loss_fn, data, counts, inputs)


class SequencePackingFusionLossWrapper:
    """Loss on a packed row, called once on what prepare_fn (`prepare_packed_loss_input`) makes of it."""

    def __init__(
        self,
        loss_fn: LossFunction,
        prepare_fn: Prepare,
        cu_seqlens_q: Tensor,
        cu_seqlens_q_padded: Tensor | None = None,
        vocab_parallel_rank: int | None = None,
        vocab_parallel_group: ProcessGroup | None = None,
        context_parallel_group: ProcessGroup | None = None,
    ) -> None:
        self.loss_fn, self.prepare_fn, self.cu_seqlens_q = loss_fn, prepare_fn, cu_seqlens_q
        self.cu_seqlens_q_padded = cu_seqlens_q if cu_seqlens_q_padded is None else cu_seqlens_q_padded
        self.groups = vocab_parallel_rank, vocab_parallel_group, context_parallel_group

    def __call__(
        self, next_token_logits: Tensor, data: Data, global_valid_seqs: Count | None, global_valid_toks: Count | None
    ) -> Result:
        bounds = {"cu_seqlens_q": self.cu_seqlens_q, "cu_seqlens_q_padded": self.cu_seqlens_q_padded}
        inputs, data = _prepared(self.prepare_fn, next_token_logits, data, self.loss_fn, self.groups, bounds)
        return _called(self.loss_fn, data, (global_valid_seqs, global_valid_toks), inputs)


def wrap_loss_fn_with_input_preparation(
    next_token_logits: Tensor,
    data: Data,
    global_valid_seqs: Count | None,
    global_valid_toks: Count | None,
    loss_fn: LossFunction,
    prepare_fn: Prepare,
    vocab_parallel_rank: int | None = None,
    vocab_parallel_group: ProcessGroup | None = None,
    context_parallel_group: ProcessGroup | None = None,
) -> Result:
    """Call a loss on what prepare_fn makes of logits [B, S/cp, V/tp]."""
    groups = vocab_parallel_rank, vocab_parallel_group, context_parallel_group
    inputs, data = _prepared(prepare_fn, next_token_logits, data, loss_fn, groups)
    return _called(loss_fn, data, (global_valid_seqs, global_valid_toks), inputs)


def _prepared(
    prepare: Prepare,
    logits: Tensor,
    data: Data,
    loss_fn: LossFunction | Callable[..., Result],
    groups: tuple,
    bounds: Mapping[str, Tensor] | None = None,
) -> LossInput:
    return prepare(logits=logits, data=data, loss_fn=loss_fn, **(bounds or {}), **_by_name(groups))


def _by_name(groups: tuple) -> dict[str, object]:
    names = ("vocab_parallel_rank", "vocab_parallel_group", "context_parallel_group")
    return dict(zip(names, groups, strict=True))


def _called(
    loss_fn: LossFunction | Callable[..., Result],
    data: Data,
    counts: tuple[Count | None, Count | None],
    inputs: Mapping[str, Tensor | None],
) -> Result:
    seqs, toks = counts
    result: Result = loss_fn(data=data, global_valid_seqs=seqs, global_valid_toks=toks, **inputs)  # type: ignore[operator]
    return result


def _has_tokens(x: Tensor) -> bool:
    return isinstance(x, Tensor) and x.dim() > 1 and x.shape[1] > 1


def _within(data: Data, bounds: Tensor) -> Data:
    """Clear token_mask beyond the sequences' true lengths, which the row does not hold."""
    lengths = bounds.diff().to(data["token_mask"].device)
    columns = torch.arange(data["token_mask"].shape[1], device=lengths.device)
    if len(lengths) != len(data["token_mask"]):
        return data  # refused where the layout is made
    return {**data, "token_mask": (data["token_mask"] != 0) & (columns < lengths[:, None])}


def _joined(key: str, before: float | Tensor | None, value: float) -> float:
    """Join a metric with that of one more sequence; an infinite extremum comes from one without a token."""
    if key in _LEAST or key in _MOST:
        join, nothing = (min, math.inf) if key in _LEAST else (max, -math.inf)
        return join(nothing if before is None else float(before), nothing if math.isinf(value) else value)
    return (0.0 if before is None else float(before)) + value
