"""Interface of a source, the origin of the model's output of a call."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor
    from torch.distributed import ProcessGroup

    from parallel_rl.layout import SequenceLayout
    from parallel_rl.losses.core.batch import TokenBatch
    from parallel_rl.losses.core.local_batch import LocalBatch
    from parallel_rl.losses.core.log_prob_rows import Rows
    from parallel_rl.losses.core.loss import Loss
    from parallel_rl.losses.core.requirements import Requirements
    from parallel_rl.replicated import Replicated


class HostValues(NamedTuple):
    """A host's log-probs and entropy, [B, A], and the form that they came in."""

    rows: Rows
    logprobs: Tensor
    entropy: Tensor | None


class Placed(NamedTuple):
    """The data of a call, checked in shape, and where its tokens lie.

    Attributes:
        data: rows of tokens.
        needs: of the loss, in the order of these rows.
        layout: of the model's output.
        counted: the data whose sequences and tokens are those of this call, for its counts of the step.
        values: of a host, which come as rows; a row's first token is not among them, and rows may be cut over context ranks.
    """

    data: Mapping[str, Tensor]
    needs: Requirements
    layout: SequenceLayout
    counted: Mapping[str, Tensor]
    values: HostValues | None = None


class Agreement(NamedTuple):
    """Terms in which ranks agree before a call: groups, numbers, and what each of them holds alike."""

    groups: tuple[ProcessGroup | None, ...]
    facts: dict[str, int]
    alike: Replicated


@dataclass(frozen=True, eq=False)
class Source(ABC):
    """Origin of the model's output; `run` calls its methods in their order.

    Before `check_output` has passed on all ranks, a source looks at no value of the data and communicates nothing.

    Attributes:
        loss: that reads it.
        like: stands for the output: its device, dtype and leading shape.
    """

    loss: Loss
    like: Tensor

    @abstractmethod
    def needs(self) -> Requirements:
        """Find the requirements of a call on this data: optional fields that are there, and what the options read."""

    @abstractmethod
    def agreement(self, needs: Requirements, counts: dict[str, float]) -> Agreement:
        """Name what the ranks that make this call together must agree in; `counts` are those of the step."""

    @abstractmethod
    def check_reads(self, needs: Requirements) -> None:
        """Check, by types, shapes and options, that the loss can read this output.

        Raises:
            ValueError: it cannot.
        """

    @abstractmethod
    def place(self, needs: Requirements) -> Placed:
        """Check the data's types and shapes, and find where its tokens lie.

        Raises:
            ValueError: names the field and what it should be.
        """

    @abstractmethod
    def check_output(self, placed: Placed) -> None:
        """Check the output, and its values beside the data's, where values are looked at.

        Raises:
            ValueError: names the value and its place.
        """

    @abstractmethod
    def read(self, local: LocalBatch, placed: Placed) -> tuple[TokenBatch, Tensor | None]:
        """Read the output into the batch that `compute` sees; an exact 0 carries a gradient that was computed on the way."""
