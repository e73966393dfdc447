"""Base of the policy-gradient surrogates: from ratios and advantages to a loss per token, and to the tokens that it clips."""

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
        logprobs, old_logprobs: l with gradient, and l_old without.
        token_log_ratio: l − l_old of each token. log_ratio, ratio: at the level of the loss, with its gradient.
        sequence_mean, sequence_sum: [T_local] to [T_local], over each whole sequence's valid tokens.
        samples: for a surrogate with `needs_statistics`, what it collected over the whole step, NaN at masked places.
        random: [T_local] uniform on [0, 1), for a surrogate with a `draw_seed`.
        overflow: [T_local] bool, tokens whose ratio exceeds e^80: it is 1 here, and their loss does not count.
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
    """Mark the tokens, bool, whose loss [T_local] is that of a ratio above e^80, which a sum over a long response may reach.

    A surrogate that bounds the ratio (CISPO, TOPR, PPO where A > 0) keeps its value there.

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
        low, high: below and above the range, whatever the advantage.
        bites: those of them that the surrogate holds back: PPO those that A would drive further out.
        dual: those that a second bound on A < 0 holds back (dual clip, a cap on the ratio); None without one.
    """

    low: Tensor
    high: Tensor
    bites: Tensor
    dual: Tensor | None = None


def driven_out(low: Tensor, high: Tensor, advantages: Tensor) -> Tensor:
    """Mark the tokens below the range whose advantage lowers them further, and those above it that it raises further.

    >>> import torch
    >>> low, high = torch.tensor([True, True, False]), torch.tensor([False, False, True])
    >>> driven_out(low, high, torch.tensor([-1.0, 1.0, 1.0]))
    tensor([ True, False,  True])
    """
    return (low & (advantages < 0)) | (high & (advantages > 0))


class Surrogate(Variants):
    """Base of the surrogates: one option of the policy loss, chosen in its config as `name: ppo` with that class's options.

    It is a union of config classes; losses are registered with `register_loss`.
    """

    uses_ratio: ClassVar[bool] = True
    #: whether only the ratio of single tokens makes sense
    token_level: ClassVar[bool] = False
    #: whether `collect` must run over the whole step first
    needs_statistics: ClassVar[bool] = False
    #: whether a token's term depends on the log-probs of no other token
    token_separable: ClassVar[bool] = True

    @property
    def draw_seed(self) -> int | None:
        """The seed of a surrogate that draws at random."""
        return None

    @abstractmethod
    def __call__(self, terms: PolicyTerms) -> Tensor:
        """[T_local] the loss of each token."""

    def collect(self, terms: PolicyTerms) -> dict[str, Tensor]:
        """[T_local] each: the values of every token of the step that `terms.samples` then holds."""
        return {}

    def clipped(self, terms: PolicyTerms) -> Clipped | None:
        """The tokens that it clips, for metrics; None for a surrogate that does not clip."""
        return None
