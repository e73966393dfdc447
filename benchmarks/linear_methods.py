"""What `benchmarks.linear` compares: the fused head in its modes, and a matmul followed by each peer's cross-entropy."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.losses import GRPO_FIELDS, grpo_terms
from parallel_rl import ClippedPGLossFn, LMHeadInput, count_valid, linear_token_stats, token_stats
from parallel_rl.vocab.linear_plan import LinearMode


class Case(NamedTuple):
    """hidden [T, D], weight [V, D], targets [T], the weight of each token's log-prob [T]; the same as a sequence of a batch.

    data: [1, T] fields of that sequence, token-aligned: row t predicts column t + 1, and the last row carries no loss.
    truths: what a method is checked against.
    """

    hidden: Tensor
    weight: Tensor
    targets: Tensor
    upstream: Tensor
    data: dict[str, Tensor]
    truths: dict[Objective, Truth]


class Truth(NamedTuple):
    """float64: the loss, its scale (it may be near 0 itself) and the gradients."""

    loss: Tensor
    scale: Tensor
    of_hidden: Tensor
    of_weight: Tensor


Objective = Callable[[Tensor, Case], Tensor]  # of the log-probs [T]
Run = Callable[[Tensor, Tensor, Case], Tensor]


def weighted(logprobs: Tensor, case: Case) -> Tensor:
    """−Σ upstream · log-prob."""
    return -(case.upstream * logprobs).sum()


def grpo(logprobs: Tensor, case: Case) -> Tensor:
    """The whole GRPO loss as one would write it, of the rows that predict a token."""
    return grpo_terms(logprobs[:-1], *(case.data[field][0, 1:] for field in GRPO_FIELDS)).mean()


@dataclass(frozen=True)
class Method:
    """`run(hidden, weight, case)` gives the objective's value; methods of one objective are compared."""

    name: str
    run: Run
    kind: str  # "in_forward" or "recompute", which have targets; "peer"; "information"
    objective: Objective = weighted
    device: str = "cpu cuda"
    low_precision: bool = False  # it rounds logits or gradient to bfloat16 whatever the operands


def _ours(hidden: Tensor, weight: Tensor, case: Case, mode: LinearMode, budget: int | None) -> Tensor:
    stats = linear_token_stats(
        hidden, weight, case.targets, entropy=False, mode=mode, budget=budget,
        objective=lambda stats: weighted(stats.logprobs, case),
    )  # fmt: skip
    assert stats.loss is not None
    return stats.loss


def _our_grpo(hidden: Tensor, weight: Tensor, case: Case, budget: int | None) -> Tensor:
    head = LMHeadInput(hidden[None], weight, mode="in_forward", budget=budget)
    return ClippedPGLossFn({"ratio_clip_max": 0.28})(head, case.data, *count_valid([case.data]))[0]


def _matmul(
    hidden: Tensor,
    weight: Tensor,
    case: Case,
    cross_entropy: Callable[[Tensor, Tensor], Tensor],
    objective: Objective = weighted,
) -> Tensor:
    return objective(-cross_entropy(hidden @ weight.T, case.targets), case)


def _plain(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.float(), targets, reduction="none")


_compiled = torch.compile(_plain)


def _in_place(logits: Tensor, targets: Tensor) -> Tensor:
    return -token_stats(logits, targets, entropy=False, consume_logits=True).logprobs


def _megatron(logits: Tensor, targets: Tensor) -> Tensor:
    from megatron.core.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy

    return vocab_parallel_cross_entropy(logits[:, None], targets[:, None])[:, 0]  # [S, B, V/tp] with B = 1


def _megatron_fused(logits: Tensor, targets: Tensor) -> Tensor:
    from megatron.core.fusions.fused_cross_entropy import fused_vocab_parallel_cross_entropy

    return fused_vocab_parallel_cross_entropy(logits[:, None], targets[:, None], torch.distributed.group.WORLD)[:, 0]


def _liger(logits: Tensor, targets: Tensor) -> Tensor:
    from liger_kernel.transformers.functional import liger_cross_entropy

    return liger_cross_entropy(logits, targets, reduction="none")


def _liger_fused(hidden: Tensor, weight: Tensor, case: Case, objective: Objective = weighted) -> Tensor:
    from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

    return objective(-liger_fused_linear_cross_entropy(hidden, weight, case.targets, reduction="none"), case)


def _cut_torch(hidden: Tensor, weight: Tensor, case: Case, objective: Objective = weighted) -> Tensor:
    from cut_cross_entropy.torch_compile import torch_compile_linear_cross_entropy

    return objective(-torch_compile_linear_cross_entropy(hidden, weight, case.targets, reduction="none"), case)


