"""A micro-batch: the model's input on this rank, and the whole data of its sequences for the loss."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Literal, TypeAlias

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from parallel_rl.counts import check_masks
from parallel_rl.labels import check_labels
from parallel_rl.layout import CPLayout, valid_tokens
from parallel_rl.losses.core.one_row import PackedSequences
from parallel_rl.megatron.lm_head import FusedHead
from parallel_rl.megatron.model_input import ModelInput, packed_bounds, packed_input, padded_input, tree_input
from parallel_rl.megatron.process_groups import Context
from parallel_rl.megatron.row_checks import check_right_padded
from parallel_rl.prefix_tree import build_tree
from parallel_rl.vocab.linear.lm_head import LMHeadInput

if TYPE_CHECKING:
    from typing_extensions import Self

ContextGroup: TypeAlias = ProcessGroup | Literal["model"] | None


@dataclass(frozen=True)
class MicroBatch:
    """Input and data of a micro-batch, reusable for scoring and training.

    Attributes:
        input: the input of `forward_logits`.
        data: whole, token-aligned tensors for the loss: input_ids [B, S], token_mask [B, S], sample_mask [B], ...
        packed: the bounds of packed sequences; None for padded rows.
        carries: [B, S/cp], packed [1, T/cp], bool, on the host: this rank's loss tokens; None if only a device knows.
        heads: the loss's fields in logits order given as hidden states and a head: a teacher's.
        context_group: the ranks that share these rows: the model's, or the micro-batch's own, see `forward_backward`.
    """

    input: ModelInput
    data: Mapping[str, Tensor]
    packed: PackedSequences | None = None
    carries: Tensor | None = None
    heads: Mapping[str, LMHeadInput] = field(default_factory=dict)
    context_group: ContextGroup = "model"

    @property
    def width(self) -> int:
        """Return S of padded rows, T of a packed one: positions over all context ranks."""
        return self.input.tokens.shape[1] * self.input.context.size

    def with_data(self, **fields: Tensor | LMHeadInput) -> Self:
        """Add fields for the loss, such as old log-probs, or a teacher's `loss_input` as `teacher_logits`."""
        heads = {name: value for name, value in fields.items() if isinstance(value, LMHeadInput)}
        tensors = {name: value for name, value in fields.items() if isinstance(value, Tensor)}
        return replace(self, data={**self.data, **tensors}, heads={**self.heads, **heads})

    def loss_input(self, output: Tensor, head: FusedHead | None) -> Tensor | LMHeadInput:
        """Return the model's output as a loss takes it, through `head` with this batch's bound of rows."""
        return output if head is None else head(output, self._rows(head.sequence_parts))

    def _rows(self, parts: int) -> int | None:
        """Return the largest number of loss tokens in `parts` equal cuts of the sequence, without a host sync."""
        if self.carries is None:
            return None
        return int(self.carries.view(self.carries.shape[0], parts, -1).sum((0, 2)).max())


def padded_batch(
    data: Mapping[str, Tensor],
    *,
    device: torch.device | None = None,
    context_group: ContextGroup = "model",
    cp_layout: CPLayout = "zigzag",
) -> MicroBatch:
    """Make a micro-batch of rows right-padded to one width S.

    >>> padded_batch(data).input.tokens.shape
    torch.Size([2, 4])

    Args:
        data: input_ids [B, S], token_mask [B, S], sample_mask [B] and the loss's fields, the same on every tensor, context
            and pipeline rank.
        device: of `data` from now on; None keeps it. From host tensors a fused head knows which rows it may skip; from device
            tensors it projects all.
        context_group: the ranks that share these rows, the same on all of them: "model" is Megatron's context group, others
            are dynamic context parallelism, None is a single rank.
        cp_layout: how they cut the rows, as in `build_config` and the loss.

    Raises:
        ValueError: data without input_ids or masks; a width that does not suit the layout, see `padded_input`.
    """
    context = _context(context_group, cp_layout)
    batch = _micro_batch(data, partial(padded_input, context=context), None, device)
    return replace(batch, context_group=context_group)


