"""Methods of `benchmarks.token_stats`: ours in its ways, each peer's cross-entropy, and a gathered log-softmax."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.peers import CrossEntropy, peers
from benchmarks.vocab_case import Gather
from parallel_rl import token_stats
from parallel_rl.vocab.backends.choice import Backend

OURS, GATHERED = "ours, compiled, in place", "gather, then log_softmax"

Forward = Callable[[Tensor, Tensor], tuple[Tensor, ...]]


@dataclass(frozen=True)
class Method:
    """`forward(logits, targets)` gives (log-probs,) or (log-probs, entropy)."""

    name: str
    forward: Forward
    kind: str  # "ours", "peer" or "information": only peers are compared in `missed`
    bfloat16_gradient: bool = False  # it rounds the gradient to bfloat16 whatever the logits' dtype
    bfloat16_logprobs: bool = False  # where logits are bfloat16, its log-probs are too


def _ours(logits: Tensor, targets: Tensor, entropy: bool, consume: bool, backend: Backend) -> tuple[Tensor, ...]:
    group = dist.group.WORLD
    stats = token_stats(logits, targets, group=group, entropy=entropy, consume_logits=consume, backend=backend)
    return (stats.logprobs,) if stats.entropy is None else (stats.logprobs, stats.entropy)


def _gathered(logits: Tensor, targets: Tensor) -> tuple[Tensor, ...]:
    whole = Gather.apply(logits)
    return (torch.log_softmax(whole.float(), -1).gather(1, targets[:, None])[:, 0],)


def _of_peer(logits: Tensor, targets: Tensor, loss: CrossEntropy) -> tuple[Tensor, ...]:
    return (-loss(logits, targets),)


def methods(tp: int) -> list[Method]:
    """Ours, and the peers that are installed and run at this many tensor-parallel processes."""
    theirs = [
        Method(p.name, partial(_of_peer, loss=p.loss), "peer", p.bfloat16_gradient, p.bfloat16_loss)
        for p in peers("cpu", tp)
    ]
    return [
        Method(OURS, partial(_ours, entropy=False, consume=True, backend="compiled"), "ours"),
        *theirs,
        Method(GATHERED, _gathered, "peer"),
        Method("ours, compiled, new gradient", partial(_ours, entropy=False, consume=False, backend="compiled"), "information"),
        Method("ours, eager, in place", partial(_ours, entropy=False, consume=True, backend="eager"), "information"),
        Method("ours + entropy, compiled, in place", partial(_ours, entropy=True, consume=True, backend="compiled"), "ours"),
        Method("ours + entropy, eager, in place", partial(_ours, entropy=True, consume=True, backend="eager"), "information"),
    ]  # fmt: skip
