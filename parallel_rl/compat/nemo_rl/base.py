"""The call of NeMo-RL's losses on log-probs, documented and present, and the reading of log-probs from logits."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.functional import pad

from parallel_rl.agreement import raise_on_all_ranks, shape_facts
from parallel_rl.compat.dense import Count, Step, as_count, dense_batch
from parallel_rl.compat.nemo_rl.interfaces import LossFunction, LossInputType
from parallel_rl.groups import check_rank, group_rank, group_size
from parallel_rl.layout import SequenceLayout
from parallel_rl.losses.core.batch import TokenBatch
from parallel_rl.losses.core.one_row import PackedSequences
from parallel_rl.metrics import Metric
from parallel_rl.validation import checks_values
from parallel_rl.vocab.linear.lm_head import LMHeadInput, split_output
from parallel_rl.vocab.linear.token_stats import stats_of_head
from parallel_rl.vocab.shards import KEEP_ALL, Truncation, VocabShard
from parallel_rl.vocab.stats import IGNORE_INDEX, check_logits, check_targets
from parallel_rl.vocab.topk import column_log_probs, gather_columns
from parallel_rl.vocab.truncated_stats import truncated_stats_of_shard

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

Data = Mapping[str, Tensor]


@dataclass(frozen=True, eq=False)
class ShardedOutput:
    """Logits [B, S'/cp, V/tp] (zigzag, S' ≥ S), packed [1, T/cp, V/tp], or an `LMHeadInput`, with groups."""

    logits: Tensor | LMHeadInput
    tensor_rank: int | None = None
    tensor_group: ProcessGroup | None = None
    context_group: ProcessGroup | None = None
    packed: PackedSequences | None = None

    @classmethod
    def of(
        cls,
        logits: Tensor | LMHeadInput,
        tensor_rank: int | None = None,
        tensor_group: ProcessGroup | None = None,
        context_group: ProcessGroup | None = None,
        packed: PackedSequences | None = None,
    ) -> ShardedOutput:
        """Wrap a call's output (a DTensor: its local shard, the mesh's "tp"); ValueError for a "cp" > 1."""
        if isinstance(logits, DTensor):
            mesh = logits.device_mesh
            if "cp" in (mesh.mesh_dim_names or ()) and mesh["cp"].size() > 1:
                raise ValueError(
                    "logits over the mesh's 'cp' are not read as a DTensor; give .to_local() and the groups"
                )
            logits, tensor_group = logits.to_local(), mesh.get_group("tp")
        return cls(logits, tensor_rank, tensor_group, context_group, packed)

    def next_token_logprobs(self, data: Data, rows: Tensor | None = None, truncation: Truncation = KEEP_ALL) -> Tensor:
        """Compute [B, S − 1] log-probs of input_ids[:, 1:]; gradients of all context ranks' uses are summed.

        Args:
            rows: [B] bool; tokens of other rows or outside token_mask are 0. None: read all tokens.
            truncation: of the sampler; −inf for a token that it drops.

        Raises:
            ValueError: shapes that do not match, an id outside the vocabulary; on all ranks of both groups.
        """
        ids = data["input_ids"]
        if rows is not None:
            ids = torch.where((data["token_mask"] != 0) & rows[:, None], ids, IGNORE_INDEX)
        layout, shard, ids = self._read(ids, truncation)
        targets = layout.shard(ids, fill=IGNORE_INDEX)
        keep = targets != IGNORE_INDEX
        if isinstance(self.logits, LMHeadInput):
            stats, _ = stats_of_head(self.logits, targets, keep, shard)
        else:
            stats = truncated_stats_of_shard(self.logits.flatten(0, -2), targets, keep, shard)
        return layout.unshard(stats.logprobs, self.context_group)[:, 1 : data["input_ids"].shape[1]]

    def topk_logprobs(self, data: Data, valid: Tensor | None, *, whole: bool) -> tuple[Tensor, Tensor | None]:
        """Compute student log-probs [B, S − 1, K] of teacher_topk_indices, if `whole` also entropy [B, S − 1].

        They are normalised over the vocabulary if `whole`, else inside the K. Only tokens in `valid` [B, S] (None: all) are
        read. ValueError as in `next_token_logprobs`, and for K = 0.
        """
        if isinstance(self.logits, LMHeadInput):
            raise ValueError("distillation reads whole logits; an LMHeadInput has none")
        ids, width = data["teacher_topk_indices"], data["input_ids"].shape[1]
        if ids.shape[-1] < 1:
            raise ValueError(f"topk must be positive, got teacher_topk_indices {list(ids.shape)}")
        layout, shard, _ = self._read(data["input_ids"], KEEP_ALL)
        ids = pad(ids, (0, 0, 0, layout.shape[1] - width))
        valid = torch.ones_like(data["input_ids"], dtype=torch.bool) if valid is None else valid
        columns, here = (
            layout.shard(ids, shift=False),
            layout.shard(pad(valid, (0, layout.shape[1] - width)), fill=False),
        )
        logits, entropy = self.logits.flatten(0, -2), None
        if whole:
            logprobs, entropy = column_log_probs(logits, columns, here, shard)
            entropy = layout.unshard(entropy, self.context_group, shift=False)[:, : width - 1]
        else:
            logprobs = gather_columns(logits, columns, here, shard).log_softmax(-1)
        return layout.unshard(logprobs, self.context_group, shift=False)[:, : width - 1], entropy

    def _read(self, ids: Tensor, truncation: Truncation) -> tuple[SequenceLayout, VocabShard, Tensor]:
        """Return the logits' layout, this rank's columns, and the ids padded to the layout's width."""
        head, logits = split_output(self.logits, self.tensor_group)
        cp, rank = group_size(self.context_group), group_rank(self.context_group)

        def check() -> tuple[SequenceLayout, VocabShard, Tensor]:
            check_rank(self.tensor_rank, self.tensor_group)
            check_logits(logits, False, "auto")
            if head is not None:
                head.check(self.tensor_group, None)
            if logits.dim() != 3:
                raise ValueError(
                    f"the logits must be [B, S/cp, V/tp] or packed [1, T/cp, V/tp], got {list(logits.shape)}"
                )
            rows, width = ids.shape
            if self.packed is not None:
                layout = self.packed.layout(width, logits.shape[1] * cp, cp, rank, "zigzag", logits.device)
            else:
                width = max(width, logits.shape[1] * cp)
                layout = SequenceLayout.padded(rows, width, cp_size=cp, cp_rank=rank, device=logits.device)
            if layout.shape[0] != rows or tuple(logits.shape[:2]) != layout.local_shape:
                raise ValueError(
                    f"the logits have shape {list(logits.shape)} over cp = {cp}, the layout {list(layout.local_shape)} of "
                    f"{layout.shape[0]} sequences, input_ids {list(ids.shape)}"
                )
            shard = VocabShard.of(logits.shape[-1], self.tensor_group, truncation=truncation)
            check_targets(ids[:, 1:], shard.vocab_size)
            return layout, shard, pad(ids, (0, layout.shape[1] - ids.shape[1]), value=IGNORE_INDEX)

        groups = [self.tensor_group, self.context_group]
        return raise_on_all_ranks(check, groups, logits, shape_facts(logits, None))


