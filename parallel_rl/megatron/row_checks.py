"""Checks of a micro-batch's rows against the model: ids, padding, prompts and vocabulary padding."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from parallel_rl.groups import group_size
from parallel_rl.layout import valid_tokens
from parallel_rl.megatron.loop_checks import inner_loss, warn
from parallel_rl.megatron.model_config import CUT
from parallel_rl.validation import checks_values
from parallel_rl.vocab.stats import check_targets

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_config import TransformerConfig
    from torch import Tensor
    from torch.distributed import ProcessGroup

    from parallel_rl.losses.core.requirements import Requirements

ROWS = ("input_ids", "token_mask", "sample_mask")
_MULTIPLE = 128  # columns per tensor rank, Megatron's default make_vocab_size_divisible_by
_BYTES = 4  # of float32
_SOME_ROWS = 4  # not all of so many begin with a response's token by chance
#: (columns, vocab_size of the loss) that `warn_of_padding` has warned of
_WARNED: set[tuple[int, int | None]] = set()


def check_ids(data: Mapping[str, Tensor], columns: int | None, loss_fn: object) -> None:
    """Refuse ids without an embedding in the model or a column in the loss, where values are checked.

    A tensor rank embeds an id outside the vocabulary as 0 without an error, in prompts and padding too. The ValueError names
    the first such id and its place. `columns`: of the model; None: unknown, or the model embeds other ids itself.

    >>> check_ids({"input_ids": torch.tensor([[0, 7]]), "token_mask": torch.ones(1, 2), "sample_mask": torch.ones(1)}, 8, None)
    """
    ids, tokens = data["input_ids"], _vocab_size(loss_fn)
    if not checks_values(ids) or not ids.numel():
        return
    low, high = (int(bound) for bound in torch.aminmax(ids))
    if columns is not None and (low < 0 or high >= columns):
        row, column = ((ids < 0) | (ids >= columns)).nonzero()[0].tolist()
        raise ValueError(
            f"input_ids = {int(ids[row, column])} at [{row}, {column}] lies outside the model's vocabulary [0, {columns}). The "
            "model embeds prompts and padding too: give the tokenizer that the model was built for, and pad with any of its "
            "ids where token_mask is 0"
        )
    if tokens is not None and (low < 0 or high >= tokens):
        check_targets(torch.where(valid_tokens(data), ids, 0), tokens, ignore_index=None)


def check_columns(columns: int, loss_fn: object) -> None:
    """Refuse a loss with more tokens than the model has columns; only one stage would notice."""
    tokens = _vocab_size(loss_fn)
    if tokens is not None and tokens > columns:
        raise ValueError(f"the loss has vocab_size = {tokens}, the model's vocabulary only {columns} columns")


def check_right_padded(data: Mapping[str, Tensor]) -> None:
    """Raise ValueError for rows padded on the left or with several sequences, by mask and positions."""
    attended, positions = data.get("attention_mask"), data.get("position_ids")
    shape = data["token_mask"].shape
    cure = "padded_batch takes one sequence per row, from column 0 on, then padding"
    if isinstance(attended, torch.Tensor) and attended.shape == shape and checks_values(attended):
        padded = ~attended[:, 0].bool() & attended.bool().any(1)
        if bool(padded.any()):
            row = int(padded.nonzero()[0])
            raise ValueError(f"attention_mask is 0 at [{row}, 0], so row {row} is padded on the left; {cure}")
    if isinstance(positions, torch.Tensor) and positions.shape == shape and checks_values(positions):
        wrong = valid_tokens(data) & (positions != torch.arange(shape[1], device=positions.device))
        if bool(wrong.any()):
            row, column = wrong.nonzero()[0].tolist()
            raise ValueError(f"position_ids = {int(positions[row, column])} at [{row}, {column}]; {cure}")


def warn_of_prompts(batches: Sequence[Mapping[str, object]], needs: Requirements) -> None:
    """Warn of a policy loss whose token_mask is 1 everywhere or at first tokens: prompts are scored."""
    masks = [data.get("token_mask") for data in batches]
    recorded = [name for name in needs.names if name.endswith("logprobs")]
    if not recorded or not masks or not all(isinstance(mask, torch.Tensor) and checks_values(mask) for mask in masks):
        return
    tensors = [mask for mask in masks if isinstance(mask, torch.Tensor)]
    if not all(bool(mask.all()) for mask in tensors):
        rows = sum(len(mask) for mask in tensors)
        if rows >= _SOME_ROWS and all(mask.dim() == 2 and bool(mask[:, 0].all()) for mask in tensors):
            warn(
                f"token_mask is 1 in column 0 of all rows of the first step, for a loss that reads {recorded[0]}: the first "
                "token of a prompt is never sampled. Is the mask inverted? Set it to 1 at the tokens of responses alone"
            )
    else:
        warn(
            f"token_mask is 1 at every place of the first step, for a loss that reads {recorded[0]}: prompts and padding are "
            "scored as if the policy had sampled them. Set it to 1 at the tokens of responses alone (column 0 is never scored)"
        )


def warn_of_shifted_mask(batches: Sequence[Mapping[str, object]], needs: Requirements) -> None:
    """Warn of a token_mask shifted by one from recorded log-probs that are 0 outside of responses."""
    for name in (name for name in needs.names if name.endswith("logprobs")):
        edges = [_edges(data, data[name]) for data in batches if name in data]
        if not edges or any(edge is None for edge in edges):
            continue
        before, first, last, after = torch.cat([edge for edge in edges if edge is not None], 1)
        for place, inside, outside in (("left", first, after), ("right", last, before)):
            if len(inside) >= _SOME_ROWS and not bool(inside.any()) and bool(outside.all()):
                warn(
                    f"token_mask lies one place to the {place} of {name}: in every row of the first step {name} is 0 at one "
                    "end of the valid tokens and not 0 behind the other. Column t of both belongs to token t"
                )
                return


def _edges(data: Mapping[str, object], field: object) -> Tensor | None:
    """Return a field before, at the first, at the last and after the last valid token: [4, rows]."""
    mask = data.get("token_mask")
    if not (
        isinstance(mask, torch.Tensor) and isinstance(field, torch.Tensor) and checks_values(field) and mask.dim() == 2
    ):
        return None
    if field.shape != mask.shape:
        return None
    valid = mask.bool().clone()
    valid[:, 0] = False  # never scored
    rows = valid.any(1)
    valid, field = valid[rows].int(), torch.nn.functional.pad(field[rows], (0, 1))  # 0 behind the row
    first, last = valid.argmax(1), valid.shape[1] - 1 - valid.flip(1).argmax(1)
    return torch.stack([field.gather(1, at.clamp(min=0)[:, None])[:, 0] for at in (first - 1, first, last, last + 1)])


def warn_of_repeats(batches: Sequence[Mapping[str, object]]) -> None:
    rows = [data.get("input_ids") for data in batches]
    if len(rows) > 1 and rows[0] is not None and all(ids is rows[0] for ids in rows):
        warn(
            f"all {len(rows)} micro-batches of the first step are the same tensor of input_ids; give each its own rows, "
            "since a repeated one only costs time"
        )


def warn_of_precision(batches: Sequence[Mapping[str, object]], needs: Requirements) -> None:
    """Warn of the first field of recorded log-probs in 16 bits."""
    for name in (name for name in needs.names if name.endswith("logprobs")):
        for values in (data.get(name) for data in batches):
            if isinstance(values, torch.Tensor) and values.element_size() < _BYTES:
                warn(
                    f"{name} is {values.dtype}, which rounds log-probs by up to 2^-8 of them, and so the ratios that the loss "
                    "takes of them; record them in float32"
                )
                return


def gathered_rows(rows: int | None, group: ProcessGroup | None) -> list[int | None]:
    """Gather a checksum of each rank's rows over a group; None where a rank has none."""
    of_ranks: list[int | None] = [rows] * group_size(group)
    if len(of_ranks) > 1:
        dist.all_gather_object(of_ranks, rows, group=group)
    return of_ranks


