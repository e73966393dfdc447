"""Gradients of the fused head: computed in forward and scaled in backward, or computed in backward."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from parallel_rl.agreement import check_replicated, raise_on_all_ranks
from parallel_rl.validation import checks_values
from parallel_rl.vocab.linear.forward_backward import (
    Chunks,
    Forward,
    Gradients,
    backward_spans,
    run_backward,
    run_forward,
)
from parallel_rl.vocab.linear.gemm import scaled_to_
from parallel_rl.vocab.linear.params import LinearParams, OutputGrads

if TYPE_CHECKING:
    from torch import Tensor
    from torch.autograd.function import FunctionCtx
    from torch.distributed import ProcessGroup

_ROUNDING = 1e-4  # of coefficients that are computed again from the same numbers

#: [N] (log-prob, entropy, lse) so far, zeros where unknown → gradients of the loss with respect to them
Coefficients = Callable[[tuple["Tensor", "Tensor | None", "Tensor"]], OutputGrads]


@dataclass(frozen=True)
class WeightTarget:
    """Where the gradient of the weight goes: None, through autograd; else factor × gradient is added to `weight.main_grad`."""

    weight: Tensor  # [W, D] as the caller holds it, padding columns included
    factor: float | None

    def rows(self, valid: int) -> Tensor | None:
        """The rows of `main_grad` that hold real columns."""
        if self.factor is None:
            return None
        main: Tensor = self.weight.main_grad  # type: ignore[attr-defined]
        return main[:valid]

    def result(self, gradient: Tensor | None) -> Tensor | None:
        """What autograd is given: the gradient, with zeros for padding columns, or a stand-in that Megatron's hooks expect."""
        if self.factor is not None:
            self.weight.grad_added_to_main_grad = True  # type: ignore[attr-defined]
            return torch.zeros_like(self.weight)
        return _padded(gradient, self.weight)


def no_gradient(case: LinearParams) -> tuple[Tensor, Tensor | None, Tensor]:
    return run_forward(case).stats


