"""What `benchmarks.linear` compares: the fused head in its modes, and a matmul followed by each peer's cross-entropy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from parallel_rl import linear_token_stats, token_stats
from parallel_rl.vocab.linear_plan import LinearMode


class Case(NamedTuple):
    """hidden [T, D], weight [V, D], targets [T], the weight of each token's log-prob [T]; float64 loss and gradients."""

    hidden: Tensor
    weight: Tensor
    targets: Tensor
    upstream: Tensor
    truth: tuple[Tensor, Tensor, Tensor]


Run = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Method:
    """`run(hidden, weight, targets, upstream)` gives −Σ upstream · log-prob."""

    name: str
    run: Run
    kind: str  # "in_forward" or "recompute", which have targets; "peer"; "information"
    device: str = "cpu cuda"
    low_precision: bool = False  # it rounds logits or gradient to bfloat16 whatever the operands


def _ours(
    hidden: Tensor, weight: Tensor, targets: Tensor, upstream: Tensor, mode: LinearMode, budget: int | None
) -> Tensor:
    stats = linear_token_stats(
        hidden, weight, targets, entropy=False, mode=mode, budget=budget,
        objective=lambda stats: -(upstream * stats.logprobs).sum(),
    )  # fmt: skip
    assert stats.loss is not None
    return stats.loss


def _matmul(
    hidden: Tensor, weight: Tensor, targets: Tensor, upstream: Tensor, cross_entropy: Callable[[Tensor, Tensor], Tensor]
) -> Tensor:
    return (upstream * cross_entropy(hidden @ weight.T, targets)).sum()


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


def _liger_fused(hidden: Tensor, weight: Tensor, targets: Tensor, upstream: Tensor) -> Tensor:
    from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

    return (upstream * liger_fused_linear_cross_entropy(hidden, weight, targets, reduction="none")).sum()


def _cut_torch(hidden: Tensor, weight: Tensor, targets: Tensor, upstream: Tensor) -> Tensor:
    from cut_cross_entropy.torch_compile import torch_compile_linear_cross_entropy

    return (upstream * torch_compile_linear_cross_entropy(hidden, weight, targets, reduction="none")).sum()


def _cut(hidden: Tensor, weight: Tensor, targets: Tensor, upstream: Tensor) -> Tensor:
    from cut_cross_entropy import linear_cross_entropy

    return (upstream * linear_cross_entropy(hidden, weight, targets, reduction="none")).sum()


def methods(device: str, budget: int | None) -> list[Method]:
    """Ours, and the peers that are installed and run on the device."""
    found = [
        Method("ours, in_forward", partial(_ours, mode="in_forward", budget=budget), "in_forward"),
        Method("ours, recompute", partial(_ours, mode="recompute", budget=budget), "recompute"),
        Method("ours, resident", partial(_ours, mode="resident", budget=budget), "information"),
        Method("matmul + our token_stats, in place", partial(_matmul, cross_entropy=_in_place), "information"),
        Method("matmul + torch cross_entropy", partial(_matmul, cross_entropy=_plain), "peer"),
        Method("matmul + torch cross_entropy, compiled", partial(_matmul, cross_entropy=_compiled), "peer"),
    ]
    if find_spec("megatron") is not None:
        found += [
            Method("matmul + Megatron cross-entropy", partial(_matmul, cross_entropy=_megatron), "peer"),
            Method(
                "matmul + Megatron fused cross-entropy",
                partial(_matmul, cross_entropy=_megatron_fused),
                "peer",
                low_precision=True,
            ),
        ]
    if find_spec("liger_kernel") is not None:
        found += [
            Method("matmul + Liger cross-entropy", partial(_matmul, cross_entropy=_liger), "peer", "cuda", True),
            Method("Liger fused linear cross-entropy", _liger_fused, "peer", "cuda", True),
        ]
    if find_spec("cut_cross_entropy") is not None:
        found += [
            Method("cut-cross-entropy, torch_compile", _cut_torch, "peer"),
            Method("cut-cross-entropy", _cut, "peer", "cuda", True),
        ]
    return [method for method in found if device in method.device.split()]


def make_case(tokens: int, vocab: int, size: int, dtype: torch.dtype, device: str) -> Case:
    g = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, size, generator=g).to(dtype)
    weight = (torch.randn(vocab, size, generator=g) * 2 / size**0.5).to(dtype)
    targets, upstream = torch.randint(vocab, (tokens,), generator=g), torch.randn(tokens, generator=g) / tokens
    hidden, weight, targets, upstream = (x.to(device) for x in (hidden, weight, targets, upstream))
    loss = torch.zeros((), dtype=torch.float64, device=device)
    of_hidden, of_weight = torch.empty_like(hidden, dtype=torch.float64), torch.zeros_like(weight, dtype=torch.float64)
    whole = weight.double()
    for rows in torch.arange(tokens, device=device).split(256):
        h = hidden[rows].double()
        log_p = torch.log_softmax(h @ whole.T, -1)
        g64 = upstream[rows, None].double()
        loss -= (g64 * log_p.gather(1, targets[rows, None])).sum()
        dz = (log_p.exp() * g64).scatter_add(1, targets[rows, None], -g64)
        of_hidden[rows] = dz @ whole
        of_weight += dz.T @ h
    return Case(hidden, weight, targets, upstream, (loss, of_hidden, of_weight))
