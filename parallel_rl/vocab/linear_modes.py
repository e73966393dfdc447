"""The passes of the fused head over chunks of rows: statistics forward, gradients forward or backward.

Under tensor parallelism three things run beside the products: the hidden states of the next chunk are gathered (sequence
parallelism), a chunk's statistics travel while the next one is projected, and its gradient of the hidden states is summed
while the gradient of the weight is computed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch

from parallel_rl.groups import Pending, all_gather_start, group_size, sum_start
from parallel_rl.vocab.backends.passes import RowSpec, combine_rows, row_gradient, row_parts
from parallel_rl.vocab.backends.torch_backend import math_dtype
from parallel_rl.vocab.linear_gemm import add_weight_gradient, hidden_gradient, project
from parallel_rl.vocab.linear_plan import Rows, kept_dtype

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup

    from parallel_rl.vocab.backends.choice import Backend

_SLOPE_BLOCK = 1 << 20  # logits whose soft-cap slope is held at once

Upstream = tuple["Tensor | None", "Tensor | None", "Tensor | None"]  # gradients of (log-prob, entropy, lse), [N] each


@dataclass(frozen=True)
class HeadCase:
    """One call: N = parts · R rows, in the gathered order."""

    hidden: Tensor  # [R, D]
    weight: Tensor  # [W, D], real columns only
    bias: Tensor | None  # [W]
    targets: Tensor  # [N]
    keep: Tensor  # [N] bool
    inv_t: Tensor  # [N, 1] or [1, 1]
    start: int
    softcap: float | None
    group: ProcessGroup | None
    scatter: bool  # sequence parallelism: the hidden states are split over the group's ranks
    entropy: bool
    backend: Backend
    rows: Rows
    valid: int  # W

    @property
    def dtype(self) -> torch.dtype:
        return math_dtype(self.hidden.dtype)

    def spec(self, index: int) -> RowSpec:
        rows = self.rows.every(index)
        inv_t = self.inv_t if self.inv_t.shape[0] == 1 else self.inv_t[rows]
        return RowSpec(self.targets[rows], self.keep[rows], inv_t, self.start, self.valid)

    def fetch(self, index: int) -> Pending | None:
        """A chunk's hidden states on their way; rows without loss are 0, whatever they hold."""
        if index >= len(self.rows):
            return None
        own = self.rows.own(index)
        keep = self.keep[own + self.rows.rank * self.rows.of_part]
        hidden = torch.where(keep[:, None], self.hidden[own], 0)
        return all_gather_start(hidden, self.group) if self.scatter else Pending(hidden, None)

    def logits(self, hidden: Tensor, out: Tensor) -> Tensor:
        """[n, W] into the first rows of `out`."""
        z = out[: hidden.shape[0]]
        project(hidden, self.weight, z)
        if self.bias is not None:
            z.add_(self.bias)
        if self.softcap is not None:
            z.div_(self.softcap).tanh_().mul_(self.softcap)
        return z

    def buffer(self) -> Tensor:
        size = min(self.rows.chunk, self.rows.order.shape[1]) * self.rows.order.shape[0]
        return torch.empty(size, self.weight.shape[0], dtype=self.dtype, device=self.hidden.device)


class Forward(NamedTuple):
    """[N] statistics, [N, 2 or 3] what the gradient needs of them, and the kept logits of the first chunks."""

    stats: tuple[Tensor, Tensor | None, Tensor]
    table: Tensor
    kept: list[KeptLogits | None]


class KeptLogits(NamedTuple):
    values: Tensor  # [n, W], less `top`
    top: Tensor | None  # [n, 1]

    def restored(self, out: Tensor) -> Tensor:
        """The logits, in the first rows of `out`."""
        z = out[: self.values.shape[0]].copy_(self.values)
        return z if self.top is None else z.add_(self.top)


class _Chunk(NamedTuple):
    number: int
    hidden: Tensor
    logits: Tensor
    parts: Pending


def run_forward(
    case: HeadCase, resident: int = 0, then: Callable[[int, Tensor, Tensor, Forward], None] | None = None
) -> Forward:
    """Statistics of every row that carries loss; the others get zeros.

    Args:
        resident: how many chunks keep their logits.
        then: called with (chunk, its hidden states, its logits, everything so far) once a chunk's statistics are known; it
            may write over the logits.
    """
    total = case.targets.shape[0]
    zeros = torch.zeros(3 if case.entropy else 2, total, dtype=case.dtype, device=case.hidden.device)
    stats = zeros[0], zeros[2] if case.entropy else None, zeros[1]
    table = torch.zeros(total, 3 if case.entropy else 2, dtype=case.dtype, device=case.hidden.device)
    out = Forward(stats, table, [])

    def finish(chunk: _Chunk) -> None:
        gathered = chunk.parts.wait().view(-1, chunk.logits.shape[0], 4 if case.entropy else 3)
        *values, rows = combine_rows(gathered, case.spec(chunk.number), case.backend)
        places = case.rows.every(chunk.number)
        for whole, part in zip((*out.stats, table), (*values, rows), strict=True):
            if whole is not None and part is not None:
                whole.index_copy_(0, places, part)
        if chunk.number < resident:
            out.kept.append(_keep(case, chunk.logits))
        if then is not None:
            then(chunk.number, chunk.hidden, chunk.logits, out)

    overlap = group_size(case.group) > 1
    buffers = [case.buffer() for _ in range(2 if overlap and len(case.rows) > 1 else 1)]
    waiting: _Chunk | None = None
    on_its_way = case.fetch(0)
    for index in range(len(case.rows)):
        assert on_its_way is not None
        hidden = on_its_way.wait()
        on_its_way = case.fetch(index + 1)
        fresh = index < resident and kept_dtype(case.hidden.dtype) == case.dtype  # it is kept itself, not a copy
        z = case.logits(hidden, case.buffer() if fresh else buffers[index % len(buffers)])
        parts = row_parts(z, case.spec(index), case.entropy, case.backend)
        chunk = _Chunk(index, hidden, z, all_gather_start(parts, case.group))
        if waiting is not None:
            finish(waiting)
        if overlap:
            waiting = chunk
        else:
            finish(chunk)
    if waiting is not None:
        finish(waiting)
    return out


