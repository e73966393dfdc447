"""Results of the policy loss on a batch: the local loss and its parts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from parallel_rl.functional.surrogate import Clipped, PolicyTerms
from parallel_rl.losses.core.loss import Account

if TYPE_CHECKING:
    from torch import Tensor

    from parallel_rl.metrics import Metric


class MaskedSurrogate(NamedTuple):
    """Surrogate after weights and masks, with both and their metrics.

    Attributes:
        passed: reason → [T_local] bool, the tokens that keep their surrogate.
        importance, overflow: [T_local] ω, if weighted; bool, the tokens whose ratio to the recorded policy overflows.
    """

    surrogate: Tensor
    metrics: dict[str, Metric]
    passed: dict[str, Tensor]
    importance: Tensor | None = None
    overflow: Tensor | None = None


@dataclass(frozen=True)
class PolicyShares:
    """Local loss, its metrics, the surrogate's inputs, and parts, masks and token values.

    Attributes:
        parts: local losses with their coefficients; their sum is the loss.
        passed: see `MaskedSurrogate`, including the rejection.
    """

    loss: Tensor
    metrics: dict[str, Metric]
    terms: PolicyTerms
    parts: dict[str, Tensor]
    passed: dict[str, Tensor]
    values: dict[str, Tensor]

    def account(self, mask: Tensor, clipped: Clipped | None, *, has_ratio: bool) -> Account:
        """Split the local loss; `clipped` is the surrogate's, `has_ratio` whether its ratio has a meaning."""
        held = {reason: mask & ~passed for reason, passed in self.passed.items()}
        if "importance" in self.values:
            held["importance_weight_0"] = mask & (self.values["importance"] == 0)
        if clipped is not None:
            flags = {"below_range": clipped.low, "above_range": clipped.high, "clipped": clipped.bites}
            flags |= {} if clipped.dual is None else {"dual_clipped": clipped.dual}
            held |= {name: mask & flag for name, flag in flags.items()}
        values = {**({"ratio": self.terms.ratio} if has_ratio else {}), **self.values}
        return Account(self.parts, held, {name: x.detach() for name, x in values.items()})
