"""Breakdown of a loss on one batch: its parts, the tokens that it holds back and why, and numbers per token."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from parallel_rl.losses.core.base import ConfigT, LossFn

if TYPE_CHECKING:
    from torch import Tensor

    from parallel_rl.losses.core.batch import TokenBatch


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


class AccountedLoss(LossFn[ConfigT]):
    """Base of the losses that are made of parts."""

    @abstractmethod
    def account(self, batch: TokenBatch) -> Account:
        """The share of `objective`, taken apart."""


def account_of(loss_fn: LossFn, batch: TokenBatch) -> Account:
    """The account of any loss: one that has no parts is one part, "loss"."""
    return loss_fn.account(batch) if isinstance(loss_fn, AccountedLoss) else Account({"loss": loss_fn.objective(batch)})
