"""A checked model with its step, and the results of a rank and of one process."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from parallel_rl.testing.whole_step.provider import Provider

Cut = tuple[int, int, int, int]  # dimension, stride, parts, and which of them a rank holds


@dataclass(frozen=True)
class StepSubject:
    """A model and its step, by the arguments of `check_step`."""

    provider: Provider | TransformerConfig
    config: TransformerConfig | Callable[[], TransformerConfig] | None = None
    forward_step: Callable[..., object] | None = None
    loss_callback: Callable[..., object] | None = None
    setup: Callable[[TransformerConfig], object] | None = None

    @property
    def is_script(self) -> bool:
        """Return whether the step is the user's, not this library's."""
        return self.forward_step is not None or self.loss_callback is not None


@dataclass(frozen=True)
class Piece:
    """One weight on one rank, after the step.

    Attributes:
        name: in a one-process model. gradient, after: this rank's part; gradient is None if the weight is frozen here.
        cut: this rank's part of the whole weight; None: all of it.
        marked: Megatron's norm treats it as a shard, and counts it on every tensor rank.
        expert: the weight lies on expert parallel ranks.
    """

    name: str
    gradient: Tensor | None
    after: Tensor
    cut: Cut | None
    marked: bool
    expert: bool


@dataclass(frozen=True)
class RankResult:
    """One rank's result of the step on one layout.

    Attributes:
        place: its rank in each group, by axis: tensor, context, data, pipeline, expert.
        metrics: reduced as a training loop logs them. norm: of Megatron's optimizer.
    """

    place: Mapping[str, int]
    metrics: Mapping[str, float]
    norm: float
    pieces: tuple[Piece, ...]


@dataclass(frozen=True)
class Truth:
    """The step of one process.

    Attributes:
        layout: of the run. before, after: all weights by name. gradients: of those that train.
        buffers: persistent buffers by name. clip: the norm to which gradients are clipped.
        dropout: modules that drop at random, with their rates.
    """

    layout: str
    before: Mapping[str, Tensor]
    gradients: Mapping[str, Tensor]
    after: Mapping[str, Tensor]
    metrics: Mapping[str, float]
    norm: float
    clip: float
    vocabulary: int
    buffers: Mapping[str, Tensor]
    dropout: tuple[str, ...] = ()


def part(whole: Tensor, cut: Cut | None, shape: torch.Size) -> Tensor:
    """Cut a rank's part from a whole tensor; rows of vocabulary padding are zero."""
    if cut is None:
        return whole
    dim, stride, parts, rank = cut
    missing = shape[dim] * parts - whole.shape[dim]
    if missing > 0:
        whole = torch.cat((whole, whole.new_zeros(missing, *whole.shape[1:])))
    return torch.cat([chunk.chunk(parts, dim)[rank] for chunk in whole.chunk(stride, dim)], dim)
