"""Several sequences in one row of logits: packed, or a prefix tree read by edges or by copied rows."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from parallel_rl.groups import all_gather, group_rank
from parallel_rl.labels import is_shifted
from parallel_rl.layout import SequenceLayout
from parallel_rl.vocab.stats import TokenStats, stats_of_edges

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch.distributed import ProcessGroup

    from parallel_rl.layout import CPLayout
    from parallel_rl.losses.core.local_batch import LocalBatch
    from parallel_rl.prefix_tree import PrefixTree
    from parallel_rl.segments import SharedRows
    from parallel_rl.vocab.linear.lm_head import LMHeadInput
    from parallel_rl.vocab.shards import VocabShard


@dataclass(frozen=True, eq=False)
class PackedSequences:
    """Bounds of the sequences in a packed row (Megatron: `PackedSeqParams`).

    Attributes:
        cu_seqlens, cu_seqlens_padded: [B + 1] integer, cumulative lengths from 0, true and with padding; None: no padding.
        tail: positions at the end of the row that belong to no sequence.
    """

    cu_seqlens: Tensor
    cu_seqlens_padded: Tensor | None = None
    tail: int = 0
    _layouts: dict[tuple[object, ...], SequenceLayout] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        for name, bounds in (("cu_seqlens", self.cu_seqlens), ("cu_seqlens_padded", self.cu_seqlens_padded)):
            if not isinstance(bounds, Tensor) and (bounds is not None or name == "cu_seqlens"):
                raise ValueError(f"{name} must be a tensor of integers [B + 1], got {bounds!r}")

    def layout(
        self, seq_len: int, total: int, cp_size: int, cp_rank: int, cp_layout: CPLayout, device: torch.device
    ) -> SequenceLayout:
        key = (seq_len, total, cp_size, cp_rank, cp_layout, device)
        if key not in self._layouts:
            self._layouts[key] = SequenceLayout.packed(
                self.cu_seqlens,
                self.cu_seqlens_padded,
                seq_len=seq_len,
                total=total,
                tail=self.tail,
                cp_size=cp_size,
                cp_rank=cp_rank,
                cp_layout=cp_layout,
                device=device,
            )
        return self._layouts[key]


def check_tree(tree: PrefixTree, data: Mapping[str, Tensor], scored: Tensor) -> None:
    """Raise ValueError for pre-shifted labels, or for `scored` tokens [B, S] of another tree."""
    if is_shifted(data):
        raise ValueError("shift_labels have no place in a prefix tree, whose rows have several labels; give input_ids")
    tree.check_data(data["input_ids"], scored)


def stats_of_tree(logits: Tensor, targets: Tensor, mask: Tensor, shard: VocabShard, shared: SharedRows) -> TokenStats:
    """Compute statistics [F] of flat tokens with ids `targets` from shared rows [R, V/tp], without a copy.

    Statistics are 0 where `mask` [F] is false.
    """
    of_edges = targets_of_edges(targets, shared)
    stats = stats_of_edges(logits, of_edges, shared.rows.any(mask), shard, shared.branches)
    zero = torch.zeros((), dtype=stats.lse.dtype, device=mask.device)
    per_row = (
        None if x is None else torch.where(mask, shared.rows.take(x), zero)
        for x in (stats.entropy, stats.lse, stats.sum_pi_squared)
    )
    return TokenStats(torch.where(mask, shared.edges.take(stats.logprobs), zero), *per_row)  # type: ignore[arg-type]


def targets_of_edges(targets: Tensor, shared: SharedRows) -> Tensor:
    """Find the token id [R + X] of each edge, −1 where there is none, from those of the flat tokens [F]."""
    known = targets if len(targets) else targets.new_zeros(1)  # a context rank may hold only padding
    return torch.where(shared.targets >= 0, known[shared.targets.clamp(min=0)], -1)


def tokens_of_edges(stats: TokenStats, mask: Tensor, shared: SharedRows) -> TokenStats:
    """Take statistics [R + X] of edges to the flat tokens [F]; 0 where `mask` is."""
    zero = torch.zeros((), dtype=stats.lse.dtype, device=mask.device)
    return TokenStats(*(None if x is None else torch.where(mask, shared.edges.take(x), zero) for x in stats))  # type: ignore[arg-type]


def for_each_token(local: LocalBatch, group: ProcessGroup | None) -> LocalBatch:
    """Copy fields in the order of a tree's rows, such as `teacher_logits`, for each flat token."""
    if local.layout.tree is None:
        return local
    names = [needed.name for needed in local.requirements.fields if needed.per == "local"]
    rows = {name: rows_of_tokens(local.data[name], local.layout) for name in names}
    heads = {name: head_of_tokens(head, local.layout, group) for name, head in local.heads.items()}
    return replace(local, data={**local.data, **rows}, heads=heads)


def rows_of_tokens(rows: Tensor, layout: SequenceLayout) -> Tensor:
    """Copy [1, R, ...] in a tree's row order to [1, F, ...], one per flat token; unchanged without a tree."""
    return rows if layout.tree is None else layout.tree.rows.take(rows.flatten(0, 1))[None]


def head_of_tokens(head: LMHeadInput, layout: SequenceLayout, group: ProcessGroup | None) -> LMHeadInput:
    """Copy the hidden states of a tree's rows for each flat token; the gradient of each row is summed."""
    return head if layout.tree is None else _with_hidden(head, rows_of_tokens(_whole_hidden(head, group), layout))


def head_of_edges(head: LMHeadInput, shared: SharedRows, group: ProcessGroup | None) -> LMHeadInput:
    """Copy the hidden states of branching rows behind the others, [1, R + X, D]: one row an edge."""
    hidden = _whole_hidden(head, group)
    return _with_hidden(head, torch.cat([hidden, hidden[:, shared.branches]], dim=1))


def _whole_hidden(head: LMHeadInput, group: ProcessGroup | None) -> Tensor:
    hidden = head.hidden.transpose(0, 1) if head.sequence_first else head.hidden
    gathered: Tensor = _Gather.apply(hidden, group) if head.sequence_parallel else hidden
    return gathered


def _with_hidden(head: LMHeadInput, hidden: Tensor) -> LMHeadInput:
    return replace(head, hidden=hidden, sequence_first=False, sequence_parallel=False, rows=None)


class _Gather(torch.autograd.Function):
    """Hidden states of sequence parallelism, whole on each tensor rank; the gradient is summed already."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, hidden: Tensor, group: ProcessGroup | None) -> Tensor:
        ctx.group, ctx.part = group, hidden.shape[1]  # type: ignore[attr-defined]
        return torch.cat(list(all_gather(hidden.contiguous(), group)), dim=1)

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, grad: Tensor) -> tuple[Tensor, None]:
        part: int = ctx.part  # type: ignore[attr-defined]
        return grad.narrow(1, group_rank(ctx.group) * part, part), None  # type: ignore[attr-defined]
