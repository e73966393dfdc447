"""Global counts of valid sequences and tokens, and the weights of tokens that follow from them."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple

import torch
import torch.distributed as dist

from parallel_rl.agreement import communication_device, raise_on_all_ranks
from parallel_rl.groups import all_gather, group_rank, reduce_
from parallel_rl.labels import check_labels, with_labels
from parallel_rl.layout import valid_tokens
from parallel_rl.validation import checks_values, get_validation

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup

#: how a loss with token weights is divided, see `parallel_rl.losses.core.aggregation`
WeightedBy = Literal["count", "sum"]
Aggregation = Literal[
    "token-mean",
    "seq-mean-token-mean",
    "seq-mean-token-sum",
    "constant-length",
    "token-sum",
    "turn-mean",
    "prompt-mean",
    "trajectory-mean",
]


_EMPTY = (
    "rows with sample_mask 1 have no valid token (token_mask[:, 1:] is 0 in them): each counts as a sequence, so a mean over "
    "sequences is smaller for them; set their sample_mask to 0 to leave them out"
)
_UNITS: dict[Aggregation, str | None] = {
    "token-mean": "tokens",
    "seq-mean-token-mean": "sequences",
    "seq-mean-token-sum": "sequences",
    "constant-length": "sequences",
    "token-sum": None,
    "turn-mean": "turns",
    "prompt-mean": "prompts",
    "trajectory-mean": "trajectories",
}


def unit_of(mode: Aggregation, weights: WeightedBy | None = None) -> str | None:
    """Return the unit by whose count an aggregation divides, for `Metric.per`.

    >>> unit_of("constant-length"), unit_of("token-mean", "sum"), unit_of("token-mean", "count")
    ('sequences', 'token weights', 'weighted tokens')
    """
    if mode == "token-mean" and weights is not None:
        return {"sum": "token weights", "count": "weighted tokens"}[weights]
    return _UNITS[mode]


class ValidCounts(NamedTuple):
    """Normalisers of one optimizer step: int64 scalars, at least 1."""

    seqs: Tensor
    toks: Tensor

    @classmethod
    def of(cls, seqs: Tensor, toks: Tensor, device: torch.device) -> ValidCounts:
        """Put the counts of a call, or plain numbers, on `device`; the host does not wait for a copy."""
        return cls(*(torch.as_tensor(n).reshape(()).to(device, non_blocking=True) for n in (seqs, toks)))


def count_valid(
    batches: Mapping[str, Tensor] | Sequence[Mapping[str, Tensor]], data_parallel_group: ProcessGroup | None = None
) -> ValidCounts:
    """Count the valid sequences and tokens of one optimizer step, in one all-reduce over data ranks.

        N_seq = Σ sample_mask        N_tok = Σ token_mask[:, 1:] · sample_mask

    >>> batch = {"token_mask": torch.ones(2, 4), "sample_mask": torch.tensor([1.0, 1.0])}
    >>> seqs, toks = count_valid([batch, batch])
    >>> int(seqs), int(toks)
    (4, 12)

    Args:
        batches: every micro-batch of this rank's step (or the only one), whole on its context ranks: `token_mask` [B, S] and
            `sample_mask` [B], or `shift_labels` [B, S], whose columns count unless −100. Empty list: no micro-batch.
        data_parallel_group: without context parallelism; None is a group of one.

    Returns:
        (seqs, toks), int64 scalars, each at least 1.

    Raises:
        ValueError: on all ranks of the group (see `set_validation`): a missing or misshapen mask, shift_labels beside
            input_ids, a mask with values other than 0 and 1. Values on a device fail there, in an assertion without a host
            sync, except in mode "never".

    A row with sample_mask 1 and no valid token counts as a sequence; where values are checked, rank 0 warns of such rows once.
    """
    return count_rows([batches] if isinstance(batches, Mapping) else batches, data_parallel_group)[0]


def count_rows(
    batches: Sequence[Mapping[str, Tensor]], data_parallel_group: ProcessGroup | None = None
) -> tuple[ValidCounts, Tensor]:
    """Count as `count_valid` does, and the rows with sample_mask 1 and no valid token; errors as there.

    >>> batch = {"token_mask": torch.tensor([[1, 1], [1, 0]]), "sample_mask": torch.ones(2)}
    >>> counts, empty = count_rows([batch])
    >>> int(counts.seqs), int(empty)
    (2, 1)
    """
    batches = [with_labels(data) for data in batches]
    masks = [data["token_mask"] for data in batches if isinstance(data.get("token_mask"), torch.Tensor)]
    home = masks[0].device if masks else torch.device("cpu")
    counts = torch.zeros(4, dtype=torch.int64, device=communication_device(data_parallel_group, home))

    def check() -> None:
        for data in batches:
            check_labels(data)
        check_masks(*batches)
        if checks_values(counts):
            check_zeros_and_ones(*batches)

    raise_on_all_ranks(check, [data_parallel_group], counts)
    on_device = get_validation() == "auto" and not checks_values(counts)
    for data in batches:
        valid, rows = valid_tokens(data), data["sample_mask"].bool()
        numbers = [rows.sum(), valid.sum(), (rows & ~valid.any(1)).sum()]
        if on_device:
            numbers.append(_fractional(data["sample_mask"]).sum() + _fractional(data["token_mask"]).sum())
        counts[: len(numbers)] += torch.stack(numbers).to(counts.device)
    reduce_(counts, data_parallel_group)
    if on_device:  # the host does not wait; all ranks fail, since all know the sum
        torch._assert_async(counts[3] == 0, "token_mask and sample_mask must hold 0 and 1 only")
    if checks_values(counts) and int(counts[2]) and group_rank(dist.group.WORLD) == 0:
        warnings.warn(_EMPTY, stacklevel=2)
    seqs, toks = counts[:2].clamp_(min=1).unbind()
    return ValidCounts(seqs, toks), counts[2]


def global_group_ids(group_ids: Tensor, data_parallel_group: ProcessGroup | None) -> Tensor:
    """Make this data rank's group ids unique over all data ranks, [N] int64; one all-gather.

    `group_ids` of a loss and of `estimate` are global: rows of one id are one prompt, on any data ranks. Call it with the rows
    of all micro-batches of the step, also for `run_ids`.

    >>> global_group_ids(torch.tensor([0, 0, 1]), None)  # the second data rank gets [2, 2, 3]
    tensor([0, 0, 1])

    Args:
        group_ids: [N] integers of this data rank's rows; a negative one is of no group and stays.
        data_parallel_group: without context parallelism; None is a group of one.

    Raises:
        ValueError: anything but integers [N], on all ranks of the group.
    """

    def check() -> None:
        if not isinstance(group_ids, torch.Tensor) or group_ids.dim() != 1 or group_ids.is_floating_point():
            got = (
                f"{group_ids.dtype} {list(group_ids.shape)}" if isinstance(group_ids, torch.Tensor) else repr(group_ids)
            )
            raise ValueError(f"group_ids must be integers [N], got {got}")

    raise_on_all_ranks(check, [data_parallel_group])
    ids = group_ids.to(torch.int64)
    number = torch.cat([ids, ids.new_full((1,), -1)]).max() + 1
    numbers = all_gather(
        number.reshape(1).to(communication_device(data_parallel_group, ids.device)), data_parallel_group
    )
    before = numbers[: group_rank(data_parallel_group)].sum().to(ids.device)
    return torch.where(ids < 0, ids, ids + before)


def own_counts(data: Mapping[str, Tensor], shift: bool = True) -> list[Tensor]:
    """Count [N_seq, N_tok] of a batch alone, scalars; without a shift column 0 counts, too."""
    return [data["sample_mask"].bool().sum(), valid_tokens(data, shift).sum()]


def check_masks(*batches: Mapping[str, Tensor]) -> None:
    """Check that each batch has `token_mask` [B, S] and `sample_mask` [B]; else ValueError."""
    for data in batches:
        for name, dims, shape in (("token_mask", 2, "[B, S]"), ("sample_mask", 1, "[B]")):
            if name not in data:
                raise ValueError(f"data lacks the field {name!r}; token_mask [B, S] and sample_mask [B] are counted")
            if not isinstance(data[name], torch.Tensor) or data[name].dim() != dims:
                got = list(data[name].shape) if isinstance(data[name], torch.Tensor) else type(data[name]).__name__
                raise ValueError(f"{name} must be a tensor {shape}, got {got}")
            check_mask_dtype(name, data[name])
        rows, seqs = data["token_mask"].shape[0], data["sample_mask"].shape[0]
        if rows != seqs:
            raise ValueError(f"sample_mask has {seqs} rows, token_mask {rows}; their numbers must be equal")


def check_mask_dtype(name: str, mask: Tensor) -> None:
    """Raise ValueError for a mask that is complex, of 8-bit floats, or requires a gradient."""
    if mask.is_complex() or mask.requires_grad or (mask.is_floating_point() and mask.dtype.itemsize < 2):
        gradient = " that requires a gradient" if mask.requires_grad else ""
        raise ValueError(f"{name} must hold 0 and 1, as bools, integers or floats; got {mask.dtype}{gradient}")


def check_zeros_and_ones(*batches: Mapping[str, Tensor], names: Sequence[str] = ("token_mask", "sample_mask")) -> None:
    """Check that masks are 0 or 1; ValueError names the place."""
    for data in batches:
        for name in names:
            wrong = _fractional(data[name])
            if bool(wrong.any()):
                place = wrong.nonzero()[0].tolist()
                value = data[name][tuple(place)].item()
                raise ValueError(
                    f"{name} = {value:g} at {place} must be 0 or 1; weights of tokens or samples belong in "
                    "token_weights or in the advantages"
                )


def _fractional(mask: Tensor) -> Tensor:
    return torch.zeros_like(mask) if mask.dtype == torch.bool else (mask != 0) & (mask != 1)


def check_aggregation(mode: Aggregation, max_length: int | None, weights: WeightedBy | None = None) -> None:
    """Raise ValueError if `max_length` is missing or unused, or a sum of weights divides nothing."""
    if max_length is not None and max_length < 1:
        raise ValueError(f"max_length = {max_length} must be a positive number of tokens")
    if (max_length is None) == (mode == "constant-length"):
        raise ValueError(f"max_length = {max_length} goes with aggregation 'constant-length' only, and it needs one")
    if weights == "sum" and mode not in ("token-mean", "seq-mean-token-mean"):
        raise ValueError(
            f"token_weights = 'sum' has no effect with aggregation = {mode!r}, which is not divided by weights; take 'count'"
        )


def token_weights(
    mode: Aggregation, tokens_per_sequence: Tensor, counts: ValidCounts, max_length: int | None = None
) -> Tensor:
    """Compute the weight of each sequence's tokens in the loss, [B] float64.

    token-mean 1/N_tok; seq-mean-token-mean 1/(N_seq·n_i); seq-mean-token-sum 1/N_seq; constant-length 1/(N_seq·L_max);
    token-sum 1, for a caller who divides. For turns, prompts and trajectories see `parallel_rl.losses.core.aggregation`.

    >>> counts = ValidCounts(torch.tensor(2), torch.tensor(10))
    >>> token_weights("seq-mean-token-mean", torch.tensor([4, 6]), counts).tolist()
    [0.125, 0.08333333333333333]

    Args:
        mode: one of the five.
        tokens_per_sequence: [B] n_i, over all context ranks; or sums of the tokens' weights.
        counts: of the whole step; its `toks` may be a sum of weights, too.
        max_length: L_max of constant-length.

    Raises:
        ValueError: an unknown mode, or constant-length without a positive `max_length`.
    """
    ones = torch.ones_like(tokens_per_sequence, dtype=torch.float64)
    if mode == "token-mean":
        return ones / counts.toks
    if mode == "seq-mean-token-mean":
        number = tokens_per_sequence
        # a sum of weights may lie below 1
        number = torch.where(number > 0, number, 1) if number.is_floating_point() else number.clamp(min=1)
        return ones / (counts.seqs * number)
    if mode == "seq-mean-token-sum":
        return ones / counts.seqs
    if mode == "token-sum":
        return ones
    if mode == "constant-length":
        if max_length is None or max_length < 1:
            raise ValueError(
                f"max_length = {max_length!r} must be a positive number of tokens with aggregation 'constant-length'"
            )
        return ones / (counts.seqs * max_length)
    raise ValueError(
        f"aggregation = {mode!r} is not valid; choose token-mean, seq-mean-token-mean, seq-mean-token-sum, constant-length or "
        "token-sum"
    )
