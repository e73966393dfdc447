"""Token weights, global counts, differentiable group sums and metrics that survive any split."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple

import torch
import torch.distributed as dist

from parallel_rl.groups import ParallelGroups, all_gather, group_size
from parallel_rl.validation import agreed_check

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup

Aggregation = Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "constant-length"]


class ValidCounts(NamedTuple):
    """Normalisers of one optimizer step: int64 scalars, at least 1."""

    seqs: Tensor
    toks: Tensor


def valid_tokens(data: Mapping[str, Tensor], shift: bool = True) -> Tensor:
    """[B, S] bool: the tokens that carry loss; one without a predictor (column 0) never does, unless none is needed."""
    mask = data["token_mask"].bool() & data["sample_mask"].bool()[:, None]
    if not shift:
        return mask
    return torch.cat([torch.zeros_like(mask[:, :1]), mask[:, 1:]], dim=1)


def count_valid(
    batches: Mapping[str, Tensor] | Sequence[Mapping[str, Tensor]], data_parallel_group: ProcessGroup | None = None
) -> ValidCounts:
    """Global valid counts of one optimizer step, with one all-reduce over data parallel ranks.

        N_seq = Σ sample_mask        N_tok = Σ token_mask[:, 1:] · sample_mask

    Args:
        batches: every micro-batch that this rank trains on in the step (or the only one), each whole on its context
            ranks, with `token_mask` [B, S] and `sample_mask` [B]. A rank without a micro-batch passes an empty list.
        data_parallel_group: without context parallelism; None is a group of one.

    Returns:
        (seqs, toks), int64 scalars, each at least 1.

    Raises:
        ValueError: a mask that is missing or of another shape; on all ranks of the group, see `set_validation`.
    """
    batches = [batches] if isinstance(batches, Mapping) else batches
    masks = [data["token_mask"] for data in batches if isinstance(data.get("token_mask"), torch.Tensor)]
    counts = torch.zeros(2, dtype=torch.int64, device=_device_of(data_parallel_group, masks))
    agreed_check(lambda: _check_masks(batches), [data_parallel_group], counts)
    for data in batches:
        counts += torch.stack([data["sample_mask"].bool().sum(), valid_tokens(data).sum()]).to(counts.device)
    if group_size(data_parallel_group) > 1:
        dist.all_reduce(counts, group=data_parallel_group)
    seqs, toks = counts.clamp_(min=1).unbind()
    return ValidCounts(seqs, toks)


def _device_of(group: ProcessGroup | None, masks: Sequence[Tensor]) -> torch.device:
    """Where the counts are: on the GPU if the group communicates from there, whatever device the masks are still on."""
    if group_size(group) > 1 and dist.get_backend(group) == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return masks[0].device if masks else torch.device("cpu")


def _check_masks(batches: Sequence[Mapping[str, Tensor]]) -> None:
    for data in batches:
        for name, dims, shape in (("token_mask", 2, "[B, S]"), ("sample_mask", 1, "[B]")):
            if name not in data:
                raise ValueError(f"data lacks the field {name!r}; token_mask [B, S] and sample_mask [B] are counted")
            if not isinstance(data[name], torch.Tensor) or data[name].dim() != dims:
                got = list(data[name].shape) if isinstance(data[name], torch.Tensor) else type(data[name]).__name__
                raise ValueError(f"{name} must be a tensor {shape}, got {got}")
        rows, seqs = data["token_mask"].shape[0], data["sample_mask"].shape[0]
        if rows != seqs:
            raise ValueError(f"sample_mask has {seqs} rows, token_mask {rows}; they must be as many")


def check_aggregation(mode: Aggregation, max_length: int | None) -> None:
    """Refuses a constant length without `max_length`, and `max_length` without it.

    Raises:
        ValueError: either of them.
    """
    if max_length is not None and max_length < 1:
        raise ValueError(f"max_length = {max_length} must be a positive number of tokens")
    if (max_length is None) == (mode == "constant-length"):
        raise ValueError(f"max_length = {max_length} goes with aggregation 'constant-length' only, and it needs one")


def token_weights(
    mode: Aggregation, tokens_per_sequence: Tensor, counts: ValidCounts, max_length: int | None = None
) -> Tensor:
    """The weight of each sequence's tokens in the loss, [B] float64.

    token-mean 1/N_tok; seq-mean-token-mean 1/(N_seq·n_i); seq-mean-token-sum 1/N_seq; constant-length 1/(N_seq·L_max).

    Args:
        mode: one of the four.
        tokens_per_sequence: [B] n_i, over all context ranks.
        counts: of the whole step.
        max_length: L_max of constant-length.

    Raises:
        ValueError: an unknown mode, or constant-length without a positive `max_length`.
    """
    ones = torch.ones_like(tokens_per_sequence, dtype=torch.float64)
    if mode == "token-mean":
        return ones / counts.toks
    if mode == "seq-mean-token-mean":
        return ones / (counts.seqs * tokens_per_sequence.clamp(min=1))
    if mode == "seq-mean-token-sum":
        return ones / counts.seqs
    if mode == "constant-length":
        if max_length is None or max_length < 1:
            raise ValueError(
                f"max_length = {max_length!r} must be a positive number of tokens with aggregation 'constant-length'"
            )
        return ones / (counts.seqs * max_length)
    raise ValueError(
        f"aggregation = {mode!r} is not valid; choose token-mean, seq-mean-token-mean, seq-mean-token-sum or constant-length"
    )


def group_sum(x: Tensor, group: ProcessGroup | None) -> Tensor:
    """Σ over the ranks of `group`, differentiable: the backward is the sum of the ranks' cotangents."""
    if group_size(group) == 1:
        return x
    summed: Tensor = _GroupSum.apply(x, group)
    return summed


