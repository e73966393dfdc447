"""Gradients of the LM head: computed in forward and scaled in backward, or computed in backward."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from parallel_rl.agreement import check_replicated, raise_on_all_ranks
from parallel_rl.groups import group_size
from parallel_rl.validation import checks_values
from parallel_rl.vocab.backends.passes import OutputGrads
from parallel_rl.vocab.consumed import refuse_second_derivative
from parallel_rl.vocab.linear.backward import Gradients, Summed, backward_spans, run_backward
from parallel_rl.vocab.linear.forward import Chunks, Forward, run_forward
from parallel_rl.vocab.linear.gemm import WeightTarget, padded, scaled_to_
from parallel_rl.vocab.linear.params import LinearParams, RowStats

if TYPE_CHECKING:
    from torch import Tensor
    from torch.autograd.function import FunctionCtx
    from torch.distributed import ProcessGroup

    from parallel_rl.vocab.linear.lm_head import LMHeadInput
    from parallel_rl.vocab.shards import VocabShard

_ROUNDING = 1e-4  # of recomputed gradients


@dataclass(frozen=True)
class ForwardObjective:
    """Sum over tokens whose gradients are computed in forward."""

    # [N] (log-prob, entropy, lse) so far, zeros where unknown → the objective's gradients with respect to them
    gradients: Callable[[RowStats], OutputGrads]
    context_group: ProcessGroup | None  # `gradients` may communicate over it; its ranks may hold other numbers of rows

    def calls(self, params: LinearParams) -> int:
        """Return how often every rank of the context group calls `gradients`."""
        return 0 if group_size(self.context_group) == 1 else -(-params.hidden.shape[0] // params.rows_together)


def in_backward(params: LinearParams, head: LMHeadInput) -> RowStats:
    """Compute statistics with gradients from kept or re-projected logits in backward."""
    target = WeightTarget(head.weight, head.main_grad_factor)
    stats: RowStats = _InBackward.apply(head.hidden, head.weight, head.bias, params, target)
    return stats


def in_forward(params: LinearParams, head: LMHeadInput, objective: ForwardObjective) -> tuple[Tensor, RowStats]:
    """Compute an exact 0 with the objective's gradient, and statistics; ValueError if not separable."""
    target = WeightTarget(head.weight, head.main_grad_factor)
    zero, *stats = _InForward.apply(head.hidden, head.weight, head.bias, params, objective, target)
    return zero, tuple(stats)


class _InBackward(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: FunctionCtx,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        params: LinearParams,
        target: WeightTarget,
    ) -> RowStats:
        forward = run_forward(params)
        ctx.save_for_backward(hidden, weight, bias, forward.table, forward.floor)  # type: ignore[arg-type]
        # without the operands: `save_for_backward` frees its tensors with the graph and checks them for changes
        ctx.params = replace(params, hidden=None, weight=None, bias=None)  # type: ignore[attr-defined, arg-type]
        ctx.kept, ctx.used, ctx.target = forward.kept, False, target  # type: ignore[attr-defined]
        ctx.set_materialize_grads(False)
        if forward.stats[3] is not None:
            ctx.mark_non_differentiable(forward.stats[3])
        return forward.stats

    @staticmethod
    def backward(
        ctx: FunctionCtx, g_logprobs: Tensor | None, g_entropy: Tensor | None, g_lse: Tensor | None, _: None
    ) -> tuple[Tensor | None, ...]:
        refuse_second_derivative("token statistics have")
        upstream = g_logprobs, g_entropy, g_lse
        hidden, weight, bias, table, floor = ctx.saved_tensors  # type: ignore[attr-defined]
        check_replicated(upstream, ctx.params.shard.group, table[:, 0])  # type: ignore[attr-defined]
        if all(g is None for g in upstream):
            return (None,) * 5
        kept: list = ctx.kept  # type: ignore[attr-defined]
        if ctx.used and kept:  # type: ignore[attr-defined]
            raise RuntimeError("the first backward used up the kept logits; mode='recompute' allows a second one")
        ctx.used = True  # type: ignore[attr-defined]
        params: LinearParams = ctx.params.with_operands(hidden, weight, bias)  # type: ignore[attr-defined]
        target: WeightTarget = ctx.target  # type: ignore[attr-defined]
        wanted = ctx.needs_input_grad[:3]  # type: ignore[attr-defined]
        into = target.rows(params.weight.shape[0]) if wanted[1] else None
        direct = target.direct(params.weight.shape[0], params.dtype) if wanted[1] else None
        forward = Forward((table, None, table, None), table, floor, kept)
        at_once = into is None and len(backward_spans(params)) <= 1
        summed = run_backward(params, forward, upstream, Gradients(params, wanted, direct, at_once))
        of_weight = summed.weight
        if into is not None and direct is None:
            assert of_weight is not None
            into.add_(of_weight, alpha=target.factor)
        elif of_weight is not None and into is None:
            of_weight = scaled_to_(of_weight, None, weight.dtype)
        of_hidden = None if summed.hidden is None else summed.hidden.view(hidden.shape)
        return of_hidden, target.result(of_weight) if wanted[1] else None, padded(summed.bias, bias), None, None


