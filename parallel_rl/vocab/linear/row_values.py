"""Values of whole rows of logits, one per token, from hidden states in chunks, with gradients; a teacher's rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from parallel_rl.groups import all_gather_start, group_rank
from parallel_rl.vocab.backends.torch_backend import math_dtype, row_blocks
from parallel_rl.vocab.consumed import refuse_second_derivative
from parallel_rl.vocab.linear.autograd import ForwardGradients
from parallel_rl.vocab.linear.backward import Gradients
from parallel_rl.vocab.linear.gemm import WeightTarget
from parallel_rl.vocab.linear.lm_head import LMHeadInput
from parallel_rl.vocab.linear.params import LinearParams, project_rows
from parallel_rl.vocab.linear.plan import budget_bytes, columns_of_rank, rows_at_once

if TYPE_CHECKING:
    from torch import Tensor
    from torch.autograd.function import FunctionCtx

    from parallel_rl.vocab.linear.params import LossRows
    from parallel_rl.vocab.shards import VocabShard

#: (a span of the student's rows, their [n] places in logits order) → the teacher's logits [n, W] of the same tokens
TeacherRows = Callable[[slice, "Tensor"], "Tensor"]


def check_teacher_head(
    teacher: LMHeadInput, student: LMHeadInput, shard_of: Callable[[int], VocabShard], shard: VocabShard
) -> None:
    """Check a teacher's head against the student's, without values; hidden sizes and dtypes may differ.

    Args:
        shard_of: number of the weight's rows → their ids. shard: the student's.

    Raises:
        ValueError: inconsistent shapes or dtypes of the teacher; another device, tokens or columns than the student's;
            sequence parallelism that the student lacks; an option without effect on a teacher.
    """
    for name, value in (("mode", teacher.mode != "auto" and teacher.mode), ("budget", teacher.budget)):
        if value:
            raise ValueError(
                f"the teacher's {name} = {value!r} has no effect: both heads share the chunks that the student's {name} makes"
            )
    if teacher.main_grad_factor is not None:
        raise ValueError("the teacher's main_grad_factor has no effect, since a teacher gets no gradient; leave it out")
    if teacher.device != student.device:
        raise ValueError(f"the teacher's hidden states are on {teacher.device}, the student's on {student.device}")
    if teacher.sequence_parallel and not student.sequence_parallel:
        raise ValueError(
            "the teacher's sequence_parallel = True splits its hidden states as the student's are not split; give them whole"
        )
    try:
        teacher.check(shard.group, shard.vocab_size)
        of_teacher = shard_of(len(teacher.weight))
    except ValueError as error:
        raise ValueError(f"teacher_logits: {error}") from None
    if (of_teacher.start, of_teacher.valid) != (shard.start, shard.valid):
        raise ValueError(
            f"the teacher's head has {len(teacher.weight)} rows, which are token ids {_ids(of_teacher)}; the "
            f"student's {len(student.weight)} are token ids {_ids(shard)}, and both must be split alike"
        )


def _ids(shard: VocabShard) -> str:
    return f"[{shard.start}, {shard.start + shard.valid})"


def given_rows(logits: Tensor, shard: VocabShard) -> TeacherRows:
    return lambda span, places: logits[places, : shard.valid]


def projected_rows(
    teacher: LMHeadInput, rows: LossRows, places: Tensor, keep: Tensor, shard: VocabShard
) -> TeacherRows:
    """Project rows on demand; for rows without loss, hidden states of 0.

    Args:
        rows, places: the student's, and the place in logits order of each of its gathered rows [N].
        keep: [N] in logits order.
    """
    group, parts = shard.group, teacher.parts(shard.group)
    hidden = teacher.hidden.detach().flatten(0, -2)
    # where the teacher's hidden states hold each place: orders may differ, parts do not
    order = teacher.row_order(group).to_logits(torch.arange(len(keep), device=hidden.device))
    offset = group_rank(group) * rows.rows_per_part
    weight = teacher.weight.detach()[: shard.valid]
    bias = None if teacher.bias is None else teacher.bias.detach()[: shard.valid]

    def project(span: slice, at: Tensor) -> Tensor:
        if parts > 1:
            at = places[rows.own_gathered(span)]
        at_teacher = order[at] - offset if parts > 1 else order[at]
        chosen = torch.where(keep[at, None], hidden[at_teacher], 0)
        if parts > 1:
            chosen = all_gather_start(chosen, group).wait()
        out = torch.empty(len(chosen), shard.valid, dtype=math_dtype(chosen.dtype), device=chosen.device)
        return project_rows(chosen, weight, bias, teacher.scaled_softcap, out).mul_(teacher.logit_scale)

    return project


#: (logits [n, W], places [n] in logits order, the teacher's logits [n, W] or None) → values [n], or [n, C]: the value, then
#: measures without gradient
RowFunction = Callable[["Tensor", "Tensor", "Tensor | None"], "Tensor"]


def row_values(
    head: LMHeadInput,
    keep: Tensor,
    shard: VocabShard,
    function: RowFunction,
    teacher: LMHeadInput | Tensor | None = None,
    slope: Tensor | None = None,
    in_place: bool = False,
    columns: int | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Compute a value of each row of logits with loss, and its gradient, without whole logits.

    With a `slope`, ∂loss/∂value, gradients are computed in forward from each chunk's logits. Otherwise, and for float16 hidden
    states, whose loss scale comes after the slope, backward re-projects the logits and repeats collectives of `function`.

    Args:
        head: the student's. keep: [N] rows with loss, in logits order. slope: [N].
        function: differentiable in the logits, without padding columns.
        teacher: of the same tokens, without gradient: a second head or [N, V/tp] logits.
        in_place: `function` writes its gradient over the logits; wrong with a soft cap.
        columns: C, if `function` returns that many; None: [n].

    Returns:
        values [N] or [N, C], 0 in rows without loss, and None; with gradients computed in forward, values without gradient and
            an exact 0 that has it.
    """
    call = RowCall.of(head, keep, shard, function, teacher, chunk_size(head, shard, teacher, in_place), columns)
    zero = None
    if not head.needs_gradient:
        values = call.run(None)
    elif slope is None or head.mode == "recompute" or head.hidden.dtype == torch.float16:
        values = _InBackward.apply(head.hidden, head.weight, head.bias, call)
    else:
        zero, values = _InForward.apply(head.hidden, head.weight, head.bias, call, slope)
    excess = call.params.rows.excess
    return values if excess is None else values.masked_fill(excess, torch.nan), zero


