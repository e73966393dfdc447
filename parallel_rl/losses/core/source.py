"""Interface of a source, the origin of a call's model output."""

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
    """Log-probs and entropy of a host, [B, A], and their original form."""

    rows: Rows
    logprobs: Tensor
    entropy: Tensor | None


class Placed(NamedTuple):
    """Data of a call as rows of tokens after checks of shape, and where its tokens lie.

    Attributes:
        counted: the data whose sequences and tokens the call's counts cover.
        values: of a host, as rows without a sequence's first token; rows may be split over context ranks.
    """

    data: Mapping[str, Tensor]
    needs: Requirements
    layout: SequenceLayout
    counted: Mapping[str, Tensor]
    values: HostValues | None = None

    @property
    def of_host(self) -> bool:
        return self.values is not None


class Agreement(NamedTuple):
    """Terms that ranks agree on before a call: groups, numbers, and data that must be equal."""

    groups: tuple[ProcessGroup | None, ...]
    facts: dict[str, int]
    alike: Replicated


@dataclass(frozen=True, eq=False)
class Source(ABC):
    """Origin of the model's output; `run` calls its methods in their order.

    Until `check_output` has passed on all ranks, a source reads no values of the data and does not communicate. `template` has
    the device, dtype and leading shape of the output.
    """

    loss: Loss
    template: Tensor

    @abstractmethod
    def needs(self) -> Requirements:
        """Return the requirements on this data: optional fields that are there, and what the options read."""

    @abstractmethod
    def agreement(self, needs: Requirements, counts: dict[str, float]) -> Agreement:
        """Return what the ranks of this call must agree on; `counts` are those of the step."""

    @abstractmethod
    def check_reads(self, needs: Requirements) -> None:
        """Raise ValueError if, by types, shapes and options, the loss cannot read this output."""

    @abstractmethod
    def place(self, needs: Requirements) -> Placed:
        """Check the data's types and shapes, and find where its tokens lie; raises ValueError."""

    @abstractmethod
    def check_output(self, placed: Placed) -> None:
        """Check the output, and its values against the data's if values are checked; raises ValueError."""

    @abstractmethod
    def read(self, local: LocalBatch, placed: Placed) -> tuple[TokenBatch, Tensor | None]:
        """Read the output into the batch of `compute`, and an exact 0 with a gradient computed on the way."""
