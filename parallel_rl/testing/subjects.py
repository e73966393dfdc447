"""Inputs of `check_law`: a name, class, instance, or function with the call of `LossFn`."""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from parallel_rl.layout import CPLayout
from parallel_rl.losses.core.base import LossFn
from parallel_rl.losses.core.call import LossCall, LossFunction
from parallel_rl.losses.core.requirements import Field, Requirements
from parallel_rl.losses.registry import get_loss, registered_name
from parallel_rl.metrics import Metric, Metrics
from parallel_rl.statistics import Statistics
from parallel_rl.testing.batches import Sizes
from parallel_rl.testing.cases import EVERY_AXIS, Case, Subject
from parallel_rl.testing.layouts import Layout

# (next_token_logits, data, n_seqs, n_toks, tensor rank, tensor group, context group) -> the loss, perhaps with metrics
LossCallable = Callable[..., "Tensor | tuple[Tensor, Mapping[str, float | Tensor]]"]
Loss = str | type[LossFn] | LossFn | Subject | LossCallable  # inputs of `check_law`
_CALL = (
    "next_token_logits", "data", "global_valid_seqs", "global_valid_toks",
    "vocab_parallel_rank", "vocab_parallel_group", "context_parallel_group",
)  # fmt: skip


@dataclass(frozen=True, eq=False)
class Given:
    """A loss instance with its options and state, rebuilt for each layout."""

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
        """Copy the loss for this layout."""
        loss = copy.copy(self.loss)
        loss.options = replace(
            loss.options, vocab_size=vocab_size, vocab_start=None, cp_layout=cp_layout, consume_logits=consume_logits
        )
        return loss


@dataclass(frozen=True, eq=False)
class FunctionLoss:
    """A function or object with the seven arguments of `LossFn`'s call, such as a loss of NeMo-RL.

    >>> import torch
    >>> def doubled(logits, data, seqs, toks, rank=None, tensor=None, context=None):
    ...     return 2 * logits.logsumexp(-1).mean(), {}
    >>> FunctionLoss(doubled, axes=frozenset({"data", "micro-batches"})).name
    'doubled'

    Attributes:
        call: it may return the loss alone, or the loss and a mapping of metrics, numbers that are summed over ranks.
        fields: of the data, beside input_ids, token_mask and sample_mask.
        axes: that it can be run on; the call tells nothing of a contiguous context layout, packing and padding columns.

    Raises:
        ValueError: a function that does not take these arguments, such as an objective that is not registered.
    """

    call: LossCallable
    fields: tuple[str, ...] = ()
    axes: frozenset[str] = frozenset({"tensor", "context", "data", "micro-batches"})

    def __post_init__(self) -> None:
        try:
            signature = inspect.signature(self.call)
        except (TypeError, ValueError):  # of a builtin
            return
        try:
            signature.bind(*_CALL)
        except TypeError:
            raise ValueError(
                f"{self.name}({', '.join(signature.parameters)}) does not take the {len(_CALL)} arguments of a loss's call "
                f"({', '.join(_CALL)}); an "
                f'objective (logprobs, batch) becomes a loss by @register_objective("{self.name}", token_fields=(...)) above it'
            ) from None

    @property
    def name(self) -> str:
        return getattr(self.call, "__name__", type(self.call).__name__)

    def build(
        self, *, vocab_size: int | None = None, cp_layout: CPLayout = "zigzag", consume_logits: bool = False
    ) -> LossFunction:
        """Return the function itself: its call knows neither padding columns nor the context layout."""
        return _Called(self)


class _Called(LossFunction):
    def __init__(self, subject: FunctionLoss) -> None:
        self.subject = subject

    @property
    def requirements(self) -> Requirements:
        return Requirements(tuple(Field(name) for name in self.subject.fields))

    def run(self, call: LossCall) -> tuple[Tensor, Metrics]:
        result = self.subject.call(
            call.output, call.data, call.global_valid_seqs, call.global_valid_toks,
            call.tensor_rank, call.tensor_group, call.context_group,
        )  # fmt: skip
        loss, metrics = result if isinstance(result, tuple) else (result, {})
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            got = f"a tensor {list(loss.shape)}" if isinstance(loss, Tensor) else repr(loss)
            raise ValueError(f"{self.subject.name} must return a scalar tensor, and metrics if any; got {got}")
        numbers = {name: torch.as_tensor(value, dtype=torch.float64) for name, value in metrics.items()}
        return loss, Metrics({name: Metric("share", value) for name, value in {"loss": loss, **numbers}.items()})

    def count(
        self,
        batches: Mapping[str, Tensor] | Sequence[Mapping[str, Tensor]],
        data_parallel_group: ProcessGroup | None = None,
    ) -> Statistics:
        return Statistics({})

    def run_collect(self, call: LossCall) -> Statistics:
        raise ValueError(f"{self.subject.name} needs no statistics of the step")


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
