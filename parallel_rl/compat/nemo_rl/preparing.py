"""NeMo-RL's step from a model's output to a loss's input."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import TYPE_CHECKING, Protocol, TypeVar

import torch
from torch import Tensor

from parallel_rl.compat.nemo_rl.distributions import DistillationLossFn
from parallel_rl.compat.nemo_rl.interfaces import LossFunction, LossInputType
from parallel_rl.compat.nemo_rl.reading import ShardedOutput
from parallel_rl.losses.core.one_row import PackedSequences
from parallel_rl.vocab.backends.torch_backend import math_dtype
from parallel_rl.vocab.linear.lm_head import LMHeadInput
from parallel_rl.vocab.truncation import KEEP_ALL, Truncation

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

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

    Losses on log-probs get next_token_logprobs [B, S − 1], whole on every context rank; with sampling_params those of the
    truncated policy, 0 for tokens that it drops (Q7), and if the loss has a KL the data get curr_logprobs_unfiltered.
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