Result = tuple[Tensor, dict[str, "float | Tensor"]]


class LogProbLoss(LossFunction, ABC):
    """Loss on the log-probs of the next tokens.

    The first argument is logits with groups (documented call) or [B, S − 1] log-probs from `prepare_loss_input` (present call).
    Every context rank gets the whole loss of its rows. The gradient of its logits is the sum over all context ranks' losses, so
    loss / cp has the right gradient. All but extrema add up over data ranks and micro-batches.
    """

    input_type = LossInputType.LOGPROB

    def __call__(
        self,
        next_token_logits: Tensor | LMHeadInput | None = None,
        data: Data | None = None,
        global_valid_seqs: Count | None = None,
        global_valid_toks: Count | None = None,
        vocab_parallel_rank: int | None = None,
        vocab_parallel_group: ProcessGroup | None = None,
        context_parallel_group: ProcessGroup | None = None,
        *,
        next_token_logprobs: Tensor | None = None,
    ) -> Result:
        """Return the loss, divided by counts of the whole step, and its metrics.

        Args:
            next_token_logits: [B, S/cp, V/tp], a DTensor, an `LMHeadInput`, or [B, S − 1] log-probs.
            data: whole on every context rank, see the data dict of the class.
            global_valid_seqs, global_valid_toks: of the whole step; None if the loss does not read it.

        Raises:
            ValueError: shapes that do not match, a missing field, a mask with other values than 0 and 1.
        """
        data = checked(data)
        groups = vocab_parallel_rank, vocab_parallel_group, context_parallel_group
        logprobs = self.logprobs(next_token_logits, next_token_logprobs, data, groups)
        return self.from_logprobs(logprobs, data, global_valid_seqs, global_valid_toks)

    @abstractmethod
    def from_logprobs(
        self, logprobs: Tensor, data: Data, seqs: Count | None, toks: Count | None, by_row: bool = False
    ) -> Result:
        """Return the loss and metrics of [B, S − 1]; by_row: divide per row what the origin divides per call."""

    def rows(self, data: Data) -> Tensor:
        """Return [B] bool: the rows that the loss reads."""
        return data["sample_mask"] != 0

    def logprobs(
        self,
        first: Tensor | LMHeadInput | None,
        logprobs: Tensor | None,
        data: Data,
        groups: tuple[int | None, ProcessGroup | None, ProcessGroup | None],
    ) -> Tensor:
        """Return log-probs [B, S − 1], passed or computed from logits; ValueError for both or neither."""
        if (first is None) == (logprobs is None):
            raise ValueError("give next_token_logits, or next_token_logprobs in their place, and not both")
        if logprobs is not None:
            return logprobs
        assert first is not None
        if isinstance(first, Tensor) and first.dim() == 2:
            return first
        return ShardedOutput.of(first, *groups).next_token_logprobs(data, self.rows(data))


