"""Base of the policy-gradient surrogates: from ratios and advantages to a loss per token and its clip."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

from torch import Tensor

from parallel_rl.config.strict import Variants
from parallel_rl.functional.ratio import MAX_EXPONENT


@dataclass(frozen=True)
class PolicyTerms:
    """Inputs of a surrogate, all [T_local]; masked places hold 0 (a ratio: 1).

    Attributes:
        logprobs, old_logprobs: l with gradient, l_old without.
        token_log_ratio: l − l_old of each token. log_ratio, ratio: at the level of the loss, with its gradient.
        sequence_mean, sequence_sum: [T_local] to [T_local], over each whole sequence's valid tokens.
        samples: collected over the whole step for a surrogate with `needs_statistics`, NaN at masked places.
        random: [T_local] uniform on [0, 1), for a surrogate with a `draw_seed`.
        overflow: [T_local] bool, tokens whose ratio exceeds e^80; `ratio` holds 1 there, and their loss does not count.
    """

    logprobs: Tensor
    old_logprobs: Tensor
    token_log_ratio: Tensor
    log_ratio: Tensor
    ratio: Tensor
    advantages: Tensor
    sequence_mean: Callable[[Tensor], Tensor]
    sequence_sum: Callable[[Tensor], Tensor]
    samples: Mapping[str, Tensor] = field(default_factory=dict)
    random: Tensor | None = None
    overflow: Tensor | None = None


def follows_overflow(terms: PolicyTerms, loss: Tensor) -> Tensor:
    """Mark tokens (bool) whose loss [T_local] grows with a ratio above e^80; a bounded ratio is harmless.

    >>> import torch
    >>> x = torch.tensor([1.0, 100.0])
    >>> terms = PolicyTerms(x, x, x, x, x.clamp(max=80).exp(), -torch.ones(2), lambda x: x, lambda x: x)
    >>> follows_overflow(terms, terms.ratio), follows_overflow(terms, terms.ratio.clamp(max=1.2))
    (tensor([False,  True]), tensor([False, False]))
    """
    ratio, size = terms.ratio.detach(), terms.advantages.abs()
    return (terms.log_ratio.detach() > MAX_EXPONENT) & (loss.detach().abs() > size * ratio / 2)


class Clipped(NamedTuple):
    """Tokens beyond the range that a surrogate allows, [T_local] bool each.

    Attributes:
        low, high: below and above the range, for any advantage. bites: those without gradient (PPO: if A drives them further
            out). dual: those limited by a second bound (dual clip, a cap on the ratio); None without one.
    """

    low: Tensor
    high: Tensor
    bites: Tensor
    dual: Tensor | None = None


def driven_out(low: Tensor, high: Tensor, advantages: Tensor) -> Tensor:
    """Mark tokens below the range that their advantage lowers, and tokens above it that it raises.

    >>> import torch
    >>> low, high = torch.tensor([True, True, False]), torch.tensor([False, False, True])
    >>> driven_out(low, high, torch.tensor([-1.0, 1.0, 1.0]))
    tensor([ True, False,  True])
    """
    return (low & (advantages < 0)) | (high & (advantages > 0))


class Surrogate(Variants):
    """Base of the surrogates, an option of the policy loss: `name: ppo` with the options of that class."""

    uses_ratio: ClassVar[bool] = True
    token_level: ClassVar[bool] = False  # only ratios of single tokens make sense
    needs_statistics: ClassVar[bool] = False  # `collect` must run over the whole step first
    token_separable: ClassVar[bool] = True  # a token's term depends on the log-probs of no other token

    @property
    def draw_seed(self) -> int | None:
        """Return the seed of a surrogate that selects tokens at random."""
        return None

    @abstractmethod
    def __call__(self, terms: PolicyTerms) -> Tensor:
        """Compute the loss of each token, [T_local]."""

    def collect(self, terms: PolicyTerms) -> dict[str, Tensor]:
        """Return the values of each token, [T_local], that `terms.samples` will hold for the whole step."""
        return {}

    def clipped(self, terms: PolicyTerms) -> Clipped | None:
        """Return the clipped tokens, for metrics; None without a clip."""
        return None
