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
        """Return whether the step is the user's."""
        return self.forward_step is not None or self.loss_callback is not None


@dataclass(frozen=True)
class Piece:
    """One weight on one rank, after the step."""

    name: str  # in a one-process model
    gradient: Tensor | None  # this rank's part; None if the weight is frozen here
    after: Tensor  # this rank's part
    cut: Cut | None  # this rank's part of the whole weight; None: all of it
    marked: bool  # Megatron's norm treats it as a shard, and counts it on every tensor rank
    expert: bool  # the weight lies on expert parallel ranks


@dataclass(frozen=True)
class RankResult:
    """One rank's result of the step on one layout."""

    place: Mapping[str, int]  # its rank in each group, by axis: tensor, context, data, pipeline, expert
    metrics: Mapping[str, float]  # reduced as a training loop logs them
    norm: float  # of Megatron's optimizer
    pieces: tuple[Piece, ...]


@dataclass(frozen=True)
class Truth:
    """The step of one process."""

    layout: str
    before: Mapping[str, Tensor]  # all weights by name
    gradients: Mapping[str, Tensor]  # of the weights that train
    after: Mapping[str, Tensor]
    metrics: Mapping[str, float]
    norm: float
    clip: float  # the norm to which gradients are clipped
    vocabulary: int
    buffers: Mapping[str, Tensor]  # persistent ones by name
    dropout: tuple[str, ...] = ()  # modules that drop at random, with their rates


def part(whole: Tensor, cut: Cut | None, shape: torch.Size) -> Tensor:
    """Cut a rank's part from a whole tensor; rows of vocabulary padding are zero."""
    if cut is None:
        return whole
    dim, stride, parts, rank = cut
    missing = shape[dim] * parts - whole.shape[dim]
    if missing > 0:
        whole = torch.cat((whole, whole.new_zeros(missing, *whole.shape[1:])))
    return torch.cat([chunk.chunk(parts, dim)[rank] for chunk in whole.chunk(stride, dim)], dim)
