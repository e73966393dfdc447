"""The plan of a run: lower bounds of a step's time; a table, JSON and a picture."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from parallel_rl.plan.memory import Stage, loss_stages, rank_parameters, states
from parallel_rl.vocab.linear.plan import card_budget

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


_OURS = ("in_forward", "resident", "recompute", "whole logits, consumed")


@dataclass(frozen=True)
class RunPlan:
    """Bytes and bounds of one layout on one kind of card.

    Attributes:
        layout: who shares what. memory: bytes of the card.
        states: see `states`. stages: see `loss_stages`. bounds: see `bounds`.
    """

    layout: Layout
    memory: int
    states: dict[str, int]
    stages: list[Stage]
    bounds: list[Bound]

    @property
    def state_bytes(self) -> int:
        """Bytes held throughout."""
        return sum(self.states.values())

    def fits(self, stage: Stage) -> bool:
        """Return whether states and loss stage fit the card; activations of the layers are not counted."""
        return self.state_bytes + stage.bytes <= self.memory

    def recommended(self, separable: bool = True) -> Stage | None:
        """Return the fitting mode with fewest products, then bytes; `in_forward` needs a `separable` loss."""
        fitting = [s for s in self.stages if s.mode in _OURS and self.fits(s) and (separable or s.mode != "in_forward")]
        return min(fitting, key=lambda s: (s.mode == "recompute", s.bytes), default=None)

    def as_json(self) -> dict[str, object]:
        stages = {s.mode: {"bytes": s.bytes, "fits": self.fits(s), "terms": dict(s.terms)} for s in self.stages}
        best = {name: self.recommended(flag) for name, flag in (("token_separable", True), ("any_loss", False))}
        layout = asdict(self.layout) | {"dtype": str(self.layout.dtype).removeprefix("torch.")}
        return {
            "layout": layout,
            "memory": self.memory,
            "states": self.states,
            "loss_stage": stages,
            "recommended": {name: None if stage is None else stage.mode for name, stage in best.items()},
            "bounds": [{**bound._asdict(), "step": bound.step} for bound in self.bounds],
        }


def plan_run(
    model: ModelShape, layout: Layout, card: str, micro_batches: int = 1, memory: int | None = None
) -> RunPlan:
    """Plan a run.

    >>> import torch
    >>> from parallel_rl.plan.memory import Layout
    >>> from parallel_rl.plan.source import ModelShape
    >>> llama = ModelShape(32, 4096, 32, 8, 128, 14336, 128256)
    >>> plan = plan_run(llama, Layout(8192, tensor=8, data=2, sequence_parallel=True), "H100")
    >>> plan.recommended().mode, round(plan.state_bytes / 2**30, 1)
    ('whole logits, consumed', 11.2)

    Args:
        card: one of `CARDS`. memory: of the card in bytes, in place of its data sheet's.
        micro_batches: of a step.

    Raises:
        ValueError: an unknown card, sizes that are not divisible as the layout needs.
    """
    if card not in CARDS:
        raise ValueError(f"card = {card!r} is not known; choose one of {', '.join(CARDS)}")
    if micro_batches < 1:
        raise ValueError(f"micro_batches = {micro_batches} must be at least 1")
    room = int(CARDS[card].memory) if memory is None else memory
    vocab = -(-model.vocab // layout.tensor) * layout.tensor
    budget = card_budget(room) if layout.budget is None and layout.device == "cuda" else layout.budget
    stages = loss_stages(model.hidden, vocab, replace(layout, budget=budget))
    return RunPlan(layout, room, states(model, layout), stages, list(bounds(model, layout, CARDS[card], micro_batches)))


def table(plan: RunPlan) -> str:
    """Format the plan as text and tables."""
    lines = [f"layout: {_words(plan.layout)}"]
    lines += [f"a rank of {_size(plan.memory)}; activations of the layers are not counted", ""]
    lines += [f"  {name:34} {_size(size):>12}" for name, size in plan.states.items() if size]
    lines += ["", "  loss stage, beyond weights and hidden states"]
    for stage in plan.stages:
        chunk = f"{stage.plan.size} rows a chunk" if stage.plan is not None else ""
        lines.append(
            f"  {stage.mode:46} {_size(stage.bytes):>12}  {'fits' if plan.fits(stage) else 'too much':9} {chunk}"
        )
    for words, separable in (("a loss that is a sum over tokens", True), ("any other loss", False)):
        best = plan.recommended(separable)
        lines.append(f"  {words}: {'nothing fits' if best is None else best.mode}")
    lines += ["", "  lower bounds of a step, milliseconds: nothing can be faster, no run was timed"]
    lines.append(f"  {'ranks':>6} {'tokens':>12} {'compute':>9} {'loss':>9} {'TP':>9} {'gradients':>9} {'step':>9}")
    for b in plan.bounds:
        times = (b.compute, b.loss_stage, b.tensor_collectives, b.gradient_collective, b.step)
        lines.append(f"  {b.ranks:>6,} {b.tokens:>12,} " + " ".join(f"{1e3 * t:>9.2f}" for t in times))
    return "\n".join(lines)


def draw(plan: RunPlan, path: Path) -> None:
    """Draw bytes by mode, and the bounds over the ranks; ValueError without matplotlib."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        raise ValueError("a picture needs matplotlib: pip install matplotlib") from None
    figure = Figure(figsize=(11, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    names = [stage.mode for stage in plan.stages]
    left.barh(names, [plan.state_bytes / 2**30] * len(names), color="#9aa5b1", label="weights, gradients, optimizer")
    sizes = [stage.bytes / 2**30 for stage in plan.stages]
    left.barh(names, sizes, left=plan.state_bytes / 2**30, color="#2f6f9f", label="loss stage")
    left.axvline(plan.memory / 2**30, color="#b3402a", label="the card")
    left.set_xlabel("GiB a rank")
    left.invert_yaxis()
    left.legend(frameon=False, fontsize=8)
    for name in ("compute", "loss_stage", "tensor_collectives", "gradient_collective"):
        times = [1e3 * getattr(bound, name) for bound in plan.bounds]
        right.plot(
            [bound.ranks for bound in plan.bounds], times, marker="o", markersize=3, label=name.replace("_", " ")
        )
    right.set(xscale="log", yscale="log", xlabel="ranks", ylabel="lower bound of a step, ms")
    right.legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=130)


def _words(layout: Layout) -> str:
    sizes = ", ".join(f"{name} {getattr(layout, name)}" for name in ("tensor", "context", "pipeline", "data"))
    dtype = str(layout.dtype).removeprefix("torch.")
    optimizer = "distributed" if layout.distributed_optimizer else "whole"
    return f"{sizes}{', sequence parallel' if layout.sequence_parallel else ''}, {dtype}, {optimizer} optimizer"


def _size(size: float) -> str:
    return f"{size / 2**30:,.2f} GiB" if size >= 1e8 else f"{size / 2**20:,.2f} MiB"