def warn_of_same_rows(rows: int | None, data_group: ProcessGroup | None) -> None:
    """Warn on rank 0 of a step whose rows are the same on all data ranks; one all-gather."""
    of_ranks = gathered_rows(rows, data_group)
    if dist.get_rank() == 0 and len(of_ranks) > 1 and rows is not None and len(set(of_ranks)) == 1:
        warn(
            f"all {len(of_ranks)} data ranks hold the same rows in the first step; cut the data by "
            "parallel_state.get_data_parallel_rank(), or seed the sampler by it"
        )


def warn_of_cut(config: TransformerConfig, loss_fn: object) -> None:
    model, loss = getattr(config, CUT, "zigzag"), getattr(_options(loss_fn), "cp_layout", None)
    if loss not in (None, model):
        warn(
            f"the loss has cp_layout = {loss!r}, the model's config {CUT} = {model!r}: the loss would take a position's logits "
            f"for another's; give the loss cp_layout={model!r}, or say in the config how the model's rows are cut"
        )


def warn_of_padding(loss_fn: object, columns: int, tp: int, true: int | None = None) -> None:
    """Warn once of padding in every softmax: more columns than tokens, and a loss without their number.

    columns: over all tensor ranks. true: V; None: presume Megatron's padding if `columns` are a multiple of its unit.
    """
    size = _vocab_size(loss_fn)
    if _options(loss_fn) is None or (columns, size) in _WARNED:
        return
    if true is not None and true != (columns if size is None else size):
        known, wanted = f"{true} of which are tokens", str(true)
    elif true is None and size is None and columns % (_MULTIPLE * tp) == 0:
        known, wanted = "a multiple of what Megatron pads to", "the tokenizer's size"
    else:
        return
    _WARNED.add((columns, size))
    warnings.warn(
        f"the loss has vocab_size = {size}, the model {columns} columns ({columns // tp} on each tensor rank), {known}; pass "
        f"vocab_size = {wanted} to the loss: columns of padding that it does not know are in every softmax",
        stacklevel=4,
    )


def _options(loss_fn: object) -> object:
    return getattr(inner_loss(loss_fn), "options", None)


def _vocab_size(loss_fn: object) -> int | None:
    return getattr(_options(loss_fn), "vocab_size", None)
