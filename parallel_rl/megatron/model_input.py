"""This rank's input of `GPTModel.forward`, from whole rows of tokens."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from parallel_rl.layout import SequenceLayout
from parallel_rl.megatron.process_groups import Context
from parallel_rl.megatron.trees import tree_params, tree_plan
from parallel_rl.prefix_tree import PrefixTree
from parallel_rl.validation import checks_values


@dataclass(frozen=True)
class ModelInput:
    """Tokens, positions (of a prefix tree: depths) of this context rank, [B, S/cp] or packed [1, T/cp].

    highest: id of the whole rows; None where values are not checked.
    """

    tokens: Tensor
    positions: Tensor
    packed: PackedSeqParams | None
    layout: SequenceLayout
    context: Context
    tree: PrefixTree | None = None
    highest: int | None = None


def padded_input(input_ids: Tensor, context: Context | None = None) -> ModelInput:
    """Make the input of right-padded tokens [B, S].

    >>> padded_input(data["input_ids"]).positions
    tensor([[0, 1, 2, 3],
            [0, 1, 2, 3]])

    Args:
        input_ids: [B, S], the same on every context rank.
        context: the ranks that share the rows; None is Megatron's. `ALONE` while they are data replicas (`replicas`).

    Raises:
        ValueError: S is not divisible by 2·cp, or by what sequence parallelism needs; ids that no model embeds.
    """
    context = context or Context.present()
    layout = SequenceLayout.padded(
        *input_ids.shape, cp_size=context.size, cp_rank=context.rank, cp_layout=context.layout, device=input_ids.device
    )
    return ModelInput(*_local(input_ids, layout), None, layout, context, highest=_check_ids(input_ids))


def packed_input(
    input_ids: Tensor, cu_seqlens: Tensor, cu_seqlens_padded: Tensor | None = None, context: Context | None = None
) -> ModelInput:
    """Pack the sequences of [B, S] rows one after the other into one row.

    >>> packed_input(data["input_ids"], torch.tensor([0, 4, 7])).positions
    tensor([[0, 1, 2, 3, 0, 1, 2]])

    Args:
        input_ids, context: see `padded_input`.
        cu_seqlens: [B + 1] integers, cumulative true lengths from 0; host tensors need no host sync.
        cu_seqlens_padded: [B + 1] the same with padding; `packed_bounds` makes both.

    Raises:
        ValueError: bounds that do not fit the rows, or lengths that are not divisible by 2·cp.
    """
    context = context or Context.present()
    bounds = cu_seqlens if cu_seqlens_padded is None else cu_seqlens_padded
    if cu_seqlens.numel() - 1 != input_ids.shape[0]:
        raise ValueError(f"cu_seqlens has {cu_seqlens.numel() - 1} sequences, input_ids {input_ids.shape[0]} rows")
    layout = SequenceLayout.packed(
        cu_seqlens,
        bounds,
        seq_len=input_ids.shape[1],
        total=int(bounds[-1]),
        cp_size=context.size,
        cp_rank=context.rank,
        cp_layout=context.layout,
        device=input_ids.device,
    )
    longest = int(bounds.diff().max())
    # causality hides the padding behind a sequence, so padded bounds suffice for kernels without gaps
    padded = bounds.to(device=input_ids.device, dtype=torch.int32)
    # given both, Transformer Engine (up to 2.9, or without `pad_between_seqs`) compares them on the host twice per layer
    again = padded if context.size > 1 else None
    packed = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=padded,
        cu_seqlens_kv=padded,
        cu_seqlens_q_padded=again,
        cu_seqlens_kv_padded=again,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        **({"pad_between_seqs": False} if "pad_between_seqs" in PackedSeqParams.__dataclass_fields__ else {}),
    )
    packed.bounds_on_host = tuple(bounds.tolist())  # read by every layer of SelfAttentionCore
    return ModelInput(*_local(input_ids, layout), packed, layout, context, highest=_check_ids(input_ids))


def tree_input(tree: PrefixTree, context: Context | None = None, device: torch.device | None = None) -> ModelInput:
    """Make the input of a prefix tree's row, positions as depths, for the attention of `layer_spec`.

    >>> from parallel_rl import build_tree
    >>> tree_input(build_tree(torch.tensor([[1, 2, 3], [1, 2, 4]]), torch.tensor([3, 3]))).positions
    tensor([[0, 1, 2, 2]])

    Args:
        tree: see `build_tree`; its `multiple_of` must suit the layout, else ValueError.
        context: see `padded_input`. device: of the model; None is the host.
    """
    context, device = context or Context.present(), device or torch.device("cpu")
    layout = tree.layout(cp_size=context.size, cp_rank=context.rank, cp_layout=context.layout, device=device)
    owner, local = tree.owners(context.size, context.layout)
    columns = (owner == context.rank).nonzero()[:, 0]
    rows = columns[local[columns].argsort()]
    tokens, depths = (x[rows][None].to(device) for x in (tree.row(tree.input_ids), tree.depth))
    packed = tree_params(tree_plan(tree, context, device), tree)
    return ModelInput(tokens, depths, packed, layout, context, tree, _check_ids(tree.input_ids))


def packed_bounds(
    lengths: Tensor, *, multiple: int = 1, total: int | None = None, context: Context | None = None
) -> tuple[Tensor, Tensor]:
    """Compute `cu_seqlens` and `cu_seqlens_padded` (int32, on the host) with the layout's padding.

    Padded lengths are multiples of 2·cp under zigzag context parallelism, the row of cp·tp (sequence parallelism); the last
    sequence is padded for the row.

    >>> true, padded = packed_bounds(torch.tensor([4, 3]), multiple=4)
    >>> true.tolist(), padded.tolist()
    ([0, 4, 7], [0, 4, 8])

    Args:
        lengths: [B] true lengths. multiple: further divisor of each padded length.
        total: T of a row of fixed length. context: see `padded_input`; `ALONE` only needs `multiple`.

    Raises:
        ValueError: lengths that are not [B] integers ≥ 1; a `total` that is too small or not such a multiple.
    """
    if lengths.dim() != 1 or lengths.is_floating_point() or lengths.numel() == 0 or int(lengths.min()) < 1:
        raise ValueError(f"lengths must be [B] integers ≥ 1, got {lengths.dtype} {lengths.tolist()}")
    context = context or Context.present()
    size = context.size
    unit = math.lcm(multiple, 2 * size if size > 1 and context.layout == "zigzag" else 1)
    row = math.lcm(unit, size * context.tensor)
    host = lengths.detach().cpu().to(torch.int64)
    padded = (host + unit - 1) // unit * unit
    needed = int(padded.sum())
    row_length = -(-needed // row) * row if total is None else total
    if row_length < needed or row_length % row:
        raise ValueError(f"total = {total} must be at least {needed} and divisible by {row}")
    padded[-1] += row_length - needed
    return _cumulate(host), _cumulate(padded)


def _local(input_ids: Tensor, layout: SequenceLayout) -> tuple[Tensor, Tensor]:
    shape = layout.local_shape
    # padding may lie beyond the last learned position; its output is never read
    places = torch.where(layout.held[1], layout.positions, 0)
    return layout.shard(input_ids, shift=False).view(shape), places.view(shape)


def _check_ids(input_ids: Tensor) -> int | None:
    """Return the highest id where values are checked; refuse ids that no model embeds."""
    if input_ids.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"input_ids must be int64 or int32 [B, S], got {input_ids.dtype} {list(input_ids.shape)}")
    if not checks_values(input_ids) or not input_ids.numel():
        return None
    low, high = (int(bound) for bound in torch.aminmax(input_ids))
    if low < 0:
        row, column = (input_ids < 0).nonzero()[0].tolist()
        raise ValueError(
            f"input_ids = {int(input_ids[row, column])} at [{row}, {column}] lies outside the model's vocabulary, and "
            "the model embeds padding too: pad with any id of the tokenizer where token_mask is 0"
        )
    return high


def _cumulate(lengths: Tensor) -> Tensor:
    return torch.cat((torch.zeros(1, dtype=torch.int64), lengths.cumsum(0))).to(torch.int32)