@dataclass(frozen=True)
class RowCall:
    """One call of `row_values`: the student's rows in chunks of `size` a part."""

    params: LinearParams
    target: WeightTarget
    places: Tensor  # [N] of gathered rows, in logits order
    function: RowFunction
    teacher: TeacherRows | None
    size: int
    columns: int | None

    @classmethod
    def of(
        cls,
        head: LMHeadInput,
        keep: Tensor,
        shard: VocabShard,
        function: RowFunction,
        teacher: LMHeadInput | Tensor | None,
        size: int,
        columns: int | None,
    ) -> RowCall:
        order = head.row_order(shard.group)
        kept, no_targets = order.to_rows(keep), torch.zeros_like(keep, dtype=torch.int64)
        params = LinearParams.of(head, shard, no_targets, kept, None, mode="recompute", keeps=False)
        places = order.to_rows(torch.arange(len(keep), device=keep.device))
        teacher_rows: TeacherRows | None = None
        if isinstance(teacher, LMHeadInput):
            teacher_rows = projected_rows(teacher, params.rows, places, keep, shard)
        elif teacher is not None:
            teacher_rows = given_rows(teacher.detach(), shard)
        target = WeightTarget(head.weight, head.main_grad_factor)
        return cls(params, target, places, function, teacher_rows, size, columns)

    def run(self, gradients: Gradients | None, slope: Tensor | None = None) -> Tensor:
        """Compute [N] or [N, C] values, and add gradients of Σ slope · value, with slope in logits order."""
        shape = (len(self.places),) if self.columns is None else (len(self.places), self.columns)
        params, values = self.params, torch.zeros(shape, dtype=self.dtype, device=self.places.device)
        spans = params.rows.spans(self.size)
        buffer = params.buffer(self.size, params.shard.valid)
        for span, hidden, _ in params.fetched(spans):
            at = self.places[params.rows.gathered(span)]
            z = params.logits(hidden, buffer, params.columns).detach()
            of_teacher = None if self.teacher is None else self.teacher(span, at)
            with torch.set_grad_enabled(gradients is not None):
                of_rows = self.function(z.requires_grad_(gradients is not None), at, of_teacher)
                value = of_rows if self.columns is None else of_rows[:, 0]
            values.index_copy_(0, at, of_rows.detach())
            if gradients is not None:
                assert slope is not None
                (dz,) = torch.autograd.grad(value, z, slope[at].to(of_rows.dtype))
                del of_rows, value, of_teacher
                gradients.add_products([span], hidden, [params.columns], lambda _, z=z, dz=dz: self._sloped(z, dz))  # type: ignore[misc]
        return values

    @property
    def dtype(self) -> torch.dtype:
        return math_dtype(self.params.hidden.dtype)

    def _sloped(self, z: Tensor, dz: Tensor) -> Tensor:
        """Return the gradient before the soft cap, in the products' dtype."""
        if self.params.softcap is not None:
            for part in row_blocks(z):
                dz[part].mul_((1 - (z.detach()[part] / self.params.softcap).square_()).clamp_(min=0))
        return dz if dz.device.type == "cpu" else dz.to(self.params.weight.dtype)


