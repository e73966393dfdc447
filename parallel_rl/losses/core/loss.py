"""Definition of a loss and of its reader: config, requirements, computation, and what differs from the rule. No run."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Generic, TypeVar

from parallel_rl.config.strict import configure
from parallel_rl.layout import CPLayout, valid_tokens
from parallel_rl.losses.core.checks import check_values
from parallel_rl.losses.core.options import Temperature, VocabOptions
from parallel_rl.losses.core.recorded import RecordedCheck
from parallel_rl.losses.core.requirements import WEIGHTS, Requirements
from parallel_rl.losses.core.token_weights import weighted
from parallel_rl.statistics import Statistics
from parallel_rl.vocab.linear.logits import whole_logits
from parallel_rl.vocab.truncation import Truncation

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup
    from typing_extensions import Self

    from parallel_rl.layout import SequenceLayout
    from parallel_rl.losses.core.batch import TokenBatch
    from parallel_rl.losses.core.local_batch import LocalBatch
    from parallel_rl.metrics import Metrics
    from parallel_rl.vocab.backends.choice import Backend
    from parallel_rl.vocab.linear.lm_head import LMHeadInput

ConfigT = TypeVar("ConfigT")


@dataclass(frozen=True, eq=False)
class Account:
    """The share of a loss taken apart, by the computation that makes the share.

    Attributes:
        parts: name → its share with its coefficient; their sum is the share of the loss.
        held: reason → [T_local] bool, the tokens whose term it takes away, bounds or lies outside the range of.
        values: name → [T_local] numbers of the tokens: "ratio", "importance", "kl".
    """

    parts: Mapping[str, Tensor]
    held: Mapping[str, Tensor] = field(default_factory=dict)
    values: Mapping[str, Tensor] = field(default_factory=dict)

    def under(self, prefix: str, coefficient: float) -> Account:
        """The account of a component, whose share is multiplied by its coefficient."""
        return Account(
            {f"{prefix}{name}": coefficient * x for name, x in self.parts.items()},
            {f"{prefix}{name}": x for name, x in self.held.items()},
            {f"{prefix}{name}": x for name, x in self.values.items()},
        )

    def __or__(self, other: Account) -> Account:
        """Both, of a sum of two losses."""
        return Account({**self.parts, **other.parts}, {**self.held, **other.held}, {**self.values, **other.values})


class Loss(ABC, Generic[ConfigT]):
    """Definition of a loss; `LossFn` is one that can be called.

    A loss has a `config_class`, `requirements` and `compute`. It overrides another method where it differs from the rule that
    the method's docstring states.
    """

    config_class: type[ConfigT]

    def __init__(
        self,
        config: ConfigT | Mapping | None = None,
        *,
        vocab_size: int | None = None,
        vocab_start: int | None = None,
        cp_layout: CPLayout = "zigzag",
        temperature: Temperature = 1.0,
        consume_logits: bool = False,
        backend: Backend = "auto",
        top_k: int | None = None,
        top_p: float | None = None,
        kept_sets: bool = False,
        logit_scale: float = 1.0,
    ) -> None:
        self.config = configure(self.config_class, config)
        self.recorded_check = RecordedCheck()
        truncation = Truncation(top_k, top_p, kept_sets)
        self.options = VocabOptions(
            vocab_size, vocab_start, cp_layout, temperature, consume_logits, backend, truncation, logit_scale
        )
        if truncation and not self.requirements.truncatable:
            raise ValueError(
                f"{type(self).__name__} is not a loss on a sampler's policy, so {truncation} does not fit it"
            )

    @cached_property
    def requirements(self) -> Requirements:
        """Fields that the loss reads and properties that it claims, from its config; by default log-probs and no field."""
        return Requirements()

    @abstractmethod
    def compute(self, batch: TokenBatch) -> tuple[Tensor, Metrics]:
        """Compute the share of the loss and its metrics, from flat local tokens."""

    def objective(self, batch: TokenBatch) -> Tensor:
        """Compute the share alone, for gradients in forward; a loss with costly metrics overrides it to leave them out."""
        return self.compute(batch)[0]

    def account(self, batch: TokenBatch) -> Account:
        """Take the share of `objective` apart; a loss that is made of parts overrides it."""
        return Account({"loss": self.objective(batch)})

    def count_from(self, batch: TokenBatch) -> Statistics:
        """Count what a micro-batch's data alone adds to the statistics of the step; a loss that is `counted` overrides it.

        Args:
            batch: whole on this rank, with float64 fields, without any output of the model; its counts are 1. Its token
                weights, and the units of an aggregation, are counted already.
        """
        return Statistics({})

    def collect_from(self, batch: TokenBatch) -> Statistics:
        """Collect this rank's statistics of the model's output; a loss that is `collected` overrides it."""
        raise NotImplementedError(f"{type(self).__name__} requires `collected`, but has no collect_from")

    def scored(self, data: Mapping[str, Tensor]) -> Tensor:
        """Find the tokens [B, S] that may carry loss, by default the valid ones with a weight; override it with `narrowed`."""
        valid = valid_tokens(data)
        return valid if self.requirements.token_weights is None else valid & (data[WEIGHTS.name] > 0)

    def narrowed(self, local: LocalBatch) -> LocalBatch:
        """Narrow the batch's mask to the tokens of `scored`; a loss overrides both if it scores other tokens."""
        return local if self.requirements.token_weights is None else weighted(local)

    def check_data(self, data: Mapping[str, Tensor], needs: Requirements) -> None:
        """Refuse wrong values of the data, where values are looked at; a loss overrides it to refuse more.

        Raises:
            ValueError: names field, value and place.
        """
        check_values(data, needs, truncated=bool(self.options.truncation))

    @property
    @abstractmethod
    def reader(self) -> Reader:
        """Reader of the model's output; a loss that reads something else than log-probs and entropy overrides it."""

    def with_options(self, options: VocabOptions) -> Self:
        """Copy the loss, state included, to other options; a loss that holds losses overrides it."""
        loss = copy.copy(self)
        loss.options = options
        return loss

    @property
    def on_policy(self) -> bool:
        """Whether the loss is right only for the policy that drew the samples, so that a second update on them is refused."""
        return False

    @property
    def kl_in_reward(self) -> bool:
        """Whether it leaves the KL to the reference out because the advantages hold it already."""
        return False

    def after_step(self, metrics: Mapping[str, float]) -> None:
        """Move on by one optimizer step; the trainer calls it after each. A loss with a schedule overrides it.

        Args:
            metrics: of the step, reduced: equal on all ranks, so that what follows from them is too.
        """

    def state_dict(self) -> dict[str, float]:
        """The numbers that change over the steps, for a checkpoint; equal on all ranks, empty without a state.

        A loss with a state names it from its start on: a resumed run looks for what its new loss has.
        """
        return {}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Continue from where `state_dict` was taken.

        Raises:
            ValueError: a state that this loss does not have.
        """
        if state:
            raise ValueError(f"{type(self).__name__} has no state, got {dict(state)}")


@dataclass(frozen=True, eq=False)
class Reader(ABC):
    """Reader of the model's output for its loss: what is read there, and what is refused.

    Attributes:
        loss: whose reader it is.
    """

    loss: Loss

    @property
    def by_edges(self) -> bool:
        """Whether logits of a prefix tree are read in the order of its rows; by default a row is copied for each token."""
        return False

    @abstractmethod
    def read(self, local: LocalBatch, logits: Tensor, tensor_group: ProcessGroup | None) -> TokenBatch:
        """Read the logits, or the output of a scalar head, into the batch that `compute` sees."""

    def read_head(
        self, local: LocalBatch, head: LMHeadInput, tensor_group: ProcessGroup | None
    ) -> tuple[TokenBatch, Tensor | None]:
        """Read hidden states, by default as whole logits; an exact 0 carries a gradient that was computed on the way."""
        valid = self.loss.options.shard(head.weight.shape[0], tensor_group).valid
        return self.read(local, whole_logits(head, local.mask, valid, tensor_group), tensor_group), None

    def check(self, logits: Tensor, data: Mapping[str, Tensor], tensor_group: ProcessGroup | None) -> None:  # noqa: B027
        """Refuse an output, and values of the data, that do not fit the loss and its options.

        Args:
            logits: or what stands for them beside hidden states; no value is read.

        Raises:
            ValueError: names what does not fit.
        """

    def check_heads(
        self, head: LMHeadInput | None, heads: Mapping[str, LMHeadInput], tensor_group: ProcessGroup | None
    ) -> None:
        """Refuse fields that are an `LMHeadInput` in place of a tensor, and a student's `head` that does not suit them."""
        for name in heads:
            raise ValueError(f"{name} must be a tensor, got LMHeadInput")

    def complete(self, logits: Tensor | None, data: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Add fields to the data that the loss can do without; a reader of whole rows overrides it.

        Args:
            logits: None where there are none yet.
        """
        return data

    def layout(
        self, logits: Tensor, rows: int, width: int, context_group: ProcessGroup | None
    ) -> SequenceLayout | None:
        """Build the layout of an output that has no positions, such as [B]; None: the output has one per token."""
        return None
