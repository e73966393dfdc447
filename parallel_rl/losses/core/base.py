"""A loss that can be called: on logits, on hidden states, on a host's log-probs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from parallel_rl.losses.core import run
from parallel_rl.losses.core.call import HostLogProbs, LossCall, LossFunction
from parallel_rl.losses.core.loss import ConfigT, Loss
from parallel_rl.losses.core.readers import LogProbReader
from parallel_rl.losses.core.run import count_step
from parallel_rl.statistics import Statistics

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup

    from parallel_rl.losses.core.log_prob_rows import Values
    from parallel_rl.losses.core.loss import Reader
    from parallel_rl.metrics import Metrics


class LossFn(Loss[ConfigT], LossFunction):
    """Loss on vocab-parallel logits; a call returns the local loss.

        loss, metrics = loss_fn(next_token_logits, data, global_valid_seqs, global_valid_toks,
                                vocab_parallel_rank, vocab_parallel_group, context_parallel_group)

    The sum over context ranks, data ranks and micro-batches of the loss, its gradients and its metrics (through
    `reduce_metrics`) is the result of one process with the whole global batch. All are equal on tensor ranks.

    Args of the constructor:
        config: the loss's config dataclass, a mapping of its keys, or None for its defaults.
        vocab_size: true size V; columns beyond it are padding. None: no padding.
        vocab_start: id of this rank's first column, if the split is neither even nor `torch.chunk`'s.
        cp_layout: "zigzag" (2·cp chunks a sequence, Megatron and Transformer Engine) or "contiguous".
        temperature: the policy is softmax(logits / temperature); "per-sample" reads `data["temperature"]` [B].
        logit_scale: s, if the model's logits are s times the given ones (Cohere's logit_scale; Granite's 1 / logits_scaling).
            An `LMHeadInput` has its own.
        consume_logits: the backward writes the gradient over the logits.
        backend: of the token statistics, see `token_stats`.
        top_k, top_p: the sampler's truncation; the loss scores the policy truncated the same way. A token that the current
            policy does not keep, or whose prev_logprobs or generation_logprobs is −inf, is masked; it still counts in the
            step's denominators and in the metric dropped_tokens. Log-probs compared with an untruncated reference are
            untruncated.
        kept_sets: use the sampler's token sets `data["kept_ids"]` [B, S, K], padded with −1; excludes top_k and top_p.

    >>> import torch
    >>> from parallel_rl import LossFn, Metrics, count_valid
    >>> from parallel_rl.losses import NoConfig, Requirements
    >>> class Certainty(LossFn[NoConfig]):
    ...     config_class = NoConfig
    ...     requirements = Requirements(entropy=True, token_separable=True)
    ...     def compute(self, batch):
    ...         return batch.weighted_sum(batch.entropy, 1 / batch.counts.toks.expand(1)), Metrics({})
    >>> data = {"input_ids": torch.tensor([[0, 1, 2]]), "token_mask": torch.ones(1, 3), "sample_mask": torch.ones(1)}
    >>> loss, _ = Certainty()(torch.zeros(1, 3, 4), data, *count_valid(data))
    >>> round(loss.item(), 4)
    1.3863
    """

    @property
    def reader(self) -> Reader:
        return LogProbReader(self)

    def check_inputs(self, data: Mapping[str, Tensor], *, values: bool = True) -> None:
        run.check_inputs(self, data, values=values)

    def run(self, call: LossCall) -> tuple[Tensor, Metrics]:
        return run.run(self, call)

    @torch.no_grad()
    def run_collect(self, call: LossCall) -> Statistics:
        return run.collect(self, call)

    @torch.no_grad()
    def count(
        self,
        batches: Mapping[str, Tensor] | Sequence[Mapping[str, Tensor]],
        data_parallel_group: ProcessGroup | None = None,
    ) -> Statistics:
        return count_step(self, batches, data_parallel_group)

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
        """Compute the local loss and metrics from the tokens' log-probs instead of logits.

        >>> import torch
        >>> from parallel_rl import NLLLoss
        >>> data = {"response_mask": torch.tensor([[1, 1, 1], [1, 0, 0]])}
        >>> logprobs = torch.tensor([[-1.0, -2.0, -3.0], [-4.0, float("nan"), 7.0]])
        >>> loss, _ = NLLLoss().from_logprobs(logprobs, data=data, global_valid_seqs=2, global_valid_toks=4)
        >>> loss.item()
        2.5

        Every per-token field has the form of the log-probs:

            [B, S] rows;  a list of B tensors [n_i];  or flat [T], sequences one after the other, with `cu_seqlens`

        Args:
            logprobs: of the current policy, with gradient; column t is the log-prob of token t. Use float32 or wider: 16 bits
                round a log-prob, and the gradient of ratios, by up to 2^-8 (warned of once).
            data: the loss's fields and one mask. `token_mask`: rows are whole sequences; their first token (column 0) has no
                predictor and is never read. `response_mask`: rows are responses only, and every token has a predictor.
                `sample_mask` [B] is optional: without it all rows count.
            global_valid_seqs, global_valid_toks: of the whole step, see `count_valid`; or 1, if you divide yourself.
            context_parallel_group: the ranks over which every row is cut, log-probs and fields alike. Any cut works that
                leaves the first token on rank 0; flat rows follow the constructor's `cp_layout`. None: rows are whole, and
                every context rank returns the whole loss.
            cu_seqlens: [B + 1] integers, bounds of the sequences in the flat row over all context ranks; positions beyond the
                last bound belong to no sequence. Bounds on the host cost no wait for the device.
            entropy: of the policy at each token, with gradient if the loss has an entropy term; without it entropy metrics
                are left out.
            statistics: of the whole step, if the loss `needs_statistics`: the sum over micro-batches of
                `collect_from_logprobs`, reduced.

        Raises:
            ValueError: on all ranks of the group: a loss that reads more than log-probs, or a token's place in a cut row;
                log-probs above 0; a token_mask that counts a first token with a log-prob; wrong shapes, dtypes, bounds or
                values.
        """
        output = HostLogProbs(logprobs, data, cu_seqlens, entropy)
        counts = global_valid_seqs, global_valid_toks
        return run.run(self, LossCall(output, {}, *counts, context_group=context_parallel_group, statistics=statistics))

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
        """Collect this rank's part of `statistics=`; `+` joins micro-batches, `reduce` ranks.

        Args as of `from_logprobs`. Log-prob values are read only if the loss `needs_collect`; otherwise their shape suffices.

        >>> import torch
        >>> from parallel_rl import NLLLoss
        >>> loss_fn = NLLLoss({"token_weights": "sum"})
        >>> data = {"response_mask": torch.ones(1, 2), "token_weights": torch.tensor([[0.5, 1.5]])}
        >>> call = {"data": data, "global_valid_seqs": 1, "global_valid_toks": 2}
        >>> statistics = loss_fn.collect_from_logprobs(torch.tensor([[-1.0, -2.0]]), **call).reduce()
        >>> loss_fn.from_logprobs(torch.tensor([[-1.0, -2.0]]), **call, statistics=statistics)[0].item()
        1.75

        Raises:
            ValueError: a loss without statistics; what `from_logprobs` refuses.
        """
        output = HostLogProbs(logprobs, data, cu_seqlens, entropy)
        call = LossCall(output, {}, global_valid_seqs, global_valid_toks, context_group=context_parallel_group)
        return run.collect(self, call)
