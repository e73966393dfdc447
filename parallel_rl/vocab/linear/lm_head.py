"""Hidden states and LM head in place of logits, and whole logits for losses that read the whole distribution."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from parallel_rl.groups import all_gather_start, group_size, sum_start
from parallel_rl.validation import checks_values
from parallel_rl.vocab.backends.torch_backend import math_dtype
from parallel_rl.vocab.consumed import refuse_second_derivative, refuse_transforms
from parallel_rl.vocab.dtensor import check_plain
from parallel_rl.vocab.linear.gemm import WeightTarget, add_hidden_gradient, project
from parallel_rl.vocab.linear.plan import HeadShape, LinearMode, check_mode, columns_of_rank, make_plan
from parallel_rl.vocab.shards import check_logit_scale

if TYPE_CHECKING:
    from torch import Tensor
    from torch.autograd.function import FunctionCtx
    from torch.distributed import ProcessGroup


@dataclass(frozen=True, eq=False)
class LMHeadInput:
    """Hidden states and LM head in place of logits: the first argument of a loss, or of `token_logprobs`.

    Losses on log-probs and entropy, also of a truncated policy, and distillation project rows in chunks, including a
    teacher's `LMHeadInput` in `data["teacher_logits"]`. A process reward model, and components with a distillation, compute
    whole logits, which must fit into `budget`, if given.

    The gradient of `hidden` is summed over tensor ranks (reduce-scattered under sequence parallelism), as by a
    column-parallel layer: do not sum it again.

    >>> head = LMHeadInput(torch.zeros(2, 5, 8), torch.zeros(100, 8))  # hidden [B, S, D], weight [V, D]
    >>> head.logits_like(None).shape
    torch.Size([2, 5, 100])

    Attributes:
        hidden: [B, S/cp, D], packed [1, T/cp, D]; under sequence parallelism this tensor rank's part of the second dimension.
            bfloat16, float16, float32 or float64.
        weight: [V/tp, D] this rank's rows of the head's (or tied embeddings') matrix, in the dtype of `hidden`.
        bias: [V/tp].
        softcap: c of logits c·tanh(z/c), before the temperature.
        sequence_first: `hidden` is [S/cp, B, D], as in Megatron.
        sequence_parallel: `hidden` is split over tensor ranks along the sequence, and gathered in chunks.
        mode: "auto", "in_forward", "resident" or "recompute", see `linear_token_stats`.
        budget: bytes beyond the gradients and in_forward's float32 sum of the weight's, or what it keeps in the sum's place;
            None: on a GPU 2 GiB, or less if 1.5 % of it is less; 64 MiB elsewhere.
        rows: upper bound of the rows with loss in any rank's `hidden`; the others are not projected. A CPU counts them
            itself; more rows than the bound make every log-prob NaN (an error where values are checked).
        main_grad_factor: f: backward adds f × the weight's gradient to `weight.main_grad` in that tensor's dtype and gives
            autograd zeros (Megatron's gradient accumulation fusion, f = 1). None: the gradient goes through autograd.
        logit_scale: s of logits s·z, before the soft cap (Cohere's logit_scale; Granite's 1 / logits_scaling).
    """

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None = None
    softcap: float | None = None
    sequence_first: bool = False
    sequence_parallel: bool = False
    mode: LinearMode = "auto"
    budget: int | None = None
    rows: int | None = None
    main_grad_factor: float | None = None
    logit_scale: float = 1.0

    @property
    def scaled_softcap(self) -> float | None:
        """Return c / s: s·z with soft cap c equals s times z with soft cap c / s, so the scale comes last."""
        return None if self.softcap is None else self.softcap / self.logit_scale

    @property
    def device(self) -> torch.device:
        return self.hidden.device

    @property
    def needs_gradient(self) -> bool:
        operands = (self.hidden, self.weight, self.bias)
        return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in operands)

    def parts(self, group: ProcessGroup | None) -> int:
        """Return the number of ranks that share the rows of `hidden`."""
        return group_size(group) if self.sequence_parallel else 1

    def row_order(self, group: ProcessGroup | None) -> RowOrder:
        """Return the order of the hidden rows; flat rows [R, D] are one sequence."""
        sequences, width = (1, *self.hidden.shape[:-1])[-2:][:: -1 if self.sequence_first else 1]
        parts = self.parts(group)
        return RowOrder(sequences, width * parts, parts, self.sequence_first)

    def logits_like(self, group: ProcessGroup | None) -> Tensor:
        """Return a tensor of the logits' shape, dtype and device without memory; `hidden` if shapes are wrong."""
        if self.hidden.dim() != 3 or self.weight.dim() != 2:
            return self.hidden
        order = self.row_order(group)
        return self.hidden.new_zeros(()).expand(order.sequences, order.width, self.weight.shape[0])

    def check(self, group: ProcessGroup | None, vocab_size: int | None) -> None:
        """Check shapes, dtypes, mode and budget without reading a value; ValueError for a wrong one."""
        hidden, weight, bias = self.hidden, self.weight, self.bias
        for name, x in (("hidden", hidden), ("weight", weight), ("bias", bias)):
            check_plain(name, x)
        refuse_transforms(hidden, weight)
        if not hidden.is_floating_point() or hidden.dim() < 2:
            raise ValueError(f"hidden must be floating point [..., D], got {hidden.dtype} {list(hidden.shape)}")
        if weight.dim() != 2 or weight.shape[1] != hidden.shape[-1]:
            raise ValueError(
                f"weight has shape {list(weight.shape)}; hidden {list(hidden.shape)} calls for [V/tp, {hidden.shape[-1]}]"
            )
        if weight.dtype != hidden.dtype or weight.device != hidden.device:
            raise ValueError(
                f"weight is {weight.dtype} on {weight.device}, hidden {hidden.dtype} on {hidden.device}; they must be the same"
            )
        if bias is not None and (bias.shape != weight.shape[:1] or not bias.is_floating_point()):
            raise ValueError(
                f"bias must be floating point [{weight.shape[0]}], one per row of the weight, got {bias.dtype} "
                f"{list(bias.shape)}"
            )
        if self.softcap is not None and not self.softcap > 0:
            raise ValueError(f"softcap = {self.softcap} must be positive; None leaves the logits as they are")
        check_logit_scale(self.logit_scale)
        if self.sequence_parallel and group_size(group) == 1:
            raise ValueError("sequence_parallel = True splits hidden over a tensor group; without one leave it out")
        if self.main_grad_factor is not None and not isinstance(getattr(weight, "main_grad", None), torch.Tensor):
            raise ValueError(
                f"main_grad_factor = {self.main_grad_factor} needs weight.main_grad, which Megatron's data parallel "
                "wrapper makes; without it the gradient goes through autograd"
            )
        check_mode(self.mode, self.budget, self.rows)
        if self.mode == "in_forward" and hidden.dtype == torch.float16:
            raise ValueError(
                "mode = 'in_forward' is incompatible with float16: the loss scale comes after the gradient, which underflows "
                "without it; use 'resident' or 'recompute'"
            )
        width = columns_of_rank(weight.shape[0], vocab_size, group)
        make_plan(self.plan_shape(group, width), self.mode, self.budget)

    def plan_shape(self, group: ProcessGroup | None, width: int) -> HeadShape:
        """Return the sizes for a plan at `width` columns a rank, except those that only the call knows."""
        *rows, size = self.hidden.shape
        shared, parts = group_size(group) > 1, self.parts(group)
        return HeadShape(math.prod(rows), size, width, self.hidden.dtype, self.hidden.device, shared, parts)

    def check_rows(self, keep: Tensor, group: ProcessGroup | None) -> None:
        """Raise ValueError, where values are checked, if more than `rows` rows of keep [N] carry loss."""
        if self.rows is None or not checks_values(keep) or not keep.numel():
            return
        most = int(self.row_order(group).to_rows(keep).view(self.parts(group), -1).sum(1).max())
        if most > self.rows:
            raise ValueError(
                f"rows = {self.rows} is too few: {most} rows of one rank's hidden states are scored; raise rows, or leave it "
                "out"
            )


@dataclass(frozen=True)
class RowOrder:
    """Orders of N = sequences · width tokens: of logits, and of hidden rows gathered part by part."""

    sequences: int
    width: int  # tokens of a sequence, of all parts
    parts: int  # ranks that each sequence is split over
    sequence_first: bool  # a part's rows are [width / parts, sequences]

    def to_rows(self, x: Tensor) -> Tensor:
        """Reorder [N, ...] from logits to hidden rows."""
        if self._alike:
            return x
        x = x.view(self.sequences, self.parts, self.width // self.parts, *x.shape[1:])
        order = (1, 2, 0) if self.sequence_first else (1, 0, 2)
        return x.permute(*order, *range(3, x.dim())).flatten(0, 2)

    def to_logits(self, x: Tensor) -> Tensor:
        """Reorder [N, ...] from hidden rows to logits."""
        if self._alike:
            return x
        sizes = self.width // self.parts, self.sequences
        x = x.view(self.parts, *(sizes if self.sequence_first else sizes[::-1]), *x.shape[1:])
        order = (2, 0, 1) if self.sequence_first else (1, 0, 2)
        return x.permute(*order, *range(3, x.dim())).flatten(0, 2)

    @property
    def _alike(self) -> bool:
        return self.sequences == 1 or (self.parts == 1 and not self.sequence_first)


def split_output(output: Tensor | LMHeadInput, group: ProcessGroup | None) -> tuple[LMHeadInput | None, Tensor]:
    """Split a model's output into a head, if it is one, and logits or `logits_like`."""
    if isinstance(output, LMHeadInput):
        return output, output.logits_like(group)
    return None, output


def split_fields(
    fields: Mapping[str, Tensor | LMHeadInput], group: ProcessGroup | None
) -> tuple[dict[str, Tensor], dict[str, LMHeadInput]]:
    """Split data into tensors, with `logits_like` for each head, and heads."""
    heads = {name: field for name, field in fields.items() if isinstance(field, LMHeadInput)}
    return {name: split_output(field, group)[1] for name, field in fields.items()}, heads


def whole_logits(head: LMHeadInput, keep: Tensor, valid: int, group: ProcessGroup | None) -> Tensor:
    """Project to logits [B, S/cp, V/tp], with gradient; 0 in padding columns and rows without loss.

    Logits, their gradient and all sums are float32 (float64 for float64 operands). `keep` [B · S/cp] marks rows with loss, and
    `valid` is the number of real rows of the weight.
    """
    order = head.row_order(group)
    keep = order.to_rows(keep)
    target = WeightTarget(head.weight, head.main_grad_factor)
    z: Tensor = _Project.apply(head.hidden, head.weight, head.bias, keep, target, valid, group, head.sequence_parallel)
    if head.logit_scale != 1:
        z = head.logit_scale * z
    if head.softcap is not None:
        z = head.softcap * torch.tanh(z / head.softcap)
    return order.to_logits(z).view(order.sequences, order.width, head.weight.shape[0])


def check_whole(head: LMHeadInput, group: ProcessGroup | None) -> None:
    """Raise ValueError for a mode without whole logits, or a budget that does not hold them."""
    if head.mode not in ("auto", "resident"):
        raise ValueError(
            f"mode = {head.mode!r} is incompatible with a loss that reads whole logits; leave it at 'auto'"
        )
    size = head.logits_like(group).numel() * math_dtype(head.hidden.dtype).itemsize
    if head.budget is not None and size > head.budget:
        raise ValueError(
            f"budget = {head.budget} bytes does not hold the whole logits that this loss reads, {size} bytes"
        )


class _Project(torch.autograd.Function):
    """Logits [N, V/tp] of all parts' rows; hidden gradients are summed over the ranks that share them."""

    @staticmethod
    def forward(
        ctx: FunctionCtx,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        keep: Tensor,
        target: WeightTarget,
        valid: int,
        group: ProcessGroup | None,
        scatter: bool,
    ) -> Tensor:
        rows = hidden.reshape(-1, hidden.shape[-1])
        rows = torch.where(keep[:, None], all_gather_start(rows, group).wait() if scatter else rows, 0)
        z = torch.empty(len(rows), valid, dtype=math_dtype(hidden.dtype), device=hidden.device)
        project(rows, weight[:valid], z)
        if bias is not None:
            z.add_(bias[:valid])
        ctx.save_for_backward(rows, weight, keep)
        ctx.shape, ctx.bias = hidden.shape, None if bias is None else bias.dtype  # type: ignore[attr-defined]
        ctx.target, ctx.valid, ctx.group, ctx.scatter = target, valid, group, scatter  # type: ignore[attr-defined]
        return torch.nn.functional.pad(z, (0, weight.shape[0] - valid))

    @staticmethod
    def backward(ctx: FunctionCtx, gradient: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative("whole logits of an LM head have")
        rows, weight, keep = ctx.saved_tensors  # type: ignore[attr-defined]
        valid: int = ctx.valid  # type: ignore[attr-defined]
        of_hidden, of_weight, of_bias = ctx.needs_input_grad[:3]  # type: ignore[attr-defined]
        dz = torch.where(keep[:, None], gradient[:, :valid], 0)
        d_hidden = d_weight = d_bias = None
        if of_bias:
            d_bias = gradient.new_zeros(weight.shape[0], dtype=ctx.bias)  # type: ignore[attr-defined]
            d_bias[:valid] = dz.sum(0)
        dz = dz if dz.device.type == "cpu" else dz.to(weight.dtype)  # the products' dtype
        if of_hidden:
            sums = torch.zeros(rows.shape, dtype=gradient.dtype, device=rows.device)
            add_hidden_gradient(sums, dz, weight[:valid])
            sums = sum_start(sums, ctx.group, ctx.scatter).wait()  # type: ignore[attr-defined]
            d_hidden = sums.to(rows.dtype).view(ctx.shape)  # type: ignore[attr-defined]
        if of_weight:
            d_weight = ctx.target.add(dz, rows, valid)  # type: ignore[attr-defined]
        return d_hidden, d_weight, d_bias, *(None,) * 5
