"""Log-probs of a whole batch, and other scores of its tokens, as data for a later loss or its advantages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import torch

from parallel_rl.agreement import raise_on_all_ranks
from parallel_rl.counts import check_zeros_and_ones
from parallel_rl.groups import check_rank, group_size
from parallel_rl.layout import CPLayout, SequenceLayout, valid_tokens
from parallel_rl.losses.core.call import LossCall
from parallel_rl.losses.core.checks import check_data
from parallel_rl.losses.core.logits_source import layout_of
from parallel_rl.losses.core.requirements import Requirements
from parallel_rl.replicated import Replicated
from parallel_rl.validation import checks_values
from parallel_rl.vocab.dtensor import is_dtensor, shard_of_dtensor
from parallel_rl.vocab.linear.lm_head import LMHeadInput, split_output
from parallel_rl.vocab.linear.token_stats import stats_of_head
from parallel_rl.vocab.shards import VocabShard, check_spans
from parallel_rl.vocab.stats import IGNORE_INDEX, check_logits, check_targets
from parallel_rl.vocab.truncated_stats import check_kept_ids, truncated_stats_of_shard
from parallel_rl.vocab.truncation import Truncation

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup

    from parallel_rl.vocab.backends.torch_backend import Backend


def _of_samples(temperature: Tensor, valid: Tensor) -> Tensor:
    """[B] temperatures after a look at them; a sample without a valid token may have any, and 1 where it has none."""
    if temperature.shape != valid.shape[:1] or not temperature.is_floating_point():
        raise ValueError(
            f"temperature must be a number or floating point [{len(valid)}], one per sample, got {temperature.dtype} "
            f"{list(temperature.shape)}"
        )
    counts, usable = valid.any(1), (temperature > 0) & temperature.isfinite()
    if checks_values(temperature):
        wrong = ~usable & counts
        if bool(wrong.any()):
            row = int(wrong.nonzero()[0, 0])
            raise ValueError(f"temperature = {float(temperature[row])} of sample {row} must be positive and finite")
    return torch.where(counts | usable, temperature, 1.0)


def _unmasked(data: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """The data with masks of 1, of which every token counts."""
    ids = data.get("input_ids")
    if not isinstance(ids, torch.Tensor) or ids.dim() != 2:
        return data
    return {**data, "token_mask": torch.ones_like(ids), "sample_mask": ids.new_ones(len(ids))}


class TokenScores(NamedTuple):
    """[B, S] scores of each token, without gradient."""

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
    """Compute log-probs of `input_ids` without gradient: the fields `prev_logprobs` and `reference_policy_logprobs`.

    >>> token_logprobs(torch.zeros(1, 3, 4), {"input_ids": torch.tensor([[1, 2, 3]])})
    tensor([[ 0.0000, -1.3863, -1.3863]])

    Args:
        next_token_logits: [B, S/cp, V/tp], or [1, T/cp, V/tp] with a packed `layout`; a DTensor, as for the losses; or an
            `LMHeadInput`, whose logits never exist whole.
        data: input_ids [B, S]; where it has token_mask [B, S] and sample_mask [B] too, masked ids are not looked at. A token
            with an id outside the vocabulary there has log-prob 0, and an `LMHeadInput` does not project its row; one with a
            bound on its `rows` projects no masked token at all, whose log-prob is 0 as well.
        vocab_parallel_rank, vocab_parallel_group, context_parallel_group: as for the losses.
        layout: of the logits; None is padded rows.
        temperature: one number, or [B] one for each sample. vocab_size, vocab_start, cp_layout, backend, top_k, top_p,
            kept_sets: as for the losses.

    Returns:
        [B, S] token-aligned, whole on every context rank; 0 in column 0 and beyond a sequence's end, −inf for a token that
        the truncated policy does not keep.

    Raises:
        ValueError: shapes that do not match, masks with other values than 0 and 1; what `token_stats` raises; more rows that
            carry loss than a head's bound; on all ranks of both groups, see `set_validation`.
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
    """Compute `token_logprobs`, and beside them what else one pass over the logits can tell of each token.

    >>> data = {"input_ids": torch.tensor([[1, 2, 3]])}
    >>> token_scores(torch.zeros(1, 3, 4), data, entropy=True, sum_pi_squared=True).sum_pi_squared
    tensor([[0.0000, 0.2500, 0.2500]])

    Args:
        next_token_logits, data, vocab_parallel_rank, vocab_parallel_group, context_parallel_group, layout, vocab_size,
            vocab_start, cp_layout, temperature, backend, top_k, top_p, kept_sets: as for `token_logprobs`.
        entropy: compute it too. sum_pi_squared: Σ_v p_v² beside it.

    Returns:
        Tensors [B, S] like those of `token_logprobs`; None: not asked for.

    Raises:
        ValueError: see `token_logprobs`.
    """
    groups, one = (vocab_parallel_group, context_parallel_group), torch.ones(())
    call = LossCall.of(next_token_logits, data, (one, one), vocab_parallel_rank, groups)
    if is_dtensor(next_token_logits):
        part = shard_of_dtensor(next_token_logits, vocab_parallel_group, context_parallel_group)  # type: ignore[arg-type]
        vocab_size = part.vocab_size if vocab_size is None else vocab_size
        vocab_start = min(part.vocab_start, vocab_size)
        call = replace(call, output=part.logits, cut_length=part.length if part.cut and layout is None else None)
    head, logits = split_output(call.output, vocab_parallel_group)  # type: ignore[arg-type]
    needs = Requirements().with_kept_ids() if kept_sets else Requirements()

    def check() -> tuple[SequenceLayout, Tensor, VocabShard]:
        if head is not None:
            head.check(vocab_parallel_group, vocab_size)
        masked = "token_mask" in data and "sample_mask" in data
        rows, width = check_data(data if masked else _unmasked(data), needs, logits, "token_scores")
        if masked and checks_values(data["token_mask"]):
            check_zeros_and_ones(data)
        check_rank(vocab_parallel_rank, vocab_parallel_group)
        if layout is None:
            of = layout_of(call, logits, rows, width, cp_layout if call.cut_length is None else "contiguous")
        else:
            of, ranks = layout, group_size(context_parallel_group)
            if of.cp_size != ranks:
                raise ValueError(f"the layout is of cp = {of.cp_size}, context_parallel_group has {ranks} ranks")
            of.check_logits(logits)
        check_logits(logits, False, backend)
        shard = VocabShard.of(
            logits.shape[-1], vocab_parallel_group, vocab_size, vocab_start,
            temperature=temperature, entropy=entropy, truncation=Truncation(top_k, top_p, kept_sets), backend=backend,
            sum_pi_squared=sum_pi_squared,
        )  # fmt: skip
        ids = data["input_ids"]
        valid = valid_tokens(data) if masked else torch.ones_like(ids, dtype=torch.bool)
        if isinstance(temperature, torch.Tensor):
            shard = replace(shard, temperature=of.expand(_of_samples(temperature, valid)))
        that_count = torch.where(valid, ids, IGNORE_INDEX)
        check_targets(torch.where(valid, ids, 0), shard.vocab_size, ignore_index=None)
        if kept_sets:
            check_kept_ids(data["kept_ids"], valid, shard.vocab_size)
        bounded = head is not None and head.rows is not None
        targets = of.shard(that_count if bounded else ids, fill=IGNORE_INDEX)
        if head is not None:
            head.check_rows((targets >= 0) & (targets < shard.vocab_size), vocab_parallel_group)
        return of, targets, shard

    same = call.facts(logits, vocab_size, vocab_start)
    alike = Replicated([data], ("input_ids", "token_mask", "sample_mask"), shards=logits)
    of, targets, shard = raise_on_all_ranks(check, groups, logits, same, alike=alike)
    check_spans(vocab_parallel_group, logits.shape[-1], vocab_size, vocab_start, logits)
    valid = (targets >= 0) & (targets < shard.vocab_size)
    kept_ids = of.shard(data["kept_ids"], fill=-1) if kept_sets else None
    if head is not None:
        stats, _ = stats_of_head(head, targets, valid, shard, kept_ids)
    else:
        stats = truncated_stats_of_shard(logits.flatten(0, -2), targets, valid, shard, kept_ids)
    asked = stats.logprobs, stats.entropy, stats.sum_pi_squared
    whole = (None if x is None else of.unshard(x, context_parallel_group) for x in asked)
    return TokenScores(*whole)  # type: ignore[arg-type]