def _keep(case: HeadCase, z: Tensor) -> KeptLogits:
    if kept_dtype(case.hidden.dtype) == z.dtype:
        return KeptLogits(z, None)
    top = z.amax(1, keepdim=True) if z.shape[1] else z.new_zeros(z.shape[0], 1)
    return KeptLogits((z - top).to(torch.float16), top)


class Summed(NamedTuple):
    """Gradients of the flat hidden states [R, D], of the weight's real rows [W, D] and of the bias [W]; None: not asked for."""

    hidden: Tensor | None
    weight: Tensor | None
    bias: Tensor | None


class Gradients:
    """Gradients of hidden states, weight and bias, summed up chunk by chunk.

    Args:
        wanted: which of (hidden, weight, bias) to compute.
        weight: where the weight's gradient is added, [W, D] in float32 or wider; None makes a buffer.
        hidden_dtype: of the gradient of the hidden states.
    """

    def __init__(
        self, case: HeadCase, wanted: Sequence[bool], hidden_dtype: torch.dtype, weight: Tensor | None = None
    ) -> None:
        self.case = case
        of_hidden, of_weight, of_bias = wanted
        self.hidden = torch.zeros_like(case.hidden, dtype=hidden_dtype) if of_hidden else None
        self._blank = of_weight and weight is None  # the first product fills it: no zeros are written and read
        if self._blank:
            weight = torch.empty_like(case.weight, dtype=case.dtype)
        self.weight = weight if of_weight else None
        self.bias = torch.zeros_like(case.bias, dtype=case.dtype) if of_bias and case.bias is not None else None
        self._under_way: tuple[Tensor, Pending] | None = None

    def add(self, index: int, hidden: Tensor, z: Tensor, table: Tensor, upstream: Upstream) -> None:
        """Adds a chunk's gradients; its logits are overwritten. `table` and `upstream` are of all rows."""
        case, places = self.case, self.case.rows.every(index)
        dz = _logits_gradient(case, z, case.spec(index), table[places], _rows_of(upstream, places))
        if dz.is_cuda and dz.dtype != case.weight.dtype:
            dz = dz.to(case.weight.dtype)
        sending = None
        if self.hidden is not None:
            part = hidden_gradient(dz, case.weight, case.dtype)
            sending = case.rows.own(index), sum_start(part, case.group, case.scatter)
        if self.weight is not None:
            add_weight_gradient(self.weight, dz, hidden, self._blank)
            self._blank = False
        if self.bias is not None:
            self.bias.add_(dz.sum(0, dtype=self.bias.dtype))
        self._arrive()
        self._under_way = sending

    def close(self) -> Summed:
        """The sums, once nothing is under way."""
        self._arrive()
        if self._blank and self.weight is not None:
            self.weight.zero_()
        return Summed(self.hidden, self.weight, self.bias)

    def _arrive(self) -> None:
        if self._under_way is not None and self.hidden is not None:
            rows, part = self._under_way
            self.hidden.index_copy_(0, rows, part.wait().to(self.hidden.dtype))
        self._under_way = None


def _logits_gradient(case: HeadCase, z: Tensor, spec: RowSpec, rows: Tensor, upstream: Upstream) -> Tensor:
    if case.softcap is None:
        return row_gradient(z, spec, rows, *upstream, True, case.backend)
    block = max(1, _SLOPE_BLOCK // max(z.shape[1], 1))
    for start in range(0, z.shape[0], block):
        part = slice(start, start + block)
        inv_t = spec.inv_t if spec.inv_t.shape[0] == 1 else spec.inv_t[part]
        of_part = spec._replace(targets=spec.targets[part], keep=spec.keep[part], inv_t=inv_t)
        slope = 1 - (z[part] / case.softcap).square()
        row_gradient(z[part], of_part, rows[part], *_rows_of(upstream, part), True, case.backend).mul_(slope)
    return z


def _rows_of(upstream: Upstream, rows: Tensor | slice) -> Upstream:
    a, b, c = (None if g is None else g[rows] for g in upstream)
    return a, b, c


def run_backward(case: HeadCase, forward: Forward, upstream: Upstream, gradients: Gradients) -> Summed:
    """What `gradients` sums up over all chunks; kept logits are used up, the others projected again."""
    buffer: Tensor | None = None
    on_its_way = case.fetch(0)
    for index in range(len(case.rows)):
        assert on_its_way is not None
        hidden = on_its_way.wait()
        on_its_way = case.fetch(index + 1)
        kept = forward.kept[index] if index < len(forward.kept) else None
        if kept is not None and kept.top is None:
            z = kept.values
        else:
            buffer = case.buffer() if buffer is None else buffer
            z = case.logits(hidden, buffer) if kept is None else kept.restored(buffer)
        if kept is not None:
            forward.kept[index] = kept = None
        gradients.add(index, hidden, z, forward.table, upstream)
    return gradients.close()