def in_backward(
    case: LinearParams, hidden: Tensor, target: WeightTarget, bias: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Statistics whose gradients are computed in backward, from kept logits or from logits projected again."""
    stats: tuple[Tensor, Tensor | None, Tensor] = _InBackward.apply(
        hidden, target.weight, bias, replace(case, hidden=case.hidden.detach()), target
    )
    return stats


def in_forward(
    case: LinearParams,
    coefficients: Coefficients,
    context_group: ProcessGroup | None,
    calls: int,
    hidden: Tensor,
    target: WeightTarget,
    bias: Tensor | None,
) -> tuple[Tensor, tuple[Tensor, Tensor | None, Tensor]]:
    """(an exact 0 that carries the gradient, statistics without gradient).

    Args:
        coefficients: evaluated as rows become known, and then until it ran `calls` times: ranks of other groups may hold more
            rows that carry loss, and a loss may communicate with them, over `context_group`.

    Raises:
        ValueError: where values are checked, a token's coefficients that depend on other tokens.
    """
    zero, *stats = _InForward.apply(
        hidden, target.weight, bias, case, coefficients, context_group, calls, target
    )  # fmt: skip
    return zero, tuple(stats)


class _InBackward(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: FunctionCtx,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        case: LinearParams,
        target: WeightTarget,
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        forward = run_forward(case)
        ctx.save_for_backward(hidden, weight, bias, forward.table)  # type: ignore[arg-type]
        # Without the operands: what `save_for_backward` holds is freed with the graph, and checked for changes.
        ctx.case = replace(case, hidden=None, weight=None, bias=None)  # type: ignore[attr-defined, arg-type]
        ctx.kept, ctx.used, ctx.target = forward.kept, False, target  # type: ignore[attr-defined]
        ctx.set_materialize_grads(False)
        return forward.stats

    @staticmethod
    def backward(
        ctx: FunctionCtx, g_logprobs: Tensor | None, g_entropy: Tensor | None, g_lse: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        _refuse_second_derivative()
        upstream = g_logprobs, g_entropy, g_lse
        hidden, weight, bias, table = ctx.saved_tensors  # type: ignore[attr-defined]
        check_replicated(upstream, ctx.case.shard.group, table[:, 0])  # type: ignore[attr-defined]
        if all(g is None for g in upstream):
            return (None,) * 5
        kept: list = ctx.kept  # type: ignore[attr-defined]
        if ctx.used and kept:  # type: ignore[attr-defined]
            raise RuntimeError("the first backward used up the kept logits; mode='recompute' allows a second one")
        ctx.used = True  # type: ignore[attr-defined]
        case = with_operands(ctx.case, hidden, weight, bias)  # type: ignore[attr-defined]
        target: WeightTarget = ctx.target  # type: ignore[attr-defined]
        wanted = ctx.needs_input_grad[:3]  # type: ignore[attr-defined]
        into = target.rows(case.weight.shape[0]) if wanted[1] else None
        direct = into if into is not None and target.factor == 1 and into.dtype == case.dtype else None
        forward = Forward((table, None, table), table, kept)
        at_once = into is None and len(backward_spans(case)) <= 1
        summed = run_backward(case, forward, upstream, Gradients(case, wanted, direct, at_once))
        of_weight = summed.weight
        if into is not None and direct is None:
            assert of_weight is not None
            into.add_(of_weight, alpha=target.factor)
        elif of_weight is not None and into is None:
            of_weight = scaled_to_(of_weight, None, weight.dtype)
        of_hidden = None if summed.hidden is None else summed.hidden.view(hidden.shape)
        return of_hidden, target.result(of_weight) if wanted[1] else None, _padded(summed.bias, bias), None, None


class _InForward(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: FunctionCtx,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        case: LinearParams,
        coefficients: Coefficients,
        context_group: ProcessGroup | None,
        calls: int,
        target: WeightTarget,
    ) -> tuple[Tensor | None, ...]:
        wanted = ctx.needs_input_grad[:3]  # type: ignore[attr-defined]
        gradients = Gradients(case, wanted)
        used: list[tuple[list[slice], OutputGrads]] = []

        def then(chunks: Chunks, so_far: Forward) -> None:
            upstream = coefficients(so_far.stats)
            check_replicated(upstream, case.shard.group, so_far.stats[0])
            used.append((chunks.spans, upstream))
            if any(g is not None for g in upstream):
                logits = lambda _: (chunks.logits, None)  # noqa: E731
                gradients.add(chunks.spans, chunks.hidden, [case.columns], logits, so_far.table, upstream)

        forward = run_forward(case, then=then)
        for _ in range(calls - len(used)):
            coefficients(forward.stats)
        if checks_values(hidden) and (calls or len(used) > 1):
            known = coefficients(forward.stats)
            groups = [case.shard.group, context_group]
            raise_on_all_ranks(lambda: _check_separable(case, used, known), groups, hidden)
        ctx.summed, ctx.target = gradients.close(), target  # type: ignore[attr-defined]
        ctx.shape, ctx.bias, ctx.group = hidden.shape, bias, case.shard.group  # type: ignore[attr-defined]
        stats = [s for s in forward.stats if s is not None]
        ctx.mark_non_differentiable(*stats)
        return torch.zeros((), dtype=case.dtype, device=hidden.device), *forward.stats

    @staticmethod
    def backward(ctx: FunctionCtx, upstream: Tensor, *_: Tensor | None) -> tuple[Tensor | None, ...]:
        _refuse_second_derivative()
        check_replicated([upstream], ctx.group, upstream)  # type: ignore[attr-defined]
        if ctx.summed is None:  # type: ignore[attr-defined]
            raise RuntimeError(
                "the first backward scaled the gradient that was computed in forward; mode='recompute' allows a second one"
            )
        of_hidden, of_weight, of_bias = ctx.summed  # type: ignore[attr-defined]
        ctx.summed = None  # type: ignore[attr-defined]
        target: WeightTarget = ctx.target  # type: ignore[attr-defined]
        if of_hidden is not None:
            of_hidden = of_hidden.mul_(upstream).view(ctx.shape)  # type: ignore[attr-defined]
        if of_weight is not None:
            into = target.rows(of_weight.shape[0])
            upstream = upstream.to(of_weight.dtype)
            if into is None or target.factor is None:
                of_weight = scaled_to_(of_weight, upstream, target.weight.dtype)
            else:
                into.addcmul_(of_weight, upstream, value=target.factor)
            of_weight = target.result(of_weight)
        if of_bias is not None:
            of_bias = _padded(of_bias.mul_(upstream), ctx.bias)  # type: ignore[attr-defined]
        return of_hidden, of_weight, of_bias, None, None, None, None, None


def _check_separable(case: LinearParams, used: list[tuple[list[slice], OutputGrads]], known: OutputGrads) -> None:
    """Raises ValueError where a chunk's coefficients are others once the later chunks are known."""
    for spans, upstream in used:
        places = torch.cat([case.rows.every(span) for span in spans])
        places = places[case.keep[places]]
        for then, now in zip(upstream, known, strict=True):
            before = torch.zeros_like(places, dtype=case.dtype) if then is None else then[places]
            after = torch.zeros_like(before) if now is None else now[places]
            apart = ~torch.isclose(before, after, rtol=_ROUNDING, atol=0, equal_nan=True)
            if bool(apart.any()):
                row = int(apart.nonzero()[0])
                raise ValueError(
                    f"the objective is not a sum over tokens: the gradient of row {int(places[row])} was {float(before[row])} "
                    f"and became {float(after[row])} when other rows were known. mode = 'in_forward' needs terms of single "
                    "tokens; 'resident' and 'recompute' take any objective"
                )


def with_operands(case: LinearParams, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> LinearParams:
    """The case with its operands: flat hidden states, and the real columns of weight and bias."""
    valid = case.shard.valid
    flat = hidden.detach().reshape(-1, hidden.shape[-1])
    return replace(
        case, hidden=flat, weight=weight.detach()[:valid], bias=None if bias is None else bias.detach()[:valid]
    )


def _padded(gradient: Tensor | None, like: Tensor | None) -> Tensor | None:
    """A gradient of the real columns, with zeros for the padding ones."""
    if gradient is None or like is None or gradient.shape == like.shape:
        return gradient
    whole = torch.zeros_like(like, dtype=gradient.dtype)
    whole[: gradient.shape[0]] = gradient
    return whole


def _refuse_second_derivative() -> None:
    if torch.is_grad_enabled():  # create_graph=True
        raise RuntimeError("token statistics have no second derivative; call backward without create_graph=True")
