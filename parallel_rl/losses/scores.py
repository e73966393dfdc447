"""Log-probs and other scores of a batch's tokens, as data for a later loss or its advantages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import torch

from parallel_rl.groups import group_size
from parallel_rl.labels import is_shifted
from parallel_rl.layout import CPLayout, SequenceLayout
from parallel_rl.losses.core.base import LossFn
from parallel_rl.losses.core.batch import ModelOutput, TokenBatch
from parallel_rl.losses.core.call import LossCall
from parallel_rl.losses.core.one_row import stats_of_tree, targets_of_edges, tokens_of_edges
from parallel_rl.losses.core.options import NoConfig
from parallel_rl.losses.core.readers import LogProbReader
from parallel_rl.losses.core.requirements import Requirements
from parallel_rl.losses.core.run import read
from parallel_rl.vocab.dtensor import is_dtensor
from parallel_rl.vocab.linear.lm_head import LMHeadInput
from parallel_rl.vocab.linear.token_stats import stats_of_head
from parallel_rl.vocab.stats import IGNORE_INDEX
from parallel_rl.vocab.truncated_stats import truncated_stats_of_shard

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup

    from parallel_rl.losses.core.local_batch import LocalBatch
    from parallel_rl.losses.core.loss import Reader
    from parallel_rl.metrics import Metrics
    from parallel_rl.vocab.backends.torch_backend import Backend
    from parallel_rl.vocab.shards import VocabShard


class TokenScores(NamedTuple):
    """Scores of each token, [B, S], without gradient."""

    logprobs: Tensor
    entropy: Tensor | None
    sum_pi_squared: Tensor | None


def token_logprobs(
    next_token_logits: Tensor | LMHeadInput,
    data: Mapping[str, Tensor],
    vocab_parallel_rank: int | None = None,
    vocab_parallel_group: ProcessGroup | None = None,
    context_parallel_group: ProcessGroup | None = None,
    *,
    layout: SequenceLayout | None = None,
    vocab_size: int | None = None,
    vocab_start: int | None = None,
    cp_layout: CPLayout = "zigzag",
    temperature: float | Tensor = 1.0,
    backend: Backend = "auto",
    top_k: int | None = None,
    top_p: float | None = None,
    kept_sets: bool = False,
) -> Tensor:
    """Compute log-probs of `input_ids` without gradient: `prev_logprobs`, `reference_policy_logprobs`.

    >>> token_logprobs(torch.zeros(1, 3, 4), {"input_ids": torch.tensor([[1, 2, 3]])})
    tensor([[ 0.0000, -1.3863, -1.3863]])

    Args:
        next_token_logits: [B, S/cp, V/tp], or [1, T/cp, V/tp] with a packed `layout`; a DTensor, as for the losses; or an
            `LMHeadInput`, whose logits never exist whole.
        data: input_ids [B, S], or pre-shifted `shift_labels` as for the losses. With token_mask [B, S] and sample_mask [B],
            masked ids are not checked: one outside the vocabulary has log-prob 0, and an `LMHeadInput` does not project its
            row. A head with a bound on its `rows` projects no masked token; their log-probs are 0.
        vocab_parallel_rank, vocab_parallel_group, context_parallel_group: as for the losses.
        layout: of the logits, packed or of a prefix tree; None is padded rows.
        temperature: one number, or [B] one per sample. vocab_size, vocab_start, cp_layout, backend, top_k, top_p, kept_sets:
            as for the losses.

    Returns:
        [B, S] token-aligned, whole on every context rank; 0 in column 0 and beyond a sequence's end, −inf for a token that
        the truncated policy does not keep.

    Raises:
        ValueError: on all ranks of both groups, see `set_validation`: shapes that do not match; masks with values other than
            0 and 1; errors of `token_stats`; more loss-carrying rows than a head's bound.
    """
    return token_scores(
        next_token_logits, data, vocab_parallel_rank, vocab_parallel_group, context_parallel_group, layout=layout,
        vocab_size=vocab_size, vocab_start=vocab_start, cp_layout=cp_layout, temperature=temperature, backend=backend,
        top_k=top_k, top_p=top_p, kept_sets=kept_sets,
    ).logprobs  # fmt: skip


@torch.no_grad()
def token_scores(
    next_token_logits: Tensor | LMHeadInput,
    data: Mapping[str, Tensor],
    vocab_parallel_rank: int | None = None,
    vocab_parallel_group: ProcessGroup | None = None,
    context_parallel_group: ProcessGroup | None = None,
    *,
    layout: SequenceLayout | None = None,
    vocab_size: int | None = None,
    vocab_start: int | None = None,
    cp_layout: CPLayout = "zigzag",
    temperature: float | Tensor = 1.0,
    backend: Backend = "auto",
    top_k: int | None = None,
    top_p: float | None = None,
    kept_sets: bool = False,
    entropy: bool = False,
    sum_pi_squared: bool = False,
) -> TokenScores:
    """Compute `token_logprobs`, and more statistics in the same pass over the logits.

    >>> data = {"input_ids": torch.tensor([[1, 2, 3]])}
    >>> token_scores(torch.zeros(1, 3, 4), data, entropy=True, sum_pi_squared=True).sum_pi_squared
    tensor([[0.0000, 0.2500, 0.2500]])

    Args as of `token_logprobs`, and:
        entropy: compute it too. sum_pi_squared: compute Σ_v p_v² too.

    Returns tensors [B, S] as of `token_logprobs`, None for those not requested. Raises what `token_logprobs` raises.
    """
    groups = vocab_parallel_group, context_parallel_group
    no_count = torch.ones((), device=getattr(next_token_logits, "device", None))
    call = LossCall.of(next_token_logits, data, (no_count, no_count), vocab_parallel_rank, groups)
    if isinstance(temperature, torch.Tensor):
        call = replace(call, data={**call.data, "temperature": temperature})
    scores = _Scores(
        vocab_size=vocab_size, vocab_start=vocab_start, cp_layout="contiguous" if is_dtensor(next_token_logits) else cp_layout,
        temperature="per-sample" if isinstance(temperature, torch.Tensor) else temperature, backend=backend, top_k=top_k,
        top_p=top_p, kept_sets=kept_sets,
    )  # fmt: skip
    masked = {"token_mask", "sample_mask"} <= data.keys() or is_shifted(data)
    bounded = isinstance(next_token_logits, LMHeadInput) and next_token_logits.rows is not None
    scores.extras = _Extras(layout, entropy, sum_pi_squared, masked, bounded)
    batch = read(scores, call).batch
    stats, local = batch.output.stats, batch.local
    assert stats is not None
    whole = (
        None if x is None else local.layout.unshard(x, context_parallel_group, local.requirements.shift)
        for x in (stats.logprobs, stats.entropy, stats.sum_pi_squared)
    )
    return TokenScores(*whole)  # type: ignore[arg-type]


class _Extras(NamedTuple):
    """Arguments of `token_scores` that no other loss has; `bounded`: no masked token is scored."""

    layout: SequenceLayout | None
    entropy: bool
    sum_pi_squared: bool
    masked: bool
    bounded: bool


class _Scores(LossFn[NoConfig]):
    config_class = NoConfig
    requirements = Requirements(truncatable=True, token_separable=True, weighs_sequences=False)
    extras: _Extras

    @property
    def reader(self) -> Reader:
        return _ScoreReader(self)

    def scored(self, data: Mapping[str, Tensor]) -> Tensor:
        """Return the tokens whose ids are checked: without masks all, including column 0."""
        return super().scored(data) if self.extras.masked else torch.ones_like(data["token_mask"], dtype=torch.bool)

    def compute(self, batch: TokenBatch) -> tuple[Tensor, Metrics]:
        raise NotImplementedError("scores are read")


@dataclass(frozen=True, eq=False)
class _ScoreReader(LogProbReader):
    """Reader of the statistics of every token with an id in the vocabulary, masked or not."""

    loss: _Scores

    def add_fields(self, logits: Tensor | None, data: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        ids = data.get("input_ids")
        if self.loss.extras.masked or not isinstance(ids, torch.Tensor) or ids.dim() != 2:
            return data
        return {**data, "token_mask": torch.ones_like(ids), "sample_mask": ids.new_ones(len(ids))}

    def check(self, logits: Tensor, data: Mapping[str, Tensor], tensor_group: ProcessGroup | None) -> None:
        super().check(logits, data, tensor_group)
        self._shard_of(logits.shape[-1], tensor_group)

    def layout(
        self, logits: Tensor, rows: int, width: int, context_group: ProcessGroup | None
    ) -> SequenceLayout | None:
        layout, ranks = self.loss.extras.layout, group_size(context_group)
        if layout is not None:
            if layout.cp_size != ranks:
                raise ValueError(f"the layout is of cp = {layout.cp_size}, context_parallel_group has {ranks} ranks")
            layout.check_logits(logits)
        return layout

    def read(self, local: LocalBatch, logits: Tensor, tensor_group: ProcessGroup | None) -> TokenBatch:
        shard = self._shard(local, logits.shape[-1], tensor_group)
        targets, valid = self._targets(local, shard)
        rows, shared = logits.flatten(0, -2), local.layout.tree
        if shared is not None and self.reads_tree:
            stats = stats_of_tree(rows, targets, valid, shard, shared)
        else:
            stats = truncated_stats_of_shard(rows, targets, valid, shard, self._kept_ids(local))
        return TokenBatch(local, ModelOutput(stats))

    def read_head(
        self, local: LocalBatch, head: LMHeadInput, tensor_group: ProcessGroup | None
    ) -> tuple[TokenBatch, Tensor | None]:
        shard = self._shard(local, head.weight.shape[0], tensor_group)
        targets, valid = self._targets(local, shard)
        shared = local.layout.tree
        if shared is not None and self.reads_tree:
            of_edges = targets_of_edges(targets, shared).clamp(min=0)
            stats, _ = stats_of_head(head, of_edges, shared.edges.any(valid), shard, None)
            return TokenBatch(local, ModelOutput(tokens_of_edges(stats, valid, shared))), None
        stats, _ = stats_of_head(head, targets, valid, shard, self._kept_ids(local))
        return TokenBatch(local, ModelOutput(stats)), None

    def _shard(self, local: LocalBatch, width: int, tensor_group: ProcessGroup | None) -> VocabShard:
        """Build the shard; a masked sample keeps its own temperature if that is valid."""
        shard = self._shard_of(width, tensor_group)
        if not self.loss.options.per_sample:
            return shard
        values = local.data["temperature"]
        usable = ((values > 0) & values.isfinite()) | local.sequence_mask
        return replace(shard, temperature=local.layout.expand(torch.where(usable, values, 1.0)))

    def _shard_of(self, width: int, tensor_group: ProcessGroup | None) -> VocabShard:
        extras = self.loss.extras
        shard = self.loss.options.shard(width, tensor_group, entropy=extras.entropy)
        return replace(shard, sum_pi_squared=extras.sum_pi_squared)

    def _targets(self, local: LocalBatch, shard: VocabShard) -> tuple[Tensor, Tensor]:
        """Return each position's id and whether it is scored; a bound on rows excludes masked tokens."""
        ids = local.data["input_ids"]
        ids = torch.where(self.loss.scored(local.data), ids, IGNORE_INDEX) if self.loss.extras.bounded else ids
        targets = local.layout.shard(ids, local.requirements.shift, fill=IGNORE_INDEX)
        return targets, (targets >= 0) & (targets < shard.vocab_size)

    def _kept_ids(self, local: LocalBatch) -> Tensor | None:
        return local.kept_ids() if self.loss.options.truncation.kept_sets else None
