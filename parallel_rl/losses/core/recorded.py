"""Warn early if recorded log-probs are shifted, empty or of another temperature than the policy's."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from parallel_rl.labels import is_shifted
from parallel_rl.validation import checks_values, get_validation

if TYPE_CHECKING:
    from torch import Tensor

    from parallel_rl.losses.core.batch import TokenBatch
    from parallel_rl.losses.core.local_batch import LocalBatch

_OF_ONE_POLICY = ("prev_logprobs", "generation_logprobs")  # of the policy itself, at most a few steps ago
_FIELDS = (*_OF_ONE_POLICY, "reference_policy_logprobs")
_FIRST = 8  # micro-batches of a loss
_ENOUGH, _TIMES = 16, 5.0  # by chance, so many tokens fit so much better once in 10^5
_FEW, _MANY_TIMES = 6, 50.0
_LEAST = 1e-3  # mean difference that is more than rounding
_STRAIGHT, _OTHER = 0.96, 0.1  # r² of a line, and how far its slope is from 1, where two temperatures differ


@dataclass(eq=False)
class RecordedCheck:
    """Compares recorded log-probs with the policy's in a loss's first micro-batches; no communication.

    It runs where values are checked (`set_validation`): with mode "always" in every micro-batch; with `may_wait` on a device,
    too, where the host waits. It warns once a field and refuses nothing, because a wrong refusal would end a run.

    Attributes:
        left: micro-batches still to check.
        sums: of fields, over the micro-batches until there are enough tokens.
        named: fields already warned of.
    """

    left: int = _FIRST
    sums: dict[str, list[float]] = field(default_factory=dict)
    named: set[str] = field(default_factory=set)

    def __call__(self, batch: TokenBatch, *, may_wait: bool = False) -> None:
        """Warn of each field that is 0, or that fits the policy far better when shifted or scaled."""
        mode, stats = get_validation(), batch.output.stats
        if stats is None or mode == "never" or torch.compiler.is_compiling():
            return
        if mode != "always" and (self.left <= 0 or not (may_wait or checks_values(stats.logprobs))):
            return
        self.left -= 1
        fields = [
            (f"{part}/{name}" if part else name, name, local)
            for part, local in (batch.local.parts or {"": batch.local}).items()
            for name in _FIELDS
            if name in local.requirements.names
        ]
        fields = [(label, name, local) for label, name, local in fields if label not in self.named]
        if not fields:
            return
        with torch.no_grad():
            numbers = torch.stack([_numbers(batch, local, name) for _, name, local in fields])
        for (label, name, local), (*sums, row, column) in zip(fields, numbers.tolist(), strict=True):
            before = self.sums.pop(label, [0.0] * len(sums))
            sums = [x + y for x, y in zip(before, sums, strict=True)]
            has_columns = local.requirements.shift or is_shifted(local.data)  # not in rows of responses alone
            text = _moved(label, sums, f" (most at row {row:.0f}, column {column:.0f})" if has_columns else "")
            text = text or _empty(label, sums) or (_scaled(label, sums) if name in _OF_ONE_POLICY else "")
            if text:
                self.named.add(label)
                warnings.warn(text, stacklevel=2)
            elif sums[2] < _ENOUGH:
                self.sums[label] = sums


def _numbers(batch: TokenBatch, local: LocalBatch, name: str) -> Tensor:
    """Return the sums for `_moved` and `_scaled`, then row and column of the token that gains most."""
    stats, whole = batch.output.stats, batch.output.untruncated
    assert stats is not None
    logprobs = (stats if whole is None or name in _OF_ONE_POLICY else whole).logprobs.double()
    needs, layout = local.requirements, local.layout
    values = local.data[name].double()
    if needs.shift and needs.field(name).alignment == "predictor":
        values = _at(values, 1)

    def take(x: Tensor) -> Tensor:
        return layout.take(x, needs.shift)

    recorded = take(values)
    valid = local.mask & recorded.isfinite() & logprobs.isfinite()
    unmoved = torch.where(valid, logprobs - recorded, 0).abs()
    sums, gains = [], []
    for shift in (1, -1):
        shifted = take(_at(values, shift))
        both = valid & take(_at(local.valid, shift)) & shifted.isfinite()
        moved = torch.where(both, logprobs - shifted, 0).abs()
        sums += [torch.where(both, unmoved, 0).sum(), moved.sum(), both.sum().double()]
        gains.append(torch.where(both, unmoved - moved, 0))
    x, y = torch.where(valid, recorded, 0), torch.where(valid, logprobs, 0)
    sums += [valid.sum().double(), x.sum(), y.sum(), (x * x).sum(), (x * y).sum(), (y * y).sum(), unmoved.sum()]
    place = recorded.new_zeros((), dtype=torch.int64)
    if recorded.numel():
        place = layout.places(needs.shift)[0][torch.maximum(*gains).argmax()]
    width = max(layout.shape[1], 1)
    return torch.stack([*sums, (place // width).double(), (place % width).double()])


def _at(values: Tensor, shift: int) -> Tensor:
    shifted = values.roll(shift, 1)
    shifted[:, 0 if shift > 0 else -1] = 0
    return shifted


def _moved(label: str, sums: Sequence[float], place: str) -> str:
    """Return the warning for a field that fits with its columns one place later (1) or earlier (−1)."""
    fits = {shift: fit for shift, fit in ((1, sums[:3]), (-1, sums[3:6])) if _fits(*fit)}
    if not fits:
        return ""
    shift, (unmoved, moved, count) = min(fits.items(), key=lambda item: item[1][1])
    column = "t − 1" if shift > 0 else "t + 1"
    return (
        f"{label} looks moved by one place: mean |log π − {label}| is {unmoved / count:.4g} over {count:.0f} tokens here, "
        f"and {moved / count:.4g} with column {column} in the place of column t{place}. Column t must hold the log-prob of "
        f"token t: give {label.split('/')[-1]}.roll({shift}, 1)"
    )


def _fits(unmoved: float, moved: float, count: float) -> bool:
    times = _TIMES if count >= _ENOUGH else _MANY_TIMES
    return count >= _FEW and unmoved > max(_LEAST * count, times * moved)


def _empty(label: str, sums: Sequence[float]) -> str:
    count, _, _, squares, _, _, distance = sums[6:]
    if squares or count < _ENOUGH or distance <= _LEAST * count:
        return ""
    return (
        f"{label} is 0 at all {count:.0f} tokens here, where mean |log π| is {distance / count:.4g}; a recorded log-prob of 0 "
        f"is a probability of 1. Fill {label.split('/')[-1]} with the log-probs of the policy that it is named for"
    )


def _scaled(label: str, sums: Sequence[float]) -> str:
    """Return the warning for another temperature: log π is a line over the field, of slope T_field / T."""
    count, x, y, xx, xy, yy, distance = sums[6:]
    if count < _ENOUGH or distance <= _LEAST * count:
        return ""
    xx, xy, yy = xx - x * x / count, xy - x * y / count, yy - y * y / count
    if min(xx, yy) <= 0 or xy * xy < _STRAIGHT * xx * yy or abs(xy / xx - 1) < _OTHER:
        return ""
    return (
        f"{label} looks like that of {xy / xx:.2f} times the temperature of this loss: mean |log π − {label}| is "
        f"{distance / count:.4g} over {count:.0f} tokens here, and log π is a line over it. Give the loss the sampler's "
        "temperature=, or record the log-probs at the temperature of the loss"
    )
