"""NeMo-RL's way from logits to a loss: preparing its input, and the wrappers of a packed row."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, MutableMapping
from typing import TYPE_CHECKING, Protocol, TypeVar

import torch
from torch import Tensor

from parallel_rl.compat.dense import Count
from parallel_rl.compat.nemo_rl.base import Data, LogProbLoss, Result, ShardedOutput, checked
from parallel_rl.compat.nemo_rl.distributions import DistillationLossFn
from parallel_rl.compat.nemo_rl.interfaces import LossFunction, LossInputType
from parallel_rl.groups import group_size
from parallel_rl.losses.core.one_row import PackedSequences
from parallel_rl.vocab.backends.torch_backend import math_dtype
from parallel_rl.vocab.linear.lm_head import LMHeadInput
from parallel_rl.vocab.shards import KEEP_ALL, Truncation

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

Prepared = tuple[dict[str, "Tensor | None"], Data]
Prepare = Callable[..., Prepared]

_LEAST, _MOST = ("probs_ratio_min", "probs_ratio_clamped_min"), ("probs_ratio_max", "probs_ratio_clamped_max")


class SequencePackingLossWrapper:
    """Loss on packed logits [1, T/cp, V/tp] and unpacked data [B, S], in the documented or present form.

    Documented: `SequencePackingLossWrapper(loss_fn, cu_seqlens_q, cu_seqlens_q_padded)`, groups in the call. The whole row's
    log-probs are read at once, with the numbers of one call per sequence: divisors of the call's rows become each sequence's
    (Q4). Pairs stay together (Q9: the origin separates them).

    Present: with prepare_fn, groups in the constructor. The loss is called per sequence on prepare_fn's result; losses and
    metrics add up, except the extrema of ratios (Q8: those of values add up too). Your own losses are called per sequence too,
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
        in_call = vocab_parallel_rank, vocab_parallel_group, context_parallel_group
        groups = self.groups if in_call == (None, None, None) else in_call
        counts = global_valid_seqs, global_valid_toks
        if self.prepare_fn is not None or not isinstance(self.loss_fn, LossFunction):
            return self._by_sequence(next_token_logits, data, counts, groups)
        packed = PackedSequences(self.cu_seqlens_q, self.cu_seqlens_q_padded)
        output = ShardedOutput.of(next_token_logits, *groups, packed)
        data = _mask_padding(checked(data), self.cu_seqlens_q)
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
            fields = {key: x[row : row + 1] for key, x in data.items()}
            sequence: Data = {key: x[:, :length] if _has_tokens(x) else x for key, x in fields.items()}
            loss, measured = self._one(logits[:, bounds[row] : bounds[row + 1]], sequence, counts, groups)
            total = total + loss
            for key, value in measured.items():
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
    """Loss on a packed row, called once on the inputs of prepare_fn (`prepare_packed_loss_input`)."""

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
) -> Prepared:
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


def _mask_padding(data: Data, bounds: Tensor) -> Data:
    """Clear token_mask beyond the sequences' true lengths, which the packed row does not hold."""
    lengths = bounds.diff().to(data["token_mask"].device)
    columns = torch.arange(data["token_mask"].shape[1], device=lengths.device)
    if len(lengths) != len(data["token_mask"]):
        return data  # the layout refuses it
    return {**data, "token_mask": (data["token_mask"] != 0) & (columns < lengths[:, None])}


def _joined(key: str, before: float | Tensor | None, value: float) -> float:
    """Join a metric with the next sequence's; a sequence without tokens has infinite extrema."""
    if key in _LEAST or key in _MOST:
        join, nothing = (min, math.inf) if key in _LEAST else (max, -math.inf)
        return join(nothing if before is None else float(before), nothing if math.isinf(value) else value)
    return (0.0 if before is None else float(before)) + value


DataT = TypeVar("DataT", bound=MutableMapping[str, Tensor])
LossInput = dict[str, "Tensor | LMHeadInput | None"]


class SamplingParams(Protocol):
    """Truncation of the sampler; top_k None or < 1 and top_p 1 keep all. Logits include the temperature."""

    top_k: int | None
    top_p: float


