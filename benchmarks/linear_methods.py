"""Methods of `benchmarks.linear`: the fused head in its modes, and a matmul followed by each peer's cross-entropy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.linear_case import Case, Objective, Part, grpo, weighted
from benchmarks.peers import CrossEntropy, imports, peers
from parallel_rl import ClippedPGLossFn, LMHeadInput, count_valid, linear_token_stats, token_stats
from parallel_rl.groups import all_gather_start, sum_start
from parallel_rl.vocab.linear.plan import LinearMode

Run = Callable[[Tensor, Tensor, Case], Tensor]


@dataclass(frozen=True)
class Method:
    """`run(hidden, weight, case)` gives the objective's value; methods of one objective are compared."""

    name: str
    run: Run
    kind: str  # "in_forward" or "recompute", which have targets; "peer"; "information"
    objective: Objective = weighted
    low_precision: bool = False  # it rounds logits or gradient to bfloat16 whatever the operands


def _ours(hidden: Tensor, weight: Tensor, case: Case, mode: LinearMode, budget: int | None) -> Tensor:
    stats = linear_token_stats(
        hidden, weight, case.targets, group=case.part.group, sequence_parallel=case.part.sequence_parallel,
        entropy=False, mode=mode, budget=budget, objective=lambda stats: weighted(stats.logprobs, case),
    )  # fmt: skip
    assert stats.loss is not None
    return stats.loss


def _our_grpo(hidden: Tensor, weight: Tensor, case: Case, budget: int | None) -> Tensor:
    head = LMHeadInput(
        hidden[None], weight, sequence_parallel=case.part.sequence_parallel, mode="in_forward", budget=budget
    )
    loss_fn = ClippedPGLossFn({"ratio_clip_max": 0.28})
    return loss_fn(head, case.data, *count_valid([case.data]), vocab_parallel_group=case.part.group)[0]


class _Enter(torch.autograd.Function):
    """Hidden states as they go into the local matmul, and the sum of their gradient over the ranks that share the weight.

    Under sequence parallelism all-gather and reduce-scatter, else nothing and all-reduce: what Megatron's layers do.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, part: Part) -> Tensor:
        ctx.part = part
        return all_gather_start(hidden, part.group).wait() if part.sequence_parallel else hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return sum_start(gradient.contiguous(), ctx.part.group, ctx.part.sequence_parallel).wait(), None


def _matmul(
    hidden: Tensor, weight: Tensor, case: Case, cross_entropy: CrossEntropy, objective: Objective = weighted
) -> Tensor:
    whole = hidden if case.part.size == 1 else _Enter.apply(hidden, case.part)
    return objective(-cross_entropy(whole @ weight.T, case.targets), case)


def _in_place(logits: Tensor, targets: Tensor, part: Part) -> Tensor:
    return -token_stats(logits, targets, group=part.group, entropy=False, consume_logits=True).logprobs


def _our_statistics(hidden: Tensor, weight: Tensor, case: Case) -> Tensor:
    return _matmul(hidden, weight, case, partial(_in_place, part=case.part))


def _liger_fused(hidden: Tensor, weight: Tensor, case: Case, objective: Objective = weighted) -> Tensor:
    from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

    return objective(-liger_fused_linear_cross_entropy(hidden, weight, case.targets, reduction="none"), case)


def _cut_torch(hidden: Tensor, weight: Tensor, case: Case, objective: Objective = weighted) -> Tensor:
    from cut_cross_entropy.torch_compile import torch_compile_linear_cross_entropy

    return objective(-torch_compile_linear_cross_entropy(hidden, weight, case.targets, reduction="none"), case)


def _cut(hidden: Tensor, weight: Tensor, case: Case, objective: Objective = weighted) -> Tensor:
    from cut_cross_entropy import linear_cross_entropy

    return objective(-linear_cross_entropy(hidden, weight, case.targets, reduction="none"), case)


def methods(device: str, budget: int | None, tp: int = 1) -> list[Method]:
    """Ours, and the peers that are installed and run here; the peers once with each objective."""
    *mine, with_grpo = ours(budget)
    theirs = _peers(device, tp)
    return [
        *mine,
        Method("matmul + our token_stats, in place", _our_statistics, "information"),
        *theirs,
        with_grpo,
        *(replace(m, name=f"{m.name}, GRPO", run=partial(m.run, objective=grpo), objective=grpo) for m in theirs),
    ]


def ours(budget: int | None) -> list[Method]:
    """The fused head in each mode, last with GRPO; no peer is imported."""
    return [
        Method("ours, in_forward", partial(_ours, mode="in_forward", budget=budget), "in_forward"),
        Method("ours, recompute", partial(_ours, mode="recompute", budget=budget), "recompute"),
        Method("ours, resident", partial(_ours, mode="resident", budget=budget), "information"),
        Method("ours, in_forward, GRPO", partial(_our_grpo, budget=budget), "in_forward", grpo),
    ]


def _peers(device: str, tp: int) -> list[Method]:
    """Each one's cross-entropy after a matmul, and on one rank the fused heads."""
    found = [
        Method(f"matmul + {p.name}", partial(_matmul, cross_entropy=p.loss), "peer", low_precision=p.bfloat16_gradient)
        for p in peers(device, tp)
    ]
    if tp > 1:
        return found
    if device == "cuda" and imports("liger_kernel.transformers.functional"):
        found.append(Method("Liger fused linear cross-entropy", _liger_fused, "peer", low_precision=True))
    if imports("cut_cross_entropy.torch_compile"):
        found.append(Method("cut-cross-entropy, torch_compile", _cut_torch, "peer"))
    if device == "cuda" and imports("cut_cross_entropy"):
        found.append(Method("cut-cross-entropy", _cut, "peer", low_precision=True))
    return found