def checked(data: Data | None) -> Data:
    """Return the data; refuse a missing mask or, if values are checked, one that is not of 0 and 1."""
    for name in ("token_mask", "sample_mask"):
        if data is None or name not in data:
            raise ValueError(f"data lacks the field {name!r}")
        mask = data[name]
        if mask.dtype != torch.bool and checks_values(mask) and bool(((mask != 0) & (mask != 1)).any()):
            raise ValueError(f"{name} must hold 0 and 1 only; weights belong in the advantages")
    assert data is not None
    return data


def shifted(data: Data, names: Mapping[str, str]) -> dict[str, Tensor]:
    """Return [B, S − 1] fields of predicted tokens, each at "token" or "predictor"; refuse missing ones."""
    for name in names:
        if name not in data:
            raise ValueError(f"data lacks the field {name!r}; this loss needs {', '.join(names)}")
    return {name: data[name][:, 1:] if at == "token" else data[name][:, :-1] for name, at in names.items()}


def batch_of(
    logprobs: Tensor,
    data: Data,
    fields: Mapping[str, Tensor] | None = None,
    counts: tuple[Count | None, Count | None] = (None, None),
    rows: Tensor | None = None,
) -> TokenBatch:
    """Build the batch that the library's losses read; counts None: not read, 0 counts as 1.

    rows: [B] bool, rows that count; None: those of sample_mask.
    """
    seqs, toks = (as_count(1 if n is None else n, logprobs.device).clamp(min=1) for n in counts)
    rows = data["sample_mask"] != 0 if rows is None else rows
    return dense_batch(logprobs, data["token_mask"][:, 1:] != 0, fields, Step(seqs, toks), rows=rows)


def floats(values: Mapping[str, Tensor | Metric]) -> dict[str, float | Tensor]:
    tensors = [x.value if isinstance(x, Metric) else x for x in values.values()]
    numbers = torch.stack([x.detach().double() for x in tensors]).tolist()
    return dict(zip(values, numbers, strict=True))
