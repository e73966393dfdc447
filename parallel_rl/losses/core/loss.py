"""A loss and the reader of its model's output, as `run` runs them."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Generic, TypeVar

from parallel_rl.config.strict import configure
from parallel_rl.layout import CPLayout, valid_tokens
from parallel_rl.losses.core.aggregation import weighted
from parallel_rl.losses.core.checks import check_values
from parallel_rl.losses.core.options import Temperature, VocabOptions
from parallel_rl.losses.core.recorded import RecordedCheck
from parallel_rl.losses.core.requirements import WEIGHTS, Requirements
from parallel_rl.statistics import Statistics
from parallel_rl.vocab.linear.lm_head import whole_logits
from parallel_rl.vocab.shards import Truncation

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
    """Local loss split into its parts.

    Attributes:
        parts: name → its addend with its coefficient; their sum is the local loss.
        held: reason → [T_local] bool, true where this reason dropped or bounded the token's term.
        values: name → [T_local] numbers of the tokens: "ratio", "importance", "kl".
    """

    parts: Mapping[str, Tensor]
    held: Mapping[str, Tensor] = field(default_factory=dict)
    values: Mapping[str, Tensor] = field(default_factory=dict)

    def under(self, prefix: str, coefficient: float) -> Account:
        return Account(
            {f"{prefix}{name}": coefficient * x for name, x in self.parts.items()},
            {f"{prefix}{name}": x for name, x in self.held.items()},
            {f"{prefix}{name}": x for name, x in self.values.items()},
        )

    def __or__(self, other: Account) -> Account:
        return Account({**self.parts, **other.parts}, {**self.held, **other.held}, {**self.values, **other.values})


class Loss(ABC, Generic[ConfigT]):
    """Definition of a loss: `config_class`, `compute`, other members only where a default does not fit."""

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
        """Return the fields that the loss reads and its properties; by default log-probs and no field."""
        return Requirements()

    @abstractmethod
    def compute(self, batch: TokenBatch) -> tuple[Tensor, Metrics]:
        """Compute the local loss and its metrics, from flat local tokens."""

    def objective(self, batch: TokenBatch) -> Tensor:
        """Compute the local loss alone, for gradients made in forward; override it to skip metrics."""
        return self.compute(batch)[0]

    def account(self, batch: TokenBatch) -> Account:
        """Split the local loss into its parts; a loss of several parts overrides it."""
        return Account({"loss": self.objective(batch)})

    def count_from(self, batch: TokenBatch) -> Statistics:
        """Count a micro-batch's part of the step's statistics; override it if `requirements.counted`.

        The batch is whole, with float64 fields, counts of 1 and no model output; weights and units are counted elsewhere.
        """
        return Statistics({})

    def collect_from(self, batch: TokenBatch) -> Statistics:
        """Collect this rank's statistics of the model's output; override it if `requirements.collected`."""
        raise NotImplementedError(f"{type(self).__name__} requires `collected`, but has no collect_from")

    def scored(self, data: Mapping[str, Tensor]) -> Tensor:
        """Return the loss tokens [B, S]: valid and, if weighted, of positive weight; override with `narrowed`."""
        valid = valid_tokens(data)
        return valid if self.requirements.token_weights is None else valid & (data[WEIGHTS.name] > 0)

    def narrowed(self, local: LocalBatch) -> LocalBatch:
        """Restrict the batch's mask to the tokens of `scored`; override both to score other tokens."""
        return local if self.requirements.token_weights is None else weighted(local)

    def check_data(self, data: Mapping[str, Tensor], needs: Requirements) -> None:
        """Check the data's values, if values are checked at all; override it to refuse more."""
        check_values(data, needs, truncated=bool(self.options.truncation))

    @property
    @abstractmethod
    def reader(self) -> Reader:
        """Return the reader of the model's output; a `LossFn` reads log-probs and entropy."""

    def with_options(self, options: VocabOptions) -> Self:
        """Copy the loss, state included, with other options; a loss that holds losses overrides it."""
        loss = copy.copy(self)
        loss.options = options
        return loss

    @property
    def on_policy(self) -> bool:
        """Return whether the trainer must refuse a second update on the same samples."""
        return False

    @property
    def kl_in_reward(self) -> bool:
        """Return whether the loss omits the KL to the reference because the advantages hold it."""
        return False

    def after_step(self, metrics: Mapping[str, float]) -> None:
        """Advance by one optimizer step with its reduced metrics, equal on all ranks; for schedules."""

    def state_dict(self) -> dict[str, float]:
        """Return the numbers that change over the steps, all from the start, equal on all ranks."""
        return {}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Continue from a `state_dict`; ValueError for another loss's state."""
        if state:
            raise ValueError(f"{type(self).__name__} has no state, got {dict(state)}")


@dataclass(frozen=True, eq=False)
class Reader(ABC):
    """Reader of the model's output for one loss, and its checks."""

    loss: Loss

    @property
    def reads_tree(self) -> bool:
        """Return whether `read` takes a prefix tree in row order; by default rows are copied per token."""
        return False

    @abstractmethod
    def read(self, local: LocalBatch, logits: Tensor, tensor_group: ProcessGroup | None) -> TokenBatch:
        """Read the logits, or a scalar head's output, into the batch of `compute`."""

    def read_head(
        self, local: LocalBatch, head: LMHeadInput, tensor_group: ProcessGroup | None
    ) -> tuple[TokenBatch, Tensor | None]:
        """Read hidden states, by default as whole logits; also return 0 with a gradient from forward, or None."""
        valid = self.loss.options.shard(head.weight.shape[0], tensor_group).valid
        return self.read(local, whole_logits(head, local.mask, valid, tensor_group), tensor_group), None

    def check(self, logits: Tensor, data: Mapping[str, Tensor], tensor_group: ProcessGroup | None) -> None:  # noqa: B027
        """Raise ValueError for output or data that do not fit; `logits` may be a stand-in without values."""

    def check_heads(
        self, head: LMHeadInput | None, heads: Mapping[str, LMHeadInput], tensor_group: ProcessGroup | None
    ) -> None:
        """Refuse fields given as `LMHeadInput`; override it to take them and check `head`."""
        for name in heads:
            raise ValueError(f"{name} must be a tensor, got LMHeadInput")

    def add_fields(self, logits: Tensor | None, data: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Add fields that the data may omit; `logits` are None while there is no output."""
        return data

    def layout(
        self, logits: Tensor, rows: int, width: int, context_group: ProcessGroup | None
    ) -> SequenceLayout | None:
        """Build the layout of an output without positions, such as [B]; None: the output has one per token."""
        return None
