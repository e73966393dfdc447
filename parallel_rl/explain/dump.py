"""Write one optimizer step to a folder: one file per data rank with JSON and arrays, nothing pickled."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, cast

import numpy as np
import torch
from torch import Tensor

from parallel_rl.agreement import raise_on_all_ranks
from parallel_rl.explain.tokens import observe
from parallel_rl.groups import ParallelGroups, group_rank
from parallel_rl.layout import valid_tokens
from parallel_rl.losses.core.call import LossCall, LossFunction, LossWrapper
from parallel_rl.losses.registry import registered_name
from parallel_rl.metrics import Metrics, reduce_metrics

if TYPE_CHECKING:
    from parallel_rl.losses.core.base import LossFn
    from parallel_rl.losses.core.batch import TokenBatch
    from parallel_rl.losses.core.options import VocabOptions

FORMAT, VERSION = "parallel_rl.explain", 1
PIECE = "piece_{:05d}_of_{:05d}.npz"


@dataclass(frozen=True)
class StepInfo:
    """Title and texts of a dumped step.

    Attributes:
        title: of the step.
        text_of_token: the text of one token id, such as `lambda token: tokenizer.decode([token])`; None: ids are shown.
        pipeline: number of pipeline stages, which `groups` do not hold.
    """

    title: str = ""
    text_of_token: Callable[[int], str] | None = None
    pipeline: int = 1


class DumpError(RuntimeError):
    """A dump that could not be written; the step itself is done."""


@contextmanager
def dump_step(
    path: str | Path, loss_fn: LossFunction, *, groups: ParallelGroups | None = None, info: StepInfo | None = None
) -> Iterator[LossFunction]:
    """Yield a loss that replaces `loss_fn` in one optimizer step and records the step in `path`.

    The loss returns the same numbers. For the record it runs once more per micro-batch, with one all-reduce over context ranks
    and a copy to the host. The first tensor and context rank of every data rank writes its sequences at the end of the block,
    atomically.

    >>> import tempfile, torch
    >>> from parallel_rl import NLLLoss, count_valid
    >>> from parallel_rl.explain import read_step
    >>> data = {"input_ids": torch.tensor([[0, 1, 2]]), "token_mask": torch.ones(1, 3), "sample_mask": torch.ones(1)}
    >>> folder = tempfile.mkdtemp()
    >>> with dump_step(folder, NLLLoss()) as loss_fn:
    ...     loss, metrics = loss_fn(torch.zeros(1, 3, 4), data, *count_valid(data))
    >>> read_step(folder).tokens["gradient"].tolist()
    [0.0, -0.5, -0.5]

    Args:
        path: a folder, created if missing; an earlier dump in it is replaced.
        loss_fn: any loss of this package, called by `forward_backward` or by hand for all micro-batches of the step.
        groups: of the job; None is one process. `ParallelGroups.from_megatron()` under Megatron.
        info: title and texts.

    Raises:
        DumpError: a file cannot be written, on all ranks that ran the loss.
    """
    groups, recorder = groups or ParallelGroups(), _Recorder(loss_fn)
    yield recorder
    if not recorder.called:  # a pipeline stage without the loss
        return
    metrics = reduce_metrics(recorder.metrics, groups)
    write = partial(_write, Path(path), recorder, metrics, groups, info or StepInfo())
    try:
        raise_on_all_ranks(write, [groups.tensor, groups.context, groups.data])
    except (OSError, RuntimeError, ValueError) as error:
        raise DumpError(f"the step could not be dumped to {path}: {error}") from error


@dataclass(eq=False)
class _Rows:
    """Rows of a micro-batch on the host, cut to their lengths."""

    lengths: np.ndarray
    tokens: dict[str, np.ndarray]
    sequences: dict[str, np.ndarray]


@dataclass(eq=False)
class _Recorder(LossWrapper):
    """A loss that remembers what each call was made of."""

    loss_fn: LossFunction
    called: bool = False
    rows: list[_Rows] = field(default_factory=list)
    metrics: list[Metrics] = field(default_factory=list)
    shares: dict[str, float] = field(default_factory=dict)
    counts: tuple[float, float] = (0.0, 0.0)

    @property
    def inner(self) -> LossFn:
        return cast("LossFn", self.loss_fn.loss_fn if isinstance(self.loss_fn, LossWrapper) else self.loss_fn)

    @property
    def options(self) -> VocabOptions:
        return self.inner.options

    def run(self, call: LossCall) -> tuple[Tensor, Metrics]:
        return self.loss_fn.run(replace(call, observe=partial(self._observe, call)))

    def _observe(self, call: LossCall, batch: TokenBatch, loss: Tensor, metrics: Metrics) -> None:
        self.called = True
        self.counts = float(call.global_valid_seqs), float(call.global_valid_toks)
        lengths = _lengths(call, batch)
        counted = (lengths > 0) | call.data["sample_mask"].bool()  # an empty answer has a share, too
        if not bool(counted.any()):  # what a data rank without a micro-batch runs in its place
            return
        self.metrics.append(metrics)
        if group_rank(call.tensor_group):
            return
        seen = observe(self.inner, batch, loss)
        if group_rank(call.context_group):  # data and what was seen are whole on each
            return
        for name, share in seen.shares.items():
            self.shares[name] = self.shares.get(name, 0.0) + float(share)
        shape, dtype = batch.local.layout.shape, batch.output.dtype
        keep = torch.arange(shape[1], device=lengths.device) < lengths[:, None]
        tokens, sequences = _fields(call.data, shape)
        tokens |= {name: _column(name, x, dtype) for name, x in seen.tokens.items()}
        sequences |= {name: x.to(dtype) for name, x in seen.sequences.items()}
        there = lengths > 0
        self.rows.append(
            _Rows(
                _array(lengths[there]),
                {name: _array(x[keep]) for name, x in tokens.items()},
                {name: _array(x[there]) for name, x in sequences.items()},
            )
        )


def _lengths(call: LossCall, batch: TokenBatch) -> Tensor:
    """Return [B] lengths of rows; without bounds a row ends at the last token of any mask."""
    data, layout = call.data, batch.local.layout
    masked = data["token_mask"].bool() | valid_tokens(data, batch.local.requirements.shift) | batch.local.valid
    column = torch.arange(1, layout.shape[1] + 1, device=masked.device)
    last = torch.where(masked, column, 0).amax(1) if layout.shape[1] else masked.sum(1)
    lengths = data.get("lengths")
    if lengths is None or lengths.shape != last.shape:
        lengths = last if call.packed_sequences is None else layout.lengths
    empty = (last == 0) & ~data["sample_mask"].bool()
    return torch.where(empty, 0, lengths.to(last)).clamp(max=layout.shape[1])


def _fields(data: Mapping[str, Tensor], shape: tuple[int, int]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    tokens = {name: x for name, x in data.items() if tuple(x.shape) == shape}
    sequences = {name: x for name, x in data.items() if tuple(x.shape) == shape[:1] and name != "lengths"}
    return tokens, sequences


def _column(name: str, x: Tensor, dtype: torch.dtype) -> Tensor:
    return x != 0 if name.startswith(("scored", "held/")) else x.to(dtype)


def _array(x: Tensor) -> np.ndarray:
    x = x.detach()
    return (x.float() if x.dtype in (torch.bfloat16, torch.float16) else x).cpu().numpy()


def _write(
    folder: Path, recorder: _Recorder, metrics: Mapping[str, Tensor], groups: ParallelGroups, info: StepInfo
) -> None:
    if groups.tp_rank or groups.cp_rank:
        return
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / PIECE.format(groups.dp_rank, groups.dp_size)
    arrays = _joined(recorder.rows)
    meta = _meta(recorder, metrics, groups, info, np.unique(arrays["token/input_ids"]) if recorder.rows else [])
    text = np.frombuffer(json.dumps(meta).encode(), np.uint8)
    partial_file = target.with_suffix(".partial")
    try:
        with partial_file.open("wb") as file:
            np.savez_compressed(file, allow_pickle=False, meta=text, **arrays)
            file.flush()
            os.fsync(file.fileno())
        partial_file.replace(target)
    finally:
        partial_file.unlink(missing_ok=True)
    if groups.dp_rank == 0:  # of an earlier dump on another number of data ranks
        for old in folder.glob("piece_*_of_*.npz"):
            if not old.name.endswith(PIECE.format(0, groups.dp_size)[-len("_of_00000.npz") :]):
                old.unlink()


def _joined(rows: Sequence[_Rows]) -> dict[str, np.ndarray]:
    """Concatenate the micro-batches; a field that some lack is 0 there."""
    lengths = [part.lengths for part in rows]
    arrays = {"lengths": np.concatenate(lengths) if lengths else np.zeros(0, np.int64)}
    for prefix, of in (("token/", "tokens"), ("sequence/", "sequences")):
        names = list(dict.fromkeys(name for part in rows for name in getattr(part, of)))
        for name in names:
            there = [getattr(part, of).get(name) for part in rows]
            like = next(x for x in there if x is not None)
            sizes = [int(part.lengths.sum()) if of == "tokens" else len(part.lengths) for part in rows]
            parts = [np.zeros(n, like.dtype) if x is None else x for x, n in zip(there, sizes, strict=True)]
            arrays[prefix + name] = np.concatenate(parts)
    return arrays


def _meta(
    recorder: _Recorder,
    metrics: Mapping[str, Tensor],
    groups: ParallelGroups,
    info: StepInfo,
    ids: Sequence[int] | np.ndarray,
) -> dict[str, object]:
    loss_fn, text = recorder.inner, info.text_of_token
    needs = loss_fn.requirements
    config = dataclasses.asdict(loss_fn.config)
    return {
        "format": FORMAT,
        "version": VERSION,
        "title": info.title,
        "loss": registered_name(type(loss_fn)),
        "config": json.loads(json.dumps(config, default=str)),
        "reads": needs.reads,
        "paired": needs.paired,
        "shift": needs.shift,
        "layout": f"TP {groups.tp_size} × CP {groups.cp_size} × PP {info.pipeline} × DP {groups.dp_size}",
        "counts": {"sequences": recorder.counts[0], "tokens": recorder.counts[1]},
        "metrics": {key: float(value) for key, value in metrics.items()},
        "shares": recorder.shares,
        "texts": {} if text is None else {str(int(token)): text(int(token)) for token in ids},
    }
