"""Losses on logits in both LightRFT and OpenRLHF: next token, distillation, process reward."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from parallel_rl.compat.dense import Count, as_count, token_mean
from parallel_rl.functional.distillation import FiniteCrossEntropy
from parallel_rl.functional.preference import cross_entropy
from parallel_rl.groups import group_rank, group_size
from parallel_rl.layout import CPLayout, SequenceLayout, valid_tokens
from parallel_rl.losses.nll import NLLLoss
from parallel_rl.statistics import Statistics
from parallel_rl.validation import checks_values
from parallel_rl.vocab.backends.torch_backend import math_dtype
from parallel_rl.vocab.divergence import divergence_of_shards
from parallel_rl.vocab.shards import VocabShard
from parallel_rl.vocab.stats import IGNORE_INDEX, token_stats
from parallel_rl.vocab.topk import gather_columns, top_columns

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def next_token_loss(
    logits: Tensor,
    labels: Tensor,
    toks: Count | None = None,
    tensor_group: ProcessGroup | None = None,
    context_group: ProcessGroup | None = None,
    cp_layout: CPLayout = "zigzag",
) -> Tensor:
    """Compute this rank's part of the mean cross-entropy of next labels that are not −100; 0 without any.

    logits: [..., S/cp, V/tp]. labels: [..., S/cp], split alike. toks: valid labels of the step; None: of this call.
    """
    if not labels.numel():
        return _nothing(logits)
    logits, labels = logits.reshape(-1, *logits.shape[-2:]), labels.reshape(-1, labels.shape[-1])
    cp, rank = group_size(context_group), group_rank(context_group)
    width = labels.shape[1] * cp
    layout = SequenceLayout.padded(
        len(labels), width, cp_size=cp, cp_rank=rank, cp_layout=cp_layout, device=labels.device
    )
    # Gathered, because the last logits of a chunk predict another rank's label.
    labels = layout.unshard(labels.flatten(), context_group, shift=False)
    mask = labels != IGNORE_INDEX
    data = {"input_ids": torch.where(mask, labels, 0), "token_mask": mask, "sample_mask": mask.new_ones(len(mask))}
    count = valid_tokens(data).sum().clamp(min=1) if toks is None else as_count(toks, labels.device)
    loss, _ = NLLLoss(cp_layout=cp_layout)(
        logits, data, torch.ones_like(count), count, None, tensor_group, context_group
    )
    return loss


def _nothing(logits: Tensor) -> Tensor:
    return logits.sum(dtype=math_dtype(logits.dtype))


class GPTLMLoss(nn.Module):
    """Next-token cross-entropy, a mean over labels that are not −100; without any, 0 (the origin: NaN)."""

    def __init__(self) -> None:
        super().__init__()
        self.IGNORE_INDEX = IGNORE_INDEX

    def forward(
        self,
        logits: Tensor,
        labels: Tensor,
        *,
        global_valid_toks: Count | None = None,
        vocab_parallel_group: ProcessGroup | None = None,
        context_parallel_group: ProcessGroup | None = None,
        cp_layout: CPLayout = "zigzag",
    ) -> Tensor:
        """Return the loss; with `global_valid_toks` (`count_valid` of the labels' mask) the local loss.

        logits: [..., S/cp, V/tp]. labels: [..., S/cp] token ids aligned with the logits; −100 is ignored.
        """
        return next_token_loss(
            logits, labels, global_valid_toks, vocab_parallel_group, context_parallel_group, cp_layout
        )


class KDLoss(nn.Module):
    """Cross-entropy of the student under the teacher, −Σ_v p·log q, a mean over labels that are not −100.

    An entry that the student excludes (logit −inf) is dropped with its teacher mass. Nothing is shifted: the label at t
    selects the logits at t. The origin's trainer passes the tokens' own labels, so the first response token is not learned
    (Q20: the library's `FullDistillationLossFn` shifts). Without a label the loss is 0 (the origin: NaN).
    """

    def __init__(self) -> None:
        super().__init__()
        self.IGNORE_INDEX = IGNORE_INDEX

    def forward(
        self,
        logits: Tensor,
        teacher_logits: Tensor,
        label: Tensor,
        *,
        global_valid_toks: Count | None = None,
        vocab_parallel_group: ProcessGroup | None = None,
        context_parallel_group: ProcessGroup | None = None,
    ) -> Tensor:
        """Return the loss; with `global_valid_toks` (labels of the step that are not −100) the local loss.

        logits, teacher_logits: [..., S/cp, V/tp]; the teacher is a constant. label: [..., S/cp].
        """
        if not label.numel():
            return _nothing(logits)
        mask = (label != IGNORE_INDEX).flatten()
        divergence = divergence_of_shards(
            logits.flatten(0, -2),
            teacher_logits.detach().flatten(0, -2),
            mask,
            FiniteCrossEntropy(),
            VocabShard.of(logits.shape[-1], vocab_parallel_group),
        )
        return token_mean(divergence, mask, global_valid_toks, context_parallel_group)


class PRMLoss(nn.Module):
    """Cross-entropy of step rewards, from the logits at (not before) each `placeholder_token_id`.

    Float labels are probabilities of the first of two `reward_token_ids`. Integer labels are token ids, among
    `reward_token_ids` if given (the softmax is then restricted to them); −100 is ignored.

    The origin's faults are kept (Q23; the library's `PRMLossFn` has none). A soft label of −100 becomes the target (−100, 101).
    A reward id below the number of ids can be mapped twice. Accuracy counts an ignored place as wrong. Without a placeholder
    loss and accuracy are 0 (the origin: NaN).
    """

    def __init__(self, placeholder_token_id: int, reward_token_ids: list[int] | None = None) -> None:
        super().__init__()
        self.IGNORE_INDEX = IGNORE_INDEX
        self.placeholder_token_id, self.reward_token_ids = placeholder_token_id, reward_token_ids

    def forward(
        self,
        inputs: Tensor,
        logits: Tensor,
        labels: Tensor,
        *,
        return_acc: bool = False,
        vocab_parallel_group: ProcessGroup | None = None,
        context_parallel_group: ProcessGroup | None = None,
        statistics: Statistics | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Return the loss, or (loss, accuracy); with `statistics` (`collect`'s, reduced) this rank's parts.

        inputs, labels: [B, S/cp]. logits: [B, S/cp, V/tp]. ValueError for soft labels without two reward tokens, or a label
        outside the classes (if values are checked).
        """
        places, scored = self._places(inputs, labels)
        counts: dict[str, Tensor] = (
            {} if statistics is None else {key: statistics[key].clamp(min=1) for key in statistics}
        )
        nll, correct = self._classified(logits, labels, places, scored, vocab_parallel_group)
        loss = token_mean(nll, scored, counts.get("scored"), context_parallel_group)
        if not return_acc:
            return loss
        return loss, token_mean(correct.float(), places, counts.get("placeholders"), context_parallel_group)

    @torch.no_grad()
    def collect(self, inputs: Tensor, labels: Tensor) -> Statistics:
        """Count this rank's part of the step; `+` joins micro-batches, then `reduce` over context and data."""
        places, scored = self._places(inputs, labels)
        return Statistics({"placeholders": places.sum(), "scored": scored.sum()})

    def _places(self, inputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Return [T] bool each: placeholders, and those with a label."""
        places = (inputs == self.placeholder_token_id).flatten()
        return places, places if labels.is_floating_point() else places & (labels.flatten() != IGNORE_INDEX)

    def _classified(
        self, logits: Tensor, labels: Tensor, places: Tensor, scored: Tensor, group: ProcessGroup | None
    ) -> tuple[Tensor, Tensor]:
        """Compute [T] cross-entropy, and whether the largest logit is the label's."""
        if not labels.numel():
            return _nothing(logits).expand(0), scored
        logits, labels, shard = logits.flatten(0, -2), labels.flatten(), VocabShard.of(logits.shape[-1], group)
        ids = self.reward_token_ids or []
        if labels.is_floating_point() and len(ids) != 2:
            raise ValueError(
                f"soft labels need two reward_token_ids, the positive one first; got {self.reward_token_ids}"
            )
        if not ids:
            stats = token_stats(logits, torch.where(scored, labels, IGNORE_INDEX), group=group, entropy=False)
            return -stats.logprobs, top_columns(logits.detach(), 1, shard)[1][:, 0] == labels
        columns = torch.stack([torch.full_like(labels, token, dtype=torch.int64) for token in ids], 1)
        scores = gather_columns(logits, columns, places, shard)
        target = torch.where(scored[:, None], self._target(labels, scores.dtype), 0)
        if checks_values(labels) and bool((scored & ~target.any(1)).any()):
            wrong = labels[scored & ~target.any(1)].unique().tolist()
            raise ValueError(f"labels {wrong} at placeholders are neither reward tokens {ids} nor {IGNORE_INDEX}")
        return cross_entropy(scores, target), (scores.argmax(1) == target.argmax(1)) & scored

    def _target(self, labels: Tensor, dtype: torch.dtype) -> Tensor:
        if labels.is_floating_point():
            return torch.stack([labels.to(dtype), 1 - labels.to(dtype)], 1)
        ids = self.reward_token_ids or []
        for index, token in enumerate(ids):
            labels = torch.where(labels == token, index, labels)
        return (labels[:, None] == torch.arange(len(ids), device=labels.device)).to(dtype)
