"""The call of a loss: spelled out for users, one value internally."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch import Tensor
from torch.distributed import ProcessGroup

from parallel_rl.losses.core.one_row import PackedSequences
from parallel_rl.vocab.linear.lm_head import LMHeadInput, split_fields

if TYPE_CHECKING:
    from parallel_rl.losses.core.batch import TokenBatch
    from parallel_rl.losses.core.log_prob_rows import Values
    from parallel_rl.losses.core.requirements import Requirements
    from parallel_rl.metrics import Metrics
    from parallel_rl.prefix_tree import PrefixTree
    from parallel_rl.statistics import Statistics


@dataclass(frozen=True, eq=False)
class HostLogProbs:
    """A host's log-probs in place of logits, with data in the same form; see `LossFn.from_logprobs`."""

    values: Values
    data: Mapping[str, Values]
    cu_seqlens: Tensor | None = None
    entropy: Values | None = None


@dataclass(frozen=True, eq=False)
class LossCall:
    """Arguments of one call; see `LossFunction.__call__`.

    Attributes:
        data: empty with a host's log-probs, which hold their own.
        observe: called with the batch, the local loss and the metrics.
        cut_length: S, if `torch.chunk` split the sequence of a DTensor over context ranks.
        may_wait: the host may wait for the device in the loss's first micro-batches, see `RecordedCheck`.
    """

    output: Tensor | LMHeadInput | HostLogProbs
    data: Mapping[str, Tensor]
    global_valid_seqs: Tensor
    global_valid_toks: Tensor
    tensor_rank: int | None = None
    tensor_group: ProcessGroup | None = None
    context_group: ProcessGroup | None = None
    statistics: Statistics | None = None
    packed_sequences: PackedSequences | None = None
    tree: PrefixTree | None = None
    heads: Mapping[str, LMHeadInput] = field(default_factory=dict)
    observe: Callable[[TokenBatch, Tensor, Metrics], None] | None = None
    cut_length: int | None = None
    may_wait: bool = False

    @classmethod
    def of(
        cls,
        output: Tensor | LMHeadInput,
        data: Mapping[str, Tensor | LMHeadInput],
        counts: tuple[Tensor, Tensor],
        tensor_rank: int | None,
        groups: tuple[ProcessGroup | None, ProcessGroup | None],
        statistics: Statistics | None = None,
    ) -> LossCall:
        for name, group in zip(("vocab_parallel_group", "context_parallel_group"), groups, strict=True):
            if group is not None and not isinstance(group, ProcessGroup):
                raise ValueError(f"{name} must be a ProcessGroup or None, got {group!r}")
        if not isinstance(output, (Tensor, LMHeadInput)):
            raise ValueError(f"next_token_logits must be a tensor or an LMHeadInput, got {type(output).__name__}")
        if not isinstance(data, Mapping):
            raise ValueError(f"data must be a mapping from names to tensors, got {type(data).__name__}")
        tensors, heads = split_fields(data, groups[0])
        return cls(output, tensors, *counts, tensor_rank, *groups, statistics, heads=heads)


