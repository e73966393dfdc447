"""The call of a loss on log-probs, for hosts that have no logits to give."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from parallel_rl.agreement import raise_on_all_ranks
from parallel_rl.counts import ValidCounts
from parallel_rl.layout import valid_tokens
from parallel_rl.losses.core.batch import ModelOutput, TokenBatch
from parallel_rl.losses.core.call import LossFunction, share_of
from parallel_rl.losses.core.checks import check_counts, check_log_probs, check_pairs, check_statistics, known_counts
from parallel_rl.losses.core.log_prob_call import (
    LogProbCall,
    check_mask,
    check_reads,
    counted_rows,
    field_rows,
    rows_and_data,
)
from parallel_rl.losses.core.log_prob_rows import RowsBatch, Values, rows_batch
from parallel_rl.replicated import Replicated
from parallel_rl.statistics import Statistics
from parallel_rl.validation import checks_values
from parallel_rl.vocab.backends.torch_backend import math_dtype
from parallel_rl.vocab.stats import TokenStats

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from parallel_rl.losses.core.local_batch import LocalBatch
    from parallel_rl.losses.core.options import VocabOptions
    from parallel_rl.losses.core.recorded import RecordedCheck
    from parallel_rl.losses.core.requirements import Requirements
    from parallel_rl.metrics import Metrics


class LogProbLossFunction(LossFunction):
    """Base of the losses, for their call on log-probs."""

    options: VocabOptions
    recorded_check: RecordedCheck

    def from_logprobs(
        self,
        logprobs: Values,
        *,
        data: Mapping[str, Values],
        global_valid_seqs: Tensor,
        global_valid_toks: Tensor,
        context_parallel_group: ProcessGroup | None = None,
        cu_seqlens: Tensor | None = None,
        entropy: Values | None = None,
        statistics: Statistics | None = None,
    ) -> tuple[Tensor, Metrics]:
        """This rank's share of the loss and its metrics, as of the ordinary call, from the log-probs of the tokens.

        >>> import torch
        >>> from parallel_rl import NLLLoss
        >>> data = {"response_mask": torch.tensor([[1, 1, 1], [1, 0, 0]])}
        >>> logprobs = torch.tensor([[-1.0, -2.0, -3.0], [-4.0, float("nan"), 7.0]])
        >>> loss, _ = NLLLoss().from_logprobs(logprobs, data=data, global_valid_seqs=2, global_valid_toks=4)
        >>> loss.item()
        2.5

        Every field of tokens has the form of the log-probs:

            [B, S]      rows; a list of B tensors [n_i]; or flat [T], sequences one after the other, with `cu_seqlens`

        Args:
            logprobs: of the current policy, with gradient; column t is the log-prob of token t. In float32 or wider: one of
                16 bits rounds a log-prob by up to 2^-8 of it, and a gradient of ratios by as much (a warning, once).
            data: the loss's fields, and one mask. `token_mask`: rows are whole sequences, whose first token (column 0) has no
                predictor and is never read. `response_mask`: rows are responses alone, of which every token has one.
                `sample_mask` [B] may be left out: all count.
            global_valid_seqs, global_valid_toks: of the whole step, see `count_valid`; or 1, of a caller who divides.
            context_parallel_group: the ranks over which every row is cut, log-probs and fields alike, in any way that
                leaves its first token on rank 0; flat ones by the constructor's `cp_layout`. None: rows are whole. A host that
                holds them whole on every context rank gives None, and gets the whole loss on each.
            cu_seqlens: [B + 1] integers, bounds of the sequences in the flat row, over all context ranks; what is beyond the
                last one belongs to none. Bounds on the host cost no wait for the device.
            entropy: of the policy at each token, with gradient for a loss with an entropy term; without it metrics of the
                entropy are left out.
            statistics: of the whole step, for a loss that `needs_statistics`: the sum over micro-batches of
                `collect_from_logprobs`, reduced.

        Raises:
            ValueError: a loss that reads more than log-probs, or needs to know where in its sequence a cut row's token lies;
                log-probs above 0; a token_mask that counts a first token with a log-prob; shapes, dtypes, bounds or values that
                do not fit; on all ranks of the group.
        """
        return self._run_on_rows(
            LogProbCall(
                logprobs, data, global_valid_seqs, global_valid_toks, context_parallel_group, cu_seqlens, entropy, statistics
            )
        )  # fmt: skip

    @torch.no_grad()
    def collect_from_logprobs(
        self,
        logprobs: Values,
        *,
        data: Mapping[str, Values],
        global_valid_seqs: Tensor,
        global_valid_toks: Tensor,
        context_parallel_group: ProcessGroup | None = None,
        cu_seqlens: Tensor | None = None,
        entropy: Values | None = None,
    ) -> Statistics:
        """This rank's part of `statistics=`, of the data and of the log-probs: `+` joins micro-batches, `reduce` ranks.

        A loss that does not `needs_collect` reads no value of the log-probs, so that any of their shape will do.

        >>> import torch
        >>> from parallel_rl import NLLLoss
        >>> loss_fn = NLLLoss({"token_weights": "sum"})
        >>> data = {"response_mask": torch.ones(1, 2), "token_weights": torch.tensor([[0.5, 1.5]])}
        >>> call = {"data": data, "global_valid_seqs": 1, "global_valid_toks": 2}
        >>> statistics = loss_fn.collect_from_logprobs(torch.tensor([[-1.0, -2.0]]), **call).reduce()
        >>> loss_fn.from_logprobs(torch.tensor([[-1.0, -2.0]]), **call, statistics=statistics)[0].item()
        1.75

        Args: as of `from_logprobs`.

        Raises:
            ValueError: a loss that needs none; what `from_logprobs` refuses.
        """
        if not self.needs_statistics:
            raise ValueError(f"{type(self).__name__} in this configuration needs no statistics of the step")
        call = LogProbCall(
            logprobs, data, global_valid_seqs, global_valid_toks, context_parallel_group, cu_seqlens, entropy,
            Statistics({}),
        )  # fmt: skip
        local, batch = self._read_rows(call)
        counted = self._count_local(self._narrowed(replace(local, statistics=None)))
        return counted | self.collect_from(batch) if self.needs_collect else counted

    def _run_on_rows(self, call: LogProbCall) -> tuple[Tensor, Metrics]:
        batch = self._read_rows(call)[1]
        self.recorded_check(batch)
        loss, metrics = self.compute(batch)
        return share_of(loss, None), metrics

    def _read_rows(self, call: LogProbCall) -> tuple[RowsBatch, TokenBatch]:
        """Check the call; its batch before it is narrowed to the loss's tokens, and after."""
        needs = self.requirements.given(dict.fromkeys(call.names))

        def check() -> tuple[Tensor, Tensor | None, dict[str, Tensor]]:
            check_reads(type(self).__name__, needs, self.options, call)
            check_statistics(type(self).__name__, needs, call.statistics)
            rows, data = rows_and_data(call, needs, self.options)
            if needs.paired:
                check_pairs(rows.number)
            logprobs = rows.take(call.logprobs)
            if checks_values(data["token_mask"]):
                self._check_values(data, needs.on_rows())
                check_mask(call, rows, data["sample_mask"])
                check_log_probs(logprobs, valid_tokens(data, shift=False))
            check_counts(call.global_valid_seqs, call.global_valid_toks, counted_rows(call, data), shift=False)
            entropy = None if call.entropy is None else field_rows("entropy", call.entropy, rows, call)
            return logprobs, entropy, data

        numbers = known_counts(call.global_valid_seqs, call.global_valid_toks)
        alike = Replicated(numbers=numbers, advice=("give all context ranks the counts of the whole step",))
        logprobs, entropy, data = raise_on_all_ranks(check, [call.context_group], call.like, call.facts, alike=alike)
        counts = ValidCounts.of(call.global_valid_seqs, call.global_valid_toks, logprobs.device)
        statistics = None if call.statistics is None else call.statistics.to(logprobs.device)
        whole = rows_batch(data, counts, call.context_group, needs.on_rows(), statistics)
        local = self._narrowed(whole)
        flat = _masked(logprobs, local.mask)
        found = TokenStats(flat, None if entropy is None else _masked(entropy, local.mask), torch.zeros_like(flat))
        return whole, TokenBatch(local, ModelOutput(found))

    @abstractmethod
    def compute(self, batch: TokenBatch) -> tuple[Tensor, Metrics]: ...

    @abstractmethod
    def collect_from(self, batch: TokenBatch) -> Statistics: ...

    @abstractmethod
    def _narrowed(self, local: LocalBatch) -> LocalBatch: ...

    @abstractmethod
    def _count_local(self, local: LocalBatch) -> Statistics: ...

    @abstractmethod
    def _check_values(self, data: Mapping[str, Tensor], needs: Requirements) -> None: ...


def _masked(rows: Tensor, mask: Tensor) -> Tensor:
    return torch.where(mask, rows.to(math_dtype(rows.dtype)).flatten(), 0)