class _InForward(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: FunctionCtx,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        params: LinearParams,
        objective: ForwardObjective,
        target: WeightTarget,
    ) -> tuple[Tensor | None, ...]:
        wanted = ctx.needs_input_grad[:3]  # type: ignore[attr-defined]
        at_once = params.grad_in_operand_dtype and len(params.rows.spans(params.rows_together)) <= 1
        gradients = Gradients(params, wanted, at_once=at_once)
        used: list[tuple[list[slice], OutputGrads]] = []

        def then(chunks: Chunks, so_far: Forward) -> None:
            upstream = objective.gradients(so_far.stats)
            check_replicated(upstream, params.shard.group, so_far.stats[0])
            used.append((chunks.spans, upstream))
            logits = lambda _: (chunks.logits, chunks.tops)  # noqa: E731
            gradients.add(chunks.spans, chunks.hidden, [params.columns], logits, so_far.table, upstream)

        forward = run_forward(params, then=then)
        calls = objective.calls(params)
        for _ in range(calls - len(used)):
            objective.gradients(forward.stats)
        if checks_values(hidden) and (calls or len(used) > 1):
            known = objective.gradients(forward.stats)
            groups = [params.shard.group, objective.context_group]
            raise_on_all_ranks(lambda: _check_separable(params, used, known), groups, hidden)
        ctx.gradients = ForwardGradients(gradients.close(), target, hidden.shape, bias, params.shard)  # type: ignore[attr-defined]
        stats = [s for s in forward.stats if s is not None]
        ctx.mark_non_differentiable(*stats)
        return torch.zeros((), dtype=params.dtype, device=hidden.device), *forward.stats

    @staticmethod
    def backward(ctx: FunctionCtx, upstream: Tensor, *_: Tensor | None) -> tuple[Tensor | None, ...]:
        return *ctx.gradients.scaled(upstream), None, None, None  # type: ignore[attr-defined]


@dataclass
class ForwardGradients:
    """Gradients computed in forward, waiting for backward's factor, the upstream scalar."""

    summed: Summed | None
    target: WeightTarget
    shape: torch.Size  # of hidden, as the caller holds it
    bias: Tensor | None
    shard: VocabShard

    def scaled(self, upstream: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Scale in place and return the gradients for autograd; RuntimeError for a second call."""
        refuse_second_derivative("token statistics have")
        check_replicated([upstream], self.shard.group, upstream)
        if self.summed is None:
            raise RuntimeError(
                "the first backward scaled the gradient that was computed in forward; mode='recompute' allows a second one"
            )
        of_hidden, of_weight, of_bias = self.summed
        self.summed, target = None, self.target
        if of_hidden is not None:
            of_hidden = scaled_to_(of_hidden, upstream, of_hidden.dtype, self.shard.backend).view(self.shape)
        if of_weight is not None:
            into = target.rows(of_weight.shape[0])
            if into is None or target.factor is None:
                of_weight = scaled_to_(of_weight, upstream, target.weight.dtype, self.shard.backend)
            else:
                into.addcmul_(of_weight, upstream, value=target.factor)
            of_weight = target.result(of_weight)
        if of_bias is not None:
            of_bias = padded(of_bias.mul_(upstream), self.bias)
        return of_hidden, of_weight, of_bias


def _check_separable(params: LinearParams, used: list[tuple[list[slice], OutputGrads]], known: OutputGrads) -> None:
    """Raise ValueError if a chunk's gradients change once later chunks are known."""
    for spans, upstream in used:
        indices = torch.arange(len(params.keep), device=params.keep.device)[params.rows.gathered(*spans)]
        indices = indices[params.keep[indices]]
        for then, now in zip(upstream, known, strict=True):
            before = torch.zeros_like(indices, dtype=params.dtype) if then is None else then[indices]
            after = torch.zeros_like(before) if now is None else now[indices]
            apart = ~torch.isclose(before, after, rtol=_ROUNDING, atol=0, equal_nan=True)
            if bool(apart.any()):
                row = int(apart.nonzero()[0])
                raise ValueError(
                    f"the objective is not a sum over tokens: the gradient of row {int(indices[row])} was {float(before[row])} "
                    f"and became {float(after[row])} when other rows were known. mode = 'in_forward' needs terms of single "
                    "tokens; 'resident' and 'recompute' take any objective"
                )
