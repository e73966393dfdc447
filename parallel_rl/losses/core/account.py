"""Breakdown of a loss on one batch: its parts, the tokens that it holds back and why, and numbers per token."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


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