class LossFunction(ABC):
    """Base of everything with the call of a loss: `LossFn`, `SequencePackingLossWrapper`."""

    @property
    def needs_statistics(self) -> bool:
        """Return whether the call takes `statistics=`, from `count` and, if `needs_collect`, from `collect`."""
        return self.requirements.statistics

    @property
    def needs_collect(self) -> bool:
        """Return whether `statistics=` needs a forward; otherwise `count` gives all of it."""
        return self.requirements.collected

    @property
    @abstractmethod
    def requirements(self) -> Requirements:
        """Return the requirements on the caller."""

    def check_inputs(self, data: Mapping[str, Tensor], *, values: bool = True) -> None:  # noqa: B027
        """Refuse whole data whose fields, or `values`, the call would refuse; local, before any output."""

    @abstractmethod
    def run(self, call: LossCall) -> tuple[Tensor, Metrics]:
        """Compute this rank's local loss and its metrics."""

    @abstractmethod
    def count(
        self,
        batches: Mapping[str, Tensor] | Sequence[Mapping[str, Tensor]],
        data_parallel_group: ProcessGroup | None = None,
    ) -> Statistics:
        """Count the step's statistics from the data alone, reduced: no forward, at most four collectives.

        >>> import torch
        >>> from parallel_rl import MixLossFn
        >>> data = {"input_ids": torch.tensor([[0, 1, 2], [0, 3, 1]]), "token_mask": torch.ones(2, 3)}
        >>> data |= {"sample_mask": torch.ones(2), "advantages": torch.ones(2, 3), "prev_logprobs": torch.full((2, 3), -1.5)}
        >>> data["expert_mask"] = torch.tensor([False, True])
        >>> MixLossFn().count([data])["expert_tokens"].item()
        2.0

        Args:
            batches: every micro-batch that this rank trains on in the step (or the only one), whole tensors as in the call,
                packed or not. A rank without a micro-batch passes an empty list.
            data_parallel_group: without context parallelism; None is a group of one.

        Returns:
            the value for `statistics=`; empty, without a collective, if the loss counts nothing.

        Raises:
            ValueError: data that the call would refuse, on all ranks of the group, see `set_validation`.
        """

    @abstractmethod
    def run_collect(self, call: LossCall) -> Statistics:
        """Compute this rank's part of the statistics of the step; errors as of `collect`."""

    def __call__(
        self,
        next_token_logits: Tensor | LMHeadInput,
        data: Mapping[str, Tensor | LMHeadInput],
        global_valid_seqs: Tensor,
        global_valid_toks: Tensor,
        vocab_parallel_rank: int | None = None,
        vocab_parallel_group: ProcessGroup | None = None,
        context_parallel_group: ProcessGroup | None = None,
        *,
        statistics: Statistics | None = None,
    ) -> tuple[Tensor, Metrics]:
        """Compute this rank's local loss and its metrics.

        Args:
            next_token_logits: [B, S/cp, V/tp]; packed (through `SequencePackingLossWrapper`) [1, T/cp, V/tp]. Or a DTensor
                [B, S, V], Shard(-1) over the tensor group and Shard(1) over the context group (`cp_layout="contiguous"`),
                with even or uneven shards. Or an `LMHeadInput`: hidden states and the LM head's weight, without whole logits.
            data: whole, token-aligned tensors: input_ids [B, S], token_mask [B, S], sample_mask [B], and the loss's fields. A
                field in the order of the logits (`teacher_logits`) may be an `LMHeadInput`. Pre-shifted labels are
                `shift_labels` [B, S] in place of input_ids, −100 where nothing is scored (masks are then optional); column t
                of every field then belongs to the token that position t predicts.
            global_valid_seqs, global_valid_toks: of the whole step, see `count_valid`.
            vocab_parallel_rank: this rank's place in `vocab_parallel_group`, checked against it.
            vocab_parallel_group, context_parallel_group: None is a group of one.
            statistics: of the whole step, for a loss that `needs_statistics`, see `Statistics`.

        Raises:
            ValueError: invalid input, on all ranks of both groups, see `set_validation`.
        """
        return self.run(
            LossCall.of(
                next_token_logits, data, (global_valid_seqs, global_valid_toks),
                vocab_parallel_rank, (vocab_parallel_group, context_parallel_group), statistics,
            )
        )  # fmt: skip

    def collect(
        self,
        next_token_logits: Tensor | LMHeadInput,
        data: Mapping[str, Tensor | LMHeadInput],
        global_valid_seqs: Tensor,
        global_valid_toks: Tensor,
        vocab_parallel_rank: int | None = None,
        vocab_parallel_group: ProcessGroup | None = None,
        context_parallel_group: ProcessGroup | None = None,
    ) -> Statistics:
        """Collect this rank's statistics of the model's output; `+` joins micro-batches.

        Raises:
            ValueError: a loss that collects nothing; invalid input, on all ranks of both groups.
        """
        return self.run_collect(
            LossCall.of(
                next_token_logits, data, (global_valid_seqs, global_valid_toks),
                vocab_parallel_rank, (vocab_parallel_group, context_parallel_group),
            )
        )  # fmt: skip


class LossWrapper(LossFunction):
    """Base of wrappers around a loss; everything not overridden is delegated to `loss_fn`."""

    loss_fn: LossFunction

    @property
    def requirements(self) -> Requirements:
        return self.loss_fn.requirements

    def check_inputs(self, data: Mapping[str, Tensor], *, values: bool = True) -> None:
        self.loss_fn.check_inputs(data, values=values)

    def run(self, call: LossCall) -> tuple[Tensor, Metrics]:
        return self.loss_fn.run(call)

    def count(
        self,
        batches: Mapping[str, Tensor] | Sequence[Mapping[str, Tensor]],
        data_parallel_group: ProcessGroup | None = None,
    ) -> Statistics:
        return self.loss_fn.count(batches, data_parallel_group)

    def run_collect(self, call: LossCall) -> Statistics:
        return self.loss_fn.run_collect(call)


def share_of(loss: Tensor, carrier: Tensor | None) -> Tensor:
    """Add an exact 0 that carries a gradient, if there is one; a NaN loss gets a non-finite gradient.

    Otherwise a clamp or mask could turn the NaN's gradient into 0 before the norm is checked.

    >>> import torch
    >>> x = torch.tensor([torch.nan, 1.0], requires_grad=True)
    >>> share_of(x.clamp(max=2.0).sum(), None).backward()
    >>> x.grad
    tensor([0., inf])
    """
    total = loss if carrier is None else loss + carrier
    value = total.detach()
    return total / (value == value)  # by 1, to the bit, or by 0