def prepare_loss_input(
    logits: Tensor | LMHeadInput,
    data: DataT,
    loss_fn: LossFunction,
    vocab_parallel_rank: int | None = None,
    vocab_parallel_group: ProcessGroup | None = None,
    context_parallel_group: ProcessGroup | None = None,
    sampling_params: SamplingParams | None = None,
    d2t: Tensor | None = None,
    chunk_size: int | None = None,
) -> tuple[LossInput, DataT]:
    """Return the keywords of the loss's call made from the model's output, and the data.

    Losses on log-probs get next_token_logprobs [B, S − 1], whole on every context rank. With sampling_params these are of the
    truncated policy, 0 for tokens that it drops (Q7), and the data of a loss with a KL get curr_logprobs_unfiltered.
    `DistillationLossFn` gets both top-k log-probs, other losses the logits. chunk_size has no effect.

    Raises:
        ValueError: shapes that do not match, on all ranks of both groups; a draft head, or d2t, which are not supported.
    """
    if loss_fn.input_type == LossInputType.DRAFT or d2t is not None:
        raise ValueError("a draft head's input is not prepared here: call DraftCrossEntropyLossFn with both logits")
    if loss_fn.input_type == LossInputType.LOGIT:
        return {"logits": logits}, data
    if loss_fn.input_type == LossInputType.LOGPROB and getattr(loss_fn, "use_fused_linear_logprobs", False):
        assert isinstance(logits, Tensor)  # log-probs
        return {"next_token_logprobs": logits.to(math_dtype(logits.dtype))[:, : data["input_ids"].shape[1] - 1]}, data
    output = ShardedOutput.of(logits, vocab_parallel_rank, vocab_parallel_group, context_parallel_group)
    if isinstance(loss_fn, DistillationLossFn):
        student, teacher, entropy = loss_fn.read(output, data, masked=False)
        return {"student_topk_logprobs": student, "teacher_topk_logprobs": teacher, "H_all": entropy}, data
    return _logprobs(output, data, loss_fn, sampling_params)


def prepare_packed_loss_input(
    logits: Tensor | LMHeadInput,
    data: DataT,
    loss_fn: LossFunction,
    cu_seqlens_q: Tensor,
    cu_seqlens_q_padded: Tensor | None = None,
    vocab_parallel_rank: int | None = None,
    vocab_parallel_group: ProcessGroup | None = None,
    context_parallel_group: ProcessGroup | None = None,
    sampling_params: SamplingParams | None = None,
    chunk_size: int | None = None,
) -> tuple[LossInput, DataT]:
    """Prepare a packed row [1, T/cp, V/tp] for losses on log-probs, else raise; see `prepare_loss_input`."""
    if loss_fn.input_type != LossInputType.LOGPROB:
        raise ValueError(
            f"a packed row is prepared at once for losses on log-probs; {type(loss_fn).__name__} reads "
            f"{loss_fn.input_type.value!r}: use SequencePackingLossWrapper with prepare_loss_input"
        )
    packed = PackedSequences(cu_seqlens_q, cu_seqlens_q_padded)
    output = ShardedOutput.of(logits, vocab_parallel_rank, vocab_parallel_group, context_parallel_group, packed)
    return _logprobs(output, data, loss_fn, sampling_params)


def _logprobs(
    output: ShardedOutput, data: DataT, loss_fn: LossFunction, sampling: SamplingParams | None
) -> tuple[LossInput, DataT]:
    truncation = KEEP_ALL
    if sampling is not None:
        top_k = None if sampling.top_k is None or sampling.top_k < 1 else sampling.top_k
        truncation = Truncation(top_k, None if sampling.top_p in (None, 1.0) else sampling.top_p)
    logprobs = output.next_token_logprobs(data, truncation=truncation)
    if not truncation:
        return {"next_token_logprobs": logprobs}, data
    if getattr(loss_fn, "reference_policy_kl_penalty", 0) != 0:
        data["curr_logprobs_unfiltered"] = output.next_token_logprobs(data)
    valid = (data["token_mask"][:, 1:] != 0) & (data["sample_mask"] != 0)[:, None]
    return {"next_token_logprobs": torch.where(valid & (logprobs > -torch.inf), logprobs, 0)}, data