def _cut(hidden: Tensor, weight: Tensor, case: Case, objective: Objective = weighted) -> Tensor:
    from cut_cross_entropy import linear_cross_entropy

    return objective(-linear_cross_entropy(hidden, weight, case.targets, reduction="none"), case)


def methods(device: str, budget: int | None) -> list[Method]:
    """Ours, and the peers that are installed and run on the device; the peers once with each objective."""
    peers = _peers()
    found = [
        Method("ours, in_forward", partial(_ours, mode="in_forward", budget=budget), "in_forward"),
        Method("ours, recompute", partial(_ours, mode="recompute", budget=budget), "recompute"),
        Method("ours, resident", partial(_ours, mode="resident", budget=budget), "information"),
        Method("matmul + our token_stats, in place", partial(_matmul, cross_entropy=_in_place), "information"),
        *peers,
        Method("ours, in_forward, GRPO", partial(_our_grpo, budget=budget), "in_forward", grpo),
        *(
            replace(m, name=f"{m.name}, GRPO", run=partial(m.run, objective=grpo), objective=grpo)
            for m in peers
        ),
    ]  # fmt: skip
    return [method for method in found if device in method.device.split()]


def _peers() -> list[Method]:
    found = [
        Method("matmul + torch cross_entropy", partial(_matmul, cross_entropy=_plain), "peer"),
        Method("matmul + torch cross_entropy, compiled", partial(_matmul, cross_entropy=_compiled), "peer"),
    ]
    if find_spec("megatron") is not None:
        fused = partial(_matmul, cross_entropy=_megatron_fused)
        found += [
            Method("matmul + Megatron cross-entropy", partial(_matmul, cross_entropy=_megatron), "peer"),
            Method("matmul + Megatron fused cross-entropy", fused, "peer", low_precision=True),
        ]
    if find_spec("liger_kernel") is not None:
        liger = partial(_matmul, cross_entropy=_liger)
        found += [
            Method("matmul + Liger cross-entropy", liger, "peer", device="cuda", low_precision=True),
            Method("Liger fused linear cross-entropy", _liger_fused, "peer", device="cuda", low_precision=True),
        ]
    if find_spec("cut_cross_entropy") is not None:
        found += [
            Method("cut-cross-entropy, torch_compile", _cut_torch, "peer"),
            Method("cut-cross-entropy", _cut, "peer", device="cuda", low_precision=True),
        ]
    return found


def make_case(tokens: int, vocab: int, size: int, dtype: torch.dtype, device: str, truths: bool = True) -> Case:
    """The same on every call; `truths` are needed to check a method, and take longer than one."""
    g = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, size, generator=g).to(dtype)
    weight = (torch.randn(vocab, size, generator=g) * 2 / size**0.5).to(dtype)
    targets, upstream = torch.randint(vocab, (tokens,), generator=g), torch.randn(tokens, generator=g) / tokens
    hidden, weight, targets, upstream = (x.to(device) for x in (hidden, weight, targets, upstream))
    whole = weight.double()
    logprobs = torch.cat([_log_softmax(h, whole).gather(1, y[:, None])[:, 0] for h, y in _blocks(hidden, targets)])
    noise = 0.1 * torch.randn(3, tokens, generator=g).to(device)
    fields = [tokens * upstream, *(logprobs + noise).float()]
    data = {
        "input_ids": targets,
        **dict(zip((*GRPO_FIELDS, "generation_logprobs"), fields, strict=True)),
    }
    data = {name: field.roll(1)[None] for name, field in data.items()}
    data |= {"token_mask": torch.ones_like(data["input_ids"]), "sample_mask": torch.ones(1, device=device)}
    case = Case(hidden, weight, targets, upstream, data, {})
    if truths:
        case.truths.update({objective: _truth(objective, logprobs, case) for objective in (weighted, grpo)})
    return case


def _truth(objective: Objective, logprobs: Tensor, case: Case) -> Truth:
    logprobs = logprobs.requires_grad_()
    loss = objective(logprobs, case)
    (slope,) = torch.autograd.grad(loss, logprobs)
    of_hidden, of_weight, whole = [], torch.zeros_like(case.weight, dtype=torch.float64), case.weight.double()
    for h, y, g in _blocks(case.hidden, case.targets, slope[:, None]):
        dz = (-_log_softmax(h, whole).exp() * g).scatter_add(1, y[:, None], g)
        of_hidden.append(dz @ whole)
        of_weight += dz.T @ h.double()
    return Truth(loss.detach(), slope.norm() * len(slope) ** 0.5, torch.cat(of_hidden), of_weight)


def _log_softmax(hidden: Tensor, whole: Tensor) -> Tensor:
    return torch.log_softmax(hidden.double() @ whole.T, -1)


def _blocks(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    return zip(*(x.split(256) for x in tensors), strict=True)
