"""Inputs of `check_law`: a name, class, instance, or function with the call of `LossFn`."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from parallel_rl.hosts.function_loss import FunctionLoss, LossCallable
from parallel_rl.layout import CPLayout
from parallel_rl.losses.core.base import LossFn
from parallel_rl.losses.registry import get_loss, registered_name
from parallel_rl.testing.batches import Sizes
from parallel_rl.testing.cases import EVERY_AXIS, Case, Subject
from parallel_rl.testing.layouts import Layout

Loss = str | type[LossFn] | LossFn | Subject | LossCallable  # inputs of `check_law`


@dataclass(frozen=True, eq=False)
class Given:
    """A loss instance with its options and state, copied for each layout."""

    loss: LossFn

    @property
    def name(self) -> str:
        return registered_name(type(self.loss))

    @property
    def axes(self) -> frozenset[str]:
        return EVERY_AXIS

    def build(
        self, *, vocab_size: int | None = None, cp_layout: CPLayout = "zigzag", consume_logits: bool = False
    ) -> LossFn:
        loss = copy.copy(self.loss)
        loss.options = replace(
            loss.options, vocab_size=vocab_size, vocab_start=None, cp_layout=cp_layout, consume_logits=consume_logits
        )
        return loss


def subject_of(loss: Loss) -> Subject:
    """Make a subject of a user's loss; ValueError for an unknown name or anything else.

    >>> subject_of("nll").name
    'nll'
    """
    if isinstance(loss, str):
        return Case(get_loss(loss))
    if isinstance(loss, type) and issubclass(loss, LossFn):
        return Case(loss)
    if isinstance(loss, LossFn):
        return Given(loss)
    if all(hasattr(loss, name) for name in ("build", "name", "axes")):
        return loss  # type: ignore[return-value]
    if callable(loss) and not isinstance(loss, type):
        return FunctionLoss(loss)
    raise ValueError(
        f"{loss!r} is not a loss: give a registered name, a subclass of LossFn or an instance of one, or a function with the "
        "call of LossFn"
    )


def sizes_of(subject: Subject, layouts: Sequence[Layout]) -> Sizes:
    """Choose sizes that all these layouts can cut, with an even vocabulary if shards must be equal."""
    rows = math.lcm(12, *(2 * layout.dp * layout.micro_batches for layout in layouts))
    width = math.lcm(16, *(2 * layout.cp for layout in layouts))
    tensor = math.lcm(*(layout.tp for layout in layouts)) if layouts else 1
    vocab = 24 if tensor <= 8 else 3 * tensor
    return Sizes(rows, width, vocab - 1 if "padded vocabulary" in subject.axes else math.lcm(24, tensor))