def chunk_size(
    head: LMHeadInput, shard: VocabShard, teacher: LMHeadInput | Tensor | None, in_place: bool = False
) -> int:
    """Return the rows a part of each chunk, alike on all ranks; ValueError if the budget fits no row."""
    dtype, parts = math_dtype(head.hidden.dtype), head.parts(shard.group)
    width = columns_of_rank(shard.valid, shard.vocab_size, shard.group)
    of_teacher = 0 if teacher is None else math_dtype(_dtype(teacher)).itemsize
    # the logits, their gradient, and the teacher's logits
    cost = parts * width * ((1 if in_place else 2) * dtype.itemsize + of_teacher)
    cost += parts * 4 * head.hidden.shape[-1] * dtype.itemsize
    if isinstance(teacher, LMHeadInput):
        cost += parts * 2 * teacher.hidden.shape[-1] * of_teacher
    room = budget_bytes(head.budget, head.device)
    if room < cost and head.budget is not None:
        raise ValueError(
            f"budget = {head.budget} bytes is too small for one row of logits with its gradient, and the teacher's row, "
            f"{cost} bytes at {width} columns"
        )
    return rows_at_once(head.hidden.flatten(0, -2).shape[0], cost, room)


def _dtype(teacher: LMHeadInput | Tensor) -> torch.dtype:
    return teacher.hidden.dtype if isinstance(teacher, LMHeadInput) else teacher.dtype


class _InForward(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: FunctionCtx, hidden: Tensor, weight: Tensor, bias: Tensor | None, call: RowCall, slope: Tensor
    ) -> tuple[Tensor, Tensor]:
        gradients = Gradients(call.params, ctx.needs_input_grad[:3])  # type: ignore[attr-defined]
        values = call.run(gradients, slope)
        ctx.gradients = ForwardGradients(  # type: ignore[attr-defined]
            gradients.close(), call.target, hidden.shape, bias, call.params.shard
        )
        ctx.mark_non_differentiable(values)
        return torch.zeros((), dtype=call.dtype, device=hidden.device), values

    @staticmethod
    def backward(ctx: FunctionCtx, upstream: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        return *ctx.gradients.scaled(upstream), None, None  # type: ignore[attr-defined]


class _InBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, hidden: Tensor, weight: Tensor, bias: Tensor | None, call: RowCall) -> Tensor:
        values = call.run(None)
        ctx.save_for_backward(hidden, weight, bias)  # type: ignore[arg-type]
        # without the operands: `save_for_backward` frees its tensors with the graph and checks them for changes
        ctx.call = replace(call, params=replace(call.params, hidden=None, weight=None, bias=None))  # type: ignore[attr-defined, arg-type]
        return values

    @staticmethod
    def backward(ctx: FunctionCtx, upstream: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative("values of rows have")
        hidden, weight, bias = ctx.saved_tensors  # type: ignore[attr-defined]
        call: RowCall = ctx.call  # type: ignore[attr-defined]
        call = replace(call, params=call.params.with_operands(hidden, weight, bias))
        gradients = Gradients(call.params, ctx.needs_input_grad[:3])  # type: ignore[attr-defined]
        upstream = upstream if call.columns is None else upstream[:, 0]
        call.run(gradients, upstream)
        gathered = ForwardGradients(gradients.close(), call.target, hidden.shape, bias, call.params.shard)
        return *gathered.scaled(upstream.new_ones(())), None
