"""This rank's input of `GPTModel.forward`, from whole rows of tokens."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.module import Float16Module
from megatron.core.utils import get_model_config
from torch import Tensor

from parallel_rl.layout import SequenceLayout
from parallel_rl.megatron.context import Context
from parallel_rl.megatron.model import unwrap
from parallel_rl.megatron.mtp import heads_running
from parallel_rl.megatron.trees import check_tree_model, positions_by_depth, tree_params, tree_plan
from parallel_rl.prefix_tree import PrefixTree
from parallel_rl.validation import checks_values


@dataclass(frozen=True)
class ModelInput:
    """Tokens and positions of this context rank, [B, S/cp] or packed [1, T/cp], and packed bounds.

    In a prefix tree's row, [1, T/cp], positions are depths.
    """

    tokens: Tensor
    positions: Tensor
    packed: PackedSeqParams | None
    layout: SequenceLayout
    context: Context
    tree: PrefixTree | None = None


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
    return ModelInput(*_local(input_ids, layout), None, layout, context)


def packed_input(
    input_ids: Tensor, cu_seqlens: Tensor, cu_seqlens_padded: Tensor | None = None, context: Context | None = None
) -> ModelInput:
    """Pack the sequences of [B, S] rows one after the other into one row.

    >>> packed_input(data["input_ids"], torch.tensor([0, 4, 7])).positions
    tensor([[0, 1, 2, 3, 0, 1, 2]])

    Args:
        input_ids: [B, S], the same on every context rank.
        cu_seqlens: [B + 1] integers, cumulative true lengths from 0; host tensors cost no wait for the device.
        cu_seqlens_padded: [B + 1] the same with padding; `packed_bounds` makes both.
        context: see `padded_input`.

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
    # causality hides a sequence's padding, which follows it: padded bounds suffice, and kernels without gaps stay usable
    padded = bounds.to(device=input_ids.device, dtype=torch.int32)
    # given both, Transformer Engine (up to 2.9; later unless `pad_between_seqs` is set) compares them on the host, twice a
    # layer
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
    return ModelInput(*_local(input_ids, layout), packed, layout, context)


def tree_input(tree: PrefixTree, context: Context | None = None, device: torch.device | None = None) -> ModelInput:
    """Make the input of a prefix tree's row, positions as depths, for the attention of `layer_spec`.

    >>> from parallel_rl import build_tree
    >>> tree_input(build_tree(torch.tensor([[1, 2, 3], [1, 2, 4]]), torch.tensor([3, 3]))).positions
    tensor([[0, 1, 2, 2]])

    Args:
        tree: see `build_tree`; its `multiple_of` is what the layout needs.
        context: see `padded_input`.
        device: of the model; None is the host.

    Raises:
        ValueError: a row or a tree that does not divide over the context ranks.
    """
    context, device = context or Context.present(), device or torch.device("cpu")
    layout = tree.layout(cp_size=context.size, cp_rank=context.rank, cp_layout=context.layout, device=device)
    owner, local = tree.owners(context.size, context.layout)
    mine = (owner == context.rank).nonzero()[:, 0]
    rows = mine[local[mine].argsort()]
    tokens, depths = (x[rows][None].to(device) for x in (tree.row(tree.input_ids), tree.depth))
    return ModelInput(tokens, depths, tree_params(tree_plan(tree, context, device), tree), layout, context, tree)


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
        lengths: [B] true lengths.
        multiple: further divisor of each padded length.
        total: T of a row of fixed length.
        context: see `padded_input`; `ALONE` only needs `multiple`.

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
    rooms = (host + unit - 1) // unit * unit
    needed = int(rooms.sum())
    whole = -(-needed // row) * row if total is None else total
    if whole < needed or whole % row:
        raise ValueError(f"total = {total} must be at least {needed} and divisible by {row}")
    rooms[-1] += whole - needed
    return _cumulate(host), _cumulate(rooms)


def forward_logits(model: torch.nn.Module, batch: ModelInput, *, mtp: bool = False) -> Tensor:
    """Run a model chunk: logits [B, S/cp, V/tp] on the last stage, before it hidden states; model's dtype.

    With `mtp` the heads of multi-token prediction run too; the last stage's output appends theirs, see `split_heads`.

    >>> forward_logits(model, padded_input(data["input_ids"])).shape
    torch.Size([2, 4, 8])

    Raises:
        ValueError: under sequence parallelism, a local length that is not divisible by tp.
    """
    config = get_model_config(model)
    tp = config.tensor_model_parallel_size
    if config.sequence_parallel and batch.tokens.shape[1] % tp:
        raise ValueError(
            f"sequence_parallel splits the {batch.tokens.shape[1]} local positions over tp = {tp}, not evenly; "
            f"pad the rows to a multiple of cp·tp (`packed_bounds` does)"
        )
    wrapped: torch.nn.Module | None = model
    half = False
    while wrapped is not None and not half:
        half = isinstance(wrapped, Float16Module)
        wrapped = getattr(wrapped, "module", None)
    options = {"fp32_output": False} if half else {}
    if not torch.is_grad_enabled():
        # Transformer Engine casts weights to FP8 in the first micro-batch, which only a schedule marks: a forward outside one
        # would use the weights from before the optimizer's step
        unwrap(model).set_is_first_microbatch()
    positions: AbstractContextManager[None] = nullcontext()
    if batch.tree is not None:
        check_tree_model([unwrap(model)], trains_heads=mtp)
        positions = positions_by_depth(unwrap(model), batch.positions[0], batch.tree)
    with heads_running(unwrap(model), mtp), positions, _embedding_with_gradient(unwrap(model)):
        out: Tensor = model(batch.tokens, batch.positions, None, packed_seq_params=batch.packed, **options)
    return out


@contextmanager
def _embedding_with_gradient(model: torch.nn.Module) -> Iterator[None]:
    """Require a gradient of a frozen embedding's output, or recomputation drops those behind it."""
    embedding = getattr(model, "embedding", None)  # of the first stage
    recomputes = get_model_config(model).recompute_granularity is not None and torch.is_grad_enabled()
    if embedding is None or not recomputes or any(weight.requires_grad for weight in embedding.parameters()):
        yield
        return
    hook = embedding.register_forward_hook(lambda module, args, out: out.requires_grad_())
    try:
        yield
    finally:
        hook.remove()


def _local(input_ids: Tensor, layout: SequenceLayout) -> tuple[Tensor, Tensor]:
    _check_ids(input_ids)
    shape = layout.local_shape
    # padding may lie beyond the last learned position; its output is never read
    places = torch.where(layout.held[1], layout.positions, 0)
    return layout.shard(input_ids, shift=False).view(shape), places.view(shape)


def _check_ids(input_ids: Tensor) -> None:
    """Refuse what no model embeds; a tensor rank takes a negative id for one of another rank's."""
    if input_ids.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"input_ids must be int64 or int32 [B, S], got {input_ids.dtype} {list(input_ids.shape)}")
    if checks_values(input_ids) and input_ids.numel() and int(input_ids.min()) < 0:
        row, column = (input_ids < 0).nonzero()[0].tolist()
        raise ValueError(
            f"input_ids = {int(input_ids[row, column])} at [{row}, {column}] lies outside the model's vocabulary, and "
            "the model embeds padding too: pad with any id of the tokenizer where token_mask is 0"
        )


def _cumulate(lengths: Tensor) -> Tensor:
    return torch.cat((torch.zeros(1, dtype=torch.int64), lengths.cumsum(0))).to(torch.int32)