class _GroupSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group  # type: ignore[attr-defined]
        x = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, grad: Tensor) -> tuple[Tensor, None]:
        return _GroupSum.apply(grad, ctx.group), None  # type: ignore[attr-defined]


class Metric(NamedTuple):
    """One number and how its parts combine over context ranks, data ranks and micro-batches."""

    kind: Literal["share", "count", "min", "max", "ratio"]
    value: Tensor  # 0-dim; the numerator of a ratio
    denominator: Tensor | None = None


class Metrics(Mapping[str, "Tensor"]):
    """A loss's metrics on this rank: name → device scalar. Reading one never communicates; `reduce_metrics` combines them."""

    def __init__(self, metrics: Mapping[str, Metric]) -> None:
        self._metrics = {
            name: Metric(m.kind, _constant(m.value), None if m.denominator is None else _constant(m.denominator))
            for name, m in metrics.items()
        }

    def __getitem__(self, name: str) -> Tensor:
        metric = self._metrics[name]
        return metric.value if metric.denominator is None else _ratio(metric.value, metric.denominator)

    def __iter__(self) -> Iterator[str]:
        return iter(self._metrics)

    def __len__(self) -> int:
        return len(self._metrics)

    def __repr__(self) -> str:
        return f"Metrics({', '.join(f'{name}: {metric.kind}' for name, metric in self._metrics.items())})"

    def parts(self, name: str) -> Metric:
        """The kind and the raw parts of one metric."""
        return self._metrics[name]


def _constant(value: Tensor) -> Tensor:
    return value.detach() if value.requires_grad else value


def _ratio(numerator: Tensor, denominator: Tensor) -> Tensor:
    return torch.where(denominator == 0, 0.0, numerator / torch.where(denominator == 0, 1, denominator))


_COMBINE = {
    "share": lambda x: x.sum(0),
    "count": lambda x: x.sum(0),
    "ratio": lambda x: x.sum(0),
    "min": lambda x: x.amin(0),
    "max": lambda x: x.amax(0),
}


def reduce_metrics(metrics: Sequence[Metrics], groups: ParallelGroups | None = None) -> dict[str, Tensor]:
    """The numbers that one process with the whole global batch would log.

    Shares and counts are summed, extrema stay extrema, a ratio is divided last. Every rank of the last pipeline stage
    calls it with the metrics of its micro-batches of one step; it costs one all-gather of the K parts (two, where
    `groups` has no `data_context` group and both context and data parallelism are on).

    Args:
        metrics: one entry a micro-batch, all with the same names.
        groups: context and data groups; None is one process.

    Returns:
        name → float64 scalar on the metrics' device.

    Raises:
        ValueError: an empty list, or micro-batches with different names or kinds.
    """
    if not metrics:
        raise ValueError("reduce_metrics needs the metrics of at least one micro-batch, got an empty list")
    parts = [[entry.parts(name) for name in sorted(entry)] for entry in metrics]
    names = sorted(metrics[0])
    kinds = [part.kind for part in parts[0]]
    for entry, row in zip(metrics, parts, strict=True):
        if sorted(entry) != names or [part.kind for part in row] != kinds:
            raise ValueError(f"every micro-batch must report the same metrics: {sorted(entry)} against {names}")
    columns = kinds + [kind for kind in kinds if kind == "ratio"]
    rows = torch.stack([torch.stack(_flat(row)) for row in parts])
    groups = groups or ParallelGroups()
    rows = _combine(rows, columns)
    for group in [groups.data_context] if groups.data_context is not None else [groups.context, groups.data]:
        if group_size(group) > 1:
            rows = _combine(all_gather(rows, group)[:, 0], columns)
    values = iter(rows[0].unbind())
    reduced = {name: next(values) for name in names}
    for name, kind in zip(names, kinds, strict=True):
        if kind == "ratio":
            reduced[name] = _ratio(reduced[name], next(values))
    return reduced


def _flat(row: list[Metric]) -> list[Tensor]:
    denominators = [part.denominator for part in row if part.denominator is not None]
    return [value.to(torch.float64) for value in [part.value for part in row] + denominators]


def _combine(rows: Tensor, kinds: Sequence[str]) -> Tensor:
    return torch.stack([_COMBINE[kind](rows[:, k]) for k, kind in enumerate(kinds)])[None]
