"""A teacher's top-k of each token as data for a student, from logits or chunks of hidden states."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from parallel_rl.agreement import raise_on_all_ranks, shape_facts
from parallel_rl.counts import check_masks, check_zeros_and_ones
from parallel_rl.groups import check_rank, group_rank, group_size
from parallel_rl.layout import CPLayout, SequenceLayout, valid_tokens
from parallel_rl.validation import checks_values
from parallel_rl.vocab.backends.torch_backend import math_dtype
from parallel_rl.vocab.linear.lm_head import LMHeadInput, split_output
from parallel_rl.vocab.linear.row_values import chunk_size, row_values
from parallel_rl.vocab.shards import VocabShard, check_spans
from parallel_rl.vocab.stats import check_logits, stats_of_shard
from parallel_rl.vocab.topk import top_columns

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup


@torch.no_grad()
def teacher_topk(
    next_token_logits: Tensor | LMHeadInput,
    data: Mapping[str, Tensor],
    k: int,
    vocab_parallel_rank: int | None = None,
    vocab_parallel_group: ProcessGroup | None = None,
    context_parallel_group: ProcessGroup | None = None,
    *,
    layout: SequenceLayout | None = None,
    vocab_size: int | None = None,
    vocab_start: int | None = None,
    cp_layout: CPLayout = "zigzag",
    temperature: float = 1.0,
) -> dict[str, Tensor]:
    """Find a teacher's k largest logits per token, their ids and log-sum-exp, for `DistillationLossFn`.

    >>> data = {"input_ids": torch.tensor([[0, 1, 2]]), "token_mask": torch.ones(1, 3), "sample_mask": torch.ones(1)}
    >>> topk = teacher_topk(torch.tensor([3.0, 1.0, 2.0, 0.0]).expand(1, 3, 4), data, 2)
    >>> topk["teacher_topk_indices"][0, 1], topk["teacher_topk_logits"][0, 1]
    (tensor([0, 2]), tensor([3., 2.]))

    Args:
        next_token_logits: of the teacher, [B, S/cp, V/tp], or [1, T/cp, V/tp] with a `layout` of packed rows or a prefix tree;
            or an `LMHeadInput`, without whole logits.
        data: input_ids, token_mask [B, S] and sample_mask [B]; masked tokens get 0.
        k: at most `vocab_size`.
        temperature: of the log-sum-exp only.
        layout, cp_layout, vocab_size, vocab_start and the groups: as for `token_logprobs`.

    Returns:
        teacher_topk_logits [B, S, k] and teacher_logsumexp [B, S] in max(float32, the dtype given), teacher_topk_indices
        [B, S, k] int64; token-aligned, whole and the same on every rank.

    Raises:
        ValueError: shapes, dtypes, masks or options that do not fit; on all ranks of both groups, see `set_validation`.
    """
    group, context = vocab_parallel_group, context_parallel_group
    head, logits = split_output(next_token_logits, group)

    def check() -> tuple[SequenceLayout, VocabShard]:
        check_rank(vocab_parallel_rank, group)
        check_masks(data)
        if checks_values(data["token_mask"]):
            check_zeros_and_ones(data)
        cp = group_size(context), group_rank(context)
        rows, width = data["token_mask"].shape
        positions = layout or SequenceLayout.padded(
            rows, width, cp_size=cp[0], cp_rank=cp[1], cp_layout=cp_layout, device=logits.device
        )
        positions.check_logits(logits)
        check_logits(logits, False, "auto")
        shard = VocabShard.of(logits.shape[-1], group, vocab_size, vocab_start, temperature=temperature)
        if isinstance(k, bool) or not isinstance(k, int) or not 1 <= k <= shard.vocab_size:
            raise ValueError(f"k = {k!r} must be an integer in [1, vocab_size = {shard.vocab_size}]")
        if head is not None:
            head.check(group, vocab_size)
            scored = positions.shard(valid_tokens(data), fill=False)
            head.check_rows(scored if positions.tree is None else positions.tree.rows.any(scored), group)
            chunk_size(head, shard, None)
        return positions, shard

    positions, shard = raise_on_all_ranks(check, [group, context], logits, shape_facts(logits, vocab_size))
    check_spans(group, logits.shape[-1], vocab_size, vocab_start, logits)
    keep = positions.shard(valid_tokens(data), fill=False)
    # a tree's row serves all tokens that share it
    rows = keep if positions.tree is None else positions.tree.rows.any(keep)
    best = torch.zeros(len(rows), k, dtype=math_dtype(logits.dtype), device=logits.device)
    ids = torch.zeros(len(rows), k, dtype=torch.int64, device=logits.device)

    def of_rows(z: Tensor, places: Tensor, _: Tensor | None) -> Tensor:
        values, columns = top_columns(z, k, shard)
        kept = rows[places]
        best.index_copy_(0, places, torch.where(kept[:, None], values, 0.0))
        ids.index_copy_(0, places, torch.where(kept[:, None], columns, 0))
        return stats_of_shard(z, torch.zeros_like(places), kept, shard).lse

    if head is None:
        lse = of_rows(logits.flatten(0, -2), torch.arange(len(rows), device=logits.device), None)
    else:
        lse, _ = row_values(head, rows, shard, of_rows)
    fields = {"teacher_topk_logits": best, "teacher_topk_indices": ids, "teacher_logsumexp": lse}
    if positions.tree is not None:
        place = positions.tree.rows.index
        fields = {name: x[place] * keep.view(-1, *[1] * (x.dim() - 1)) for name, x in fields.items()}
    return {name: positions.unshard(x, context) for name, x in fields.items()}
