"""Losses of one row that holds several sequences: packed, or as a prefix tree."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from parallel_rl.labels import with_labels
from parallel_rl.losses.core.call import LossCall, LossFunction, LossWrapper
from parallel_rl.losses.core.checks import check_lengths
from parallel_rl.losses.core.loss import Loss
from parallel_rl.losses.core.one_row import PackedSequences
from parallel_rl.validation import checks_values

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from parallel_rl.losses.core.base import LossFn
    from parallel_rl.metrics import Metrics
    from parallel_rl.prefix_tree import PrefixTree
    from parallel_rl.statistics import Statistics


def check_packed(loss_fn: LossFunction, data: Mapping[str, Tensor], packed: PackedSequences) -> None:
    """Raise ValueError, where values are checked, for sequences that end before their last loss token."""
    data, lengths = with_labels(data), packed.cu_seqlens.diff()
    if isinstance(loss_fn, Loss) and checks_values(data["token_mask"]) and len(lengths) == len(data["token_mask"]):
        check_lengths(loss_fn.scored(data), lengths.to(data["token_mask"].device))


class SequencePackingLossWrapper(LossWrapper):
    """Loss on packed logits [1, T/cp, V/tp] with whole, unpacked `data` [B, S]; numbers as if padded.

    Sequence i is row i of the data. Its positions are `[cu_seqlens_q_padded[i], cu_seqlens_q_padded[i + 1])` of the
    row, of which the first `cu_seqlens_q[i + 1] − cu_seqlens_q[i]` are tokens. Kernel launches and collectives do not
    grow with the number of sequences; preference pairs are (even, odd) sequences of one row.

    >>> import torch
    >>> from parallel_rl import NLLLoss, count_valid
    >>> data = {"input_ids": torch.tensor([[0, 1, 2], [0, 3, 0]]), "sample_mask": torch.ones(2)}
    >>> data["token_mask"] = torch.tensor([[1, 1, 1], [1, 1, 0]])
    >>> loss_fn = SequencePackingLossWrapper(NLLLoss(), torch.tensor([0, 3, 5]))
    >>> loss, _ = loss_fn(torch.zeros(1, 5, 4), data, *count_valid(data))
    >>> round(loss.item(), 4)
    1.3863

    Args:
        loss_fn: any loss of this library.
        cu_seqlens_q: [B + 1] integer, true lengths summed up from 0.
        cu_seqlens_q_padded: [B + 1] integer, with each sequence's padding; None where there is none.
        tail: positions at the row's end that belong to no sequence, if a packer aligns the row by a segment of its own (slime,
            Megatron): leave that segment's bound out, and give its length.

    Raises:
        ValueError: at the call, on all ranks: bounds that do not increase or do not end at T − tail, padded lengths that are
            not divisible by 2·cp, a number of sequences other than the data's rows; what `loss_fn` raises.
    """

    def __init__(
        self, loss_fn: LossFn, cu_seqlens_q: Tensor, cu_seqlens_q_padded: Tensor | None = None, *, tail: int = 0
    ) -> None:
        self.loss_fn = loss_fn
        self.packed_sequences = PackedSequences(cu_seqlens_q, cu_seqlens_q_padded, tail)

    def check_inputs(self, data: Mapping[str, Tensor], *, values: bool = True) -> None:
        super().check_inputs(data, values=values)
        if values:
            check_packed(self.loss_fn, data, self.packed_sequences)

    def run(self, call: LossCall) -> tuple[Tensor, Metrics]:
        return self.loss_fn.run(replace(call, packed_sequences=self.packed_sequences))

    def run_collect(self, call: LossCall) -> Statistics:
        return self.loss_fn.run_collect(replace(call, packed_sequences=self.packed_sequences))


class PrefixTreeLossWrapper(LossWrapper):
    """Loss on logits [1, T/cp, V/tp] of a tree's row, with whole, flat `data` [B, S]; numbers as if flat.

    Fields of the data may differ between sequences at a token that they share; a field in the order of the logits
    (`teacher_logits`) is in the order of the row. Log-probs and entropy are read without a copied row. An
    `LMHeadInput` is projected once for each pair of a row and a target. What reads whole rows (distillation, a truncated
    policy, a temperature of each sample) copies a row for each flat token.

    >>> import torch
    >>> from parallel_rl import NLLLoss, build_tree, count_valid
    >>> ids = torch.tensor([[0, 1, 2], [0, 1, 3]])
    >>> data = {"input_ids": ids, "token_mask": torch.ones(2, 3), "sample_mask": torch.ones(2)}
    >>> tree = build_tree(ids, torch.tensor([3, 3]))
    >>> tree.row(ids).tolist()  # what the model reads
    [0, 1, 2, 3]
    >>> loss, _ = PrefixTreeLossWrapper(NLLLoss(), tree)(torch.zeros(1, 4, 4), data, *count_valid(data))
    >>> round(loss.item(), 4)
    1.3863

    Args:
        loss_fn: any loss of this library.
        tree: of the data's sequences, see `build_tree` and `from_nodes`.

    Raises:
        ValueError: at the call, on all ranks: data of other sequences than the tree's, logits of another row, pre-shifted
            labels; what `loss_fn` raises.
    """

    def __init__(self, loss_fn: LossFn, tree: PrefixTree) -> None:
        self.loss_fn = loss_fn
        self.tree = tree

    def run(self, call: LossCall) -> tuple[Tensor, Metrics]:
        return self.loss_fn.run(replace(call, tree=self.tree))

    def run_collect(self, call: LossCall) -> Statistics:
        return self.loss_fn.run_collect(replace(call, tree=self.tree))
