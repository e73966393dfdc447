"""Bytes of a rank: of the loss stage in each of its modes, and of weights, gradients, optimizer and frozen models."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from parallel_rl.config.strict import at_least
from parallel_rl.vocab.backends.torch_backend import math_dtype
from parallel_rl.vocab.linear.plan import HeadShape, LinearMode, Plan, half_bytes, kept_dtype, make_plan

if TYPE_CHECKING:
    from parallel_rl.plan.source import ModelShape

_RAISED = 1 << 22  # elements of low-precision weights that a CPU's product raises at once
#: bytes a bfloat16 logit of a rank at the peak, as published for H100 and B300; 2 more where the caller holds the logits
BYTES_PER_LOGIT: Mapping[str, int] = {
    "Megatron vocab_parallel_cross_entropy": 6,
    "Megatron fused_vocab_parallel_cross_entropy": 10,
}


@dataclass(frozen=True)
class Layout:
    """How many ranks share what, and what one data rank holds of a micro-batch.

    >>> Layout(tokens=8192, tensor=8, context=2).world
    16

    Attributes:
        tokens: of a micro-batch of one data rank, padding included: rows × length, or a packed row's.
        tensor, context, pipeline, data: sizes.
        sequence_parallel: the hidden states are split over tensor ranks.
        dtype: of weights and hidden states. device: "cuda" or "cpu".
        distributed_optimizer: its state is split over data and context ranks.
        frozen: further models in memory (reference, teacher).
        budget: of the LM head's logits, bytes; None is the default, of a card with 141 GB.
    """

    tokens: int
    tensor: int = 1
    context: int = 1
    pipeline: int = 1
    data: int = 1
    sequence_parallel: bool = False
    dtype: torch.dtype = torch.bfloat16
    device: str = "cuda"
    distributed_optimizer: bool = True
    frozen: int = 0
    budget: int | None = None

    def __post_init__(self) -> None:
        at_least(self, tokens=1, tensor=1, context=1, pipeline=1, data=1, frozen=0)
        parts = self.context * (self.tensor if self.sequence_parallel else 1)
        if self.tokens % parts:
            raise ValueError(f"tokens = {self.tokens} is not divisible by the {parts} ranks that share a row")

    @property
    def world(self) -> int:
        """Ranks of the job."""
        return self.tensor * self.context * self.pipeline * self.data

    @property
    def rows(self) -> int:
        """Positions whose logits a rank makes."""
        return self.tokens // self.context


@dataclass(frozen=True)
class Stage:
    """The loss stage in one mode: bytes at its peak, by what holds them.

    Attributes:
        mode: of the LM head, or how whole logits are read.
        terms: bytes. plan: chunks and tiles, where there are some.
    """

    mode: str
    terms: Mapping[str, int]
    plan: Plan | None = None

    @property
    def bytes(self) -> int:
        """Sum of the terms."""
        return sum(self.terms.values())


def loss_stages(hidden: int, vocab: int, layout: Layout) -> list[Stage]:
    """Predict the loss stage's peak memory on one rank, over forward and backward, for each way to run it.

        gradients of head and hidden states + logits (whole, kept, or a chunk's) + a chunk's rows + statistics

    The head's weight and the hidden states that come in are counted with the model. Checked against measured peaks on CPUs
    (tests/plan); on a card it is arithmetic.

    >>> sizes = {stage.mode: stage.bytes for stage in loss_stages(4096, 131072, Layout(32768))}
    >>> round(sizes["whole logits, consumed"] / sizes["in_forward"], 1)
    2.3

    Args:
        hidden, vocab: D and V, padding columns included.

    Raises:
        ValueError: a vocabulary that is not divisible by the tensor ranks.
    """
    if vocab % layout.tensor:
        raise ValueError(f"vocab = {vocab} is not divisible by {layout.tensor} tensor ranks; pad it")
    parts = layout.tensor if layout.sequence_parallel else 1
    case = _Case(layout.rows // parts, hidden, vocab // layout.tensor, layout)
    return [
        *(case.fused(mode) for mode in ("in_forward", "resident", "recompute")),
        case.whole("whole logits, consumed", 0),
        case.whole("whole logits", case.low),
        *(case.peer(name, size) for name, size in BYTES_PER_LOGIT.items()),
    ]


@dataclass(frozen=True)
class _Case:
    rows: int  # R hidden rows of this rank
    hidden: int  # D
    columns: int  # W = V/tp
    layout: Layout

    @property
    def parts(self) -> int:
        return self.layout.tensor if self.layout.sequence_parallel else 1

    @property
    def low(self) -> int:
        return self.layout.dtype.itemsize

    @property
    def wide(self) -> int:
        return math_dtype(self.layout.dtype).itemsize

    @property
    def on_cpu(self) -> bool:
        return self.layout.device == "cpu"

    @property
    def total(self) -> int:
        return self.rows * self.parts

    def statistics(self) -> int:
        """Log-prob, entropy, lse and what the gradient needs of a row; its target and places in the order."""
        return self.total * (6 * self.wide + 3 * 8)

    def of_hidden(self) -> int:
        return self.rows * self.hidden * self.low

    def whole(self, name: str, gradient: int) -> Stage:
        """Count the bytes of whole logits [R·parts, W].

        A gradient of so many bytes a logit, or the head's gradients, is held with them.
        """
        logits = self.total * self.columns * self.low
        products = self.columns * self.hidden * self.low + self.total * self.hidden * self.low
        beside = self.total * self.columns * gradient
        rest = _larger({"gradient of logits": beside}, {"gradients of head and hidden states": products})
        return Stage(name, {"logits": logits, **rest, "statistics": self.statistics()})

    def peer(self, name: str, size: int) -> Stage:
        return Stage(name, {"logits, float32 copies and gradient": self.total * self.columns * size})

    def fused(self, mode: LinearMode) -> Stage:
        """Count the bytes of the LM head in one mode: the larger of its two phases."""
        layout, low, wide = self.layout, self.low, self.wide
        triton = not self.on_cpu and low < wide
        shape = HeadShape(
            self.rows, self.hidden, self.columns, layout.dtype, torch.device("cpu" if self.on_cpu else "meta"),
            shared=layout.tensor > 1, parts=self.parts, in_place=triton or low == wide,
        )  # fmt: skip
        plan = make_plan(shape, mode, layout.budget)
        base = {
            "gradient of hidden states": self.of_hidden(),
            "gradient of the head": self.columns * self.hidden * wide,
            "statistics": self.statistics(),
        }
        if mode == "in_forward":
            if plan.group == plan.size:
                return Stage(mode, base | self._chunk(plan.size, triton), plan)
            rows = min(plan.group, self.rows)  # all: no float32 sum, but a stand-in beside the gradient of `main_grad`
            kept = {"kept logits of a group": rows * self.parts * half_bytes(self.columns)}
            kept |= self._chunk(plan.size, False, at_once=1) | self._beside(rows, False)
            return Stage(mode, base | kept, plan)
        if mode == "recompute":
            if self.rows <= plan.tile[0] and not triton:  # in one go, no sum in float32 is kept
                base["gradient of the head"] = self.columns * self.hidden * low
            again = base | self._chunk(plan.tile[0], triton, plan.tile[1], at_once=1)
            first = {"statistics": self.statistics()} | self._chunk(plan.size, False)
            return Stage(mode, _larger(again, first), plan)
        logit = self.parts * self.columns
        row = self.parts * half_bytes(self.columns) if triton else logit * kept_dtype(layout.dtype).itemsize
        group = 0 if triton or low == wide else min(plan.group, self.rows) * logit * wide
        later = {"kept logits": self.rows * row, **base, "logits of a group": group}
        later |= self._beside(min(plan.group, self.rows), False)
        chunk = 0 if low == wide else plan.size * logit * wide
        twice = chunk if self.on_cpu else 0  # as distances from the row's largest, before they are rounded
        so_far = self.rows // plan.size * plan.size if twice else self.rows  # the last chunk may be a small one
        earlier = {
            "kept logits": so_far * row,
            "statistics": self.statistics(),
            "logits of a chunk": chunk + twice,
        }
        return Stage(mode, _larger(later, earlier), plan)

    def _chunk(
        self, size: int, gradient: bool, columns: int | None = None, at_once: int | None = None
    ) -> dict[str, int]:
        """Count the bytes of a chunk of `size` rows of each part, or of two where ranks share the rows."""
        count = at_once or (2 if self.layout.tensor > 1 and self.rows > size else 1)
        rows = min(count * size, self.rows)
        logits = {"logits of a chunk": rows * self.parts * (columns or self.columns) * self.wide}
        return logits | self._beside(rows, gradient, columns)

    def _beside(self, rows: int, gradient: bool, columns: int | None = None) -> dict[str, int]:
        """Hidden rows of a chunk and of the next, and their gradients; the operands of low-precision products."""
        rows, more, columns = rows * self.parts, 2 if rows < self.rows else 1, columns or self.columns
        terms = {"hidden rows of a chunk": more * rows * self.hidden * (self.low + self.wide)}
        if gradient:
            terms["gradient of logits, for the products"] = rows * columns * self.low
        if self.on_cpu and self.low < self.wide:
            block = min(_RAISED, columns * self.hidden)
            terms["operands raised to float32"] = (block + rows * self.hidden) * self.wide
        return terms


def _larger(a: dict[str, int], b: dict[str, int]) -> dict[str, int]:
    return max(a, b, key=lambda terms: sum(terms.values()))


def states(model: ModelShape, layout: Layout) -> dict[str, int]:
    """Count the bytes of weights, gradients, optimizer and frozen models on a last-stage rank.

    Megatron's mixed precision: weights in `dtype`, gradients in float32, Adam's two moments and, for a low-precision `dtype`,
    master weights in float32. Activations are not counted: they depend on recompute and attention.

    >>> from parallel_rl.plan.source import ModelShape
    >>> model = ModelShape(2, 64, 4, 4, 16, 176, 128)
    >>> states(model, Layout(64, dtype=torch.float32, distributed_optimizer=False))["weights"] == 4 * model.parameters
    True

    Raises:
        ValueError: layers that are not divisible by the pipeline stages.
    """
    weights = rank_parameters(model, layout)
    low = layout.dtype.itemsize < 4
    shared = layout.data * layout.context if layout.distributed_optimizer else 1
    return {
        "weights": weights * layout.dtype.itemsize,
        "gradients": weights * 4,
        "optimizer": -(-weights * (12 if low else 8) // shared),
        "frozen models": layout.frozen * weights * layout.dtype.itemsize,
    }


def rank_parameters(model: ModelShape, layout: Layout) -> int:
    """Count the weights of a tensor rank of the last pipeline stage, which has the LM head.

    >>> from parallel_rl.plan.source import ModelShape
    >>> model = ModelShape(2, 64, 4, 4, 16, 176, 128)
    >>> rank_parameters(model, Layout(64)) == model.parameters
    True

    Raises:
        ValueError: layers, heads or MLP that are not divisible by the ranks that split them.
    """
    tp, pp = layout.tensor, layout.pipeline
    for what, size, ranks in (
        ("layers", model.layers, pp), ("heads", model.heads, tp), ("ffn", model.expert_ffn or model.ffn, tp),
    ):  # fmt: skip
        if size % ranks:
            raise ValueError(f"{what} = {size} is not divisible by {ranks} ranks")
    groups = max(model.groups, tp) / model.groups  # fewer key-value heads than ranks are repeated
    repeated = int((groups - 1) * 2 * model.groups * model.head_dim * model.hidden)
    layer = (model.attention + repeated + model.mlp) // tp + model.replicated
    ends = 1 if model.tied or pp > 1 else 2  # the first stage holds the embedding
    norm = model.hidden * (2 if model.layer_norm else 1)
    table = model.positions * model.hidden if pp == 1 else 0
    return model.layers // pp * layer + ends * -(-model.embedding // tp) + norm + table