def packed_batch(
    data: Mapping[str, Tensor],
    lengths: Tensor,
    *,
    multiple: int = 1,
    total: int | None = None,
    device: torch.device | None = None,
    context_group: ContextGroup = "model",
    cp_layout: CPLayout = "zigzag",
) -> MicroBatch:
    """Pack the rows' true sequences one after the other into one row; `data` stays [B, S].

    >>> packed_batch(data, torch.tensor([4, 3])).input.tokens.shape
    torch.Size([1, 7])

    Args:
        data, device, context_group, cp_layout: see `padded_batch`. multiple, total: see `packed_bounds`.
        lengths: [B] true lengths; host tensors need no host sync.

    Raises:
        ValueError: data without input_ids or masks; lengths that do not fit, see `packed_bounds`, `packed_input`.
    """
    context = _context(context_group, cp_layout)
    true, padded = packed_bounds(lengths, multiple=multiple, total=total, context=context)
    make_input = partial(packed_input, cu_seqlens=true, cu_seqlens_padded=padded, context=context)
    return replace(_micro_batch(data, make_input, (true, padded), device), context_group=context_group)


def tree_batch(
    data: Mapping[str, Tensor],
    lengths: Tensor,
    *,
    alike: Sequence[str] = (),
    scored: Tensor | None = None,
    total: int | None = None,
    device: torch.device | None = None,
    cp_layout: CPLayout = "zigzag",
) -> MicroBatch:
    """Put the rows' true sequences into one row that holds each shared prefix once; `data` stays [B, S].

    >>> tree_batch(data, torch.tensor([4, 3])).input.tokens.shape
    torch.Size([1, 7])

    Args:
        data, device, cp_layout: see `padded_batch`. lengths: [B] true lengths.
        alike: data fields that must agree for two tokens to be stored once, see `build_tree`.
        scored: [B, S] the tokens that may have loss; None: where token_mask is not 0.
        total: T of a row of fixed length, as pipeline stages need.

    Raises:
        ValueError: data without input_ids or masks, lengths or a `total` that do not fit.
    """
    context = Context.present(cp_layout)
    chunks = 2 * context.size if context.size > 1 else 1
    unit = math.lcm(chunks, context.size * context.tensor)
    ids = _checked_ids(data)
    if scored is not None and bool((data["token_mask"].bool() & ~scored.to(ids.device).bool()).any()):
        raise ValueError(
            "scored is 0 at a token whose token_mask is not 0: it would be counted, but have no loss; set scored there, too"
        )
    tree = build_tree(
        ids, lengths, alike=[data[name] for name in alike],
        token_mask=data["token_mask"] if scored is None else scored, multiple_of=chunks,
    )  # fmt: skip
    if total is not None and total % unit:
        raise ValueError(f"total = {total} must be divisible by {unit}")
    tree = tree.padded_to(-(-tree.row_length // unit) * unit if total is None else total)
    home = ids.device if device is None else device
    moved = {name: field.to(home) for name, field in data.items()}
    layout = tree.layout(cp_size=context.size, cp_rank=context.rank, cp_layout=context.layout)
    assert layout.tree is not None
    valid = layout.shard(valid_tokens({name: data[name].cpu() for name in ("token_mask", "sample_mask")}), fill=False)
    return MicroBatch(
        tree_input(tree, context, home), moved, None, layout.tree.rows.any(valid).view(layout.local_shape)
    )


def _context(group: ContextGroup, layout: CPLayout) -> Context:
    return Context.present(layout) if group == "model" else Context.of(group, layout)


def _micro_batch(
    data: Mapping[str, Tensor],
    make_input: Callable[[Tensor], ModelInput],
    cu_seqlens: tuple[Tensor, Tensor] | None,
    device: torch.device | None,
) -> MicroBatch:
    ids = _checked_ids(data)
    home = ids.device if device is None else device
    moved = {name: field.to(home) for name, field in data.items()}
    model_input = make_input(moved["input_ids"])
    carries = None
    if ids.device.type == "cpu":
        layout = (model_input if home.type == "cpu" else make_input(ids)).layout
        carries = layout.shard(valid_tokens(data), fill=False).view(layout.local_shape)
    packed = None if cu_seqlens is None else PackedSequences(cu_seqlens[0].to(home), cu_seqlens[1].to(home))
    return MicroBatch(model_input, moved, packed, carries)


def _checked_ids(data: Mapping[str, Tensor]) -> Tensor:
    check_labels(data)
    check_masks(data)
    ids = data.get("input_ids")
    if ids is None or ids.shape != data["token_mask"].shape:
        got = "none" if ids is None else list(ids.shape)
        raise ValueError(f"input_ids must be [B, S] as token_mask {list(data['token_mask'].shape)}, got {got}")
    if not ids.numel():
        raise ValueError(f"input_ids is {list(ids.shape)}; leave an empty micro-batch out, data ranks may have fewer")
    check_right_padded(data)
    return ids
