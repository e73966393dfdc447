"""Lower bounds of a step's time: products at the card's peak, bytes at its bandwidth, collectives at the links' speed."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from parallel_rl.plan.memory import rank_parameters

if TYPE_CHECKING:
    from collections.abc import Iterator

    from parallel_rl.plan.memory import Layout
    from parallel_rl.plan.source import ModelShape

NODE = 8  # cards that are joined by the fast links
MOST_RANKS = 10_000
#: products of forward and backward per weight and token, in flops; and bytes of logits that are read or written
HEAD_FLOPS = {"in_forward": 6, "resident": 6, "recompute": 8, "whole logits, consumed": 6}


class Card(NamedTuple):
    """Data sheet of a card: bytes of memory, dense bfloat16 flops/s, bytes/s of memory and a link."""

    memory: float
    bandwidth: float
    flops: float
    link: float
    network: float


CARDS = {
    "A100": Card(80e9, 2.039e12, 312e12, 300e9, 25e9),
    "H100": Card(80e9, 3.35e12, 989.4e12, 450e9, 50e9),
    "H200": Card(141e9, 4.8e12, 989.4e12, 450e9, 50e9),
    "B200": Card(180e9, 8e12, 2250e12, 900e9, 50e9),
}


class Bound(NamedTuple):
    """Lower bounds on a step's seconds, by resource; resources can overlap, so `step` is the largest."""

    ranks: int
    data: int
    tokens: int
    compute: float
    loss_stage: float
    tensor_collectives: float
    gradient_collective: float

    @property
    def step(self) -> float:
        return max(self.compute, self.loss_stage, self.tensor_collectives, self.gradient_collective)


def loss_stage_seconds(hidden: int, vocab: int, layout: Layout, card: Card, mode: str = "in_forward") -> float:
    """Bound the loss stage of one micro-batch on one rank, with backward; ValueError for another mode.

        max(k·T·V/tp·D / flops,  6·T·V/tp / bandwidth)     k = 6, or 8 where logits are projected again

    >>> from parallel_rl.plan.memory import Layout
    >>> milliseconds = 1e3 * loss_stage_seconds(4096, 131072, Layout(8192), CARDS["H200"])
    >>> round(milliseconds, 1)
    26.7
    """
    if mode not in HEAD_FLOPS:
        raise ValueError(f"mode = {mode!r} is not valid; choose one of {', '.join(HEAD_FLOPS)}")
    logits = layout.rows * vocab / layout.tensor
    return max(HEAD_FLOPS[mode] * logits * hidden / card.flops, 6 * logits / card.bandwidth)


def bounds(model: ModelShape, layout: Layout, card: Card, micro_batches: int = 1) -> Iterator[Bound]:
    """Bound an optimizer step on 1 to 10,000 ranks of this layout; data ranks have equal tokens.

    Compute is 6 flops a weight and token, without attention's own products. Gradients travel once a step in float32; with the
    distributed optimizer they are reduce-scattered and the weights gathered. Ranks lie in Megatron's order (tensor, context,
    data, pipeline) on nodes of 8 cards, each with a network link that every collective can share.

    >>> from parallel_rl.plan.memory import Layout
    >>> from parallel_rl.plan.source import ModelShape
    >>> model = ModelShape(32, 4096, 32, 8, 128, 14336, 128256)
    >>> [bound.ranks for bound in bounds(model, Layout(8192, tensor=8), CARDS["H100"])][:3]
    [8, 16, 32]
    """
    least = replace(layout, data=1).world
    data = 1
    while least * data <= MOST_RANKS:
        at = replace(layout, data=data)
        tokens = at.tokens * micro_batches
        flops = 6 * model.active_parameters * tokens / (at.tensor * at.context * at.pipeline)
        yield Bound(
            at.world,
            data,
            tokens * data,
            flops / card.flops,
            loss_stage_seconds(model.hidden, model.vocab, at, card) * micro_batches,
            _tensor_seconds(model, at, card) * micro_batches,
            _gradient_seconds(rank_parameters(model, at), at, card),
        )
        data *= 2


def _tensor_seconds(model: ModelShape, layout: Layout, card: Card) -> float:
    """Bound the last stage's tensor collectives of hidden states, their gradients and statistics.

    Each layer's attention and MLP all-reduce output (forward) and input gradient (backward), the LM head only the latter. An
    all-reduce moves each element into a card once.
    """
    tp = layout.tensor
    if tp == 1:
        return 0.0
    hidden = (4 * model.layers // layout.pipeline + 1) * layout.rows * model.hidden * layout.dtype.itemsize
    statistics = layout.rows * 16
    of_node = hidden + statistics * (tp - NODE) if tp > NODE else 0.0
    return _link_seconds(hidden + statistics * (tp - 1), of_node, card)


def _gradient_seconds(weights: int, layout: Layout, card: Card) -> float:
    """Bound the data and context ranks' reduction of the gradients, and the gathering of the weights.

    These ranks lie `tensor` apart: a node holds min(tensor, NODE) shards, and each leaves the node once.
    """
    shared = layout.data * layout.context
    size = weights * (4 + (layout.dtype.itemsize if layout.distributed_optimizer else 0))
    of_node = size * (min(layout.tensor, NODE) - NODE / shared)
    return _link_seconds(size * (1 - 1 / shared), max(of_node, 0.0), card)


def _link_seconds(of_card: float, of_node: float, card: Card) -> float:
    """Bound the traffic of a card, on both links if nodes are crossed, and of a node, on all networks."""
    ways = card.link + (card.network if of_node else 0.0)
    return max(of_card / ways, of_node / NODE / card.network)
