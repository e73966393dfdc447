"""Policy-gradient surrogates: from ratios and advantages to a loss per token, one small class each, its fields its options.

A surrogate maps `PolicyTerms` to a loss per token. Notation: l = log π of the token with gradient, l_old of the policy
that the step began with, ρ the ratio at the level that the loss chose, A the advantage, sg stop-gradient.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from parallel_rl.config.strict import Variants
from parallel_rl.functional.ratio import cispo, clipped_surrogate, safe_exp


@dataclass(frozen=True)
class PolicyTerms:
    """Inputs of a surrogate, all [T_local]; masked places hold 0 (a ratio: 1).

    Attributes:
        logprobs, old_logprobs: l with gradient, and l_old without.
        token_log_ratio: l − l_old of each token. log_ratio, ratio: at the level of the loss, with its gradient.
        sequence_mean, sequence_sum: [T_local] to [T_local], over each whole sequence's valid tokens.
        samples: for a surrogate with `needs_statistics`, what it collected over the whole step, NaN at masked places.
        random: [T_local] uniform on [0, 1), for a surrogate with a `draw_seed`.
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


def positive(config: object, *names: str, below: float | None = None, zero: bool = False) -> None:
    """Check that options are positive (with `zero`: not negative) and below a bound; None passes.

    >>> positive(SPPO(), "epsilon", below=1)

    Raises:
        ValueError: the first that is not.
    """
    for name in names:
        value = getattr(config, name)
        if value is None:
            continue
        if not (value >= 0 if zero else value > 0) or (below is not None and not value < below):
            wanted = ("at least 0" if zero else "positive") + ("" if below is None else f" and below {below}")
            raise ValueError(f"{name} = {value} must be {wanted}")


def _by_sign(up: Tensor, there: float, elsewhere: float) -> Tensor:
    """Pick a number by a mask, in float64: `torch.where` on two numbers rounds them to float32."""
    return torch.full(up.shape, elsewhere, dtype=torch.float64, device=up.device).masked_fill(up, there)


@dataclass(frozen=True)
class PPO(Surrogate, name="ppo"):
    """Clipped surrogate: x = max(−A·ρ, −A·clip(ρ, 1 − ε_low, 1 + ε_high)), at most −A·c where A < 0 (dual clip).

    clip_low, clip_high: ε_low and ε_high (clip-higher of DAPO: 0.28). dual_clip: c > 1, None is off; with c beyond 1 + ε_high
    it is also the two-sided clip δ of INTELLECT-2.

    Papers: arXiv 1707.06347 (PPO), 1912.09729 (dual clip), 2503.14476 (clip-higher).
    """

    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = None

    def __post_init__(self) -> None:
        positive(self, "clip_low", "clip_high", zero=True)
        if self.dual_clip is not None and not self.dual_clip > 1:
            raise ValueError(f"dual_clip = {self.dual_clip} must exceed 1, or be None for no dual clip")

    def __call__(self, terms: PolicyTerms) -> Tensor:
        clipped = terms.ratio.clamp(1 - self.clip_low, 1 + self.clip_high)
        return clipped_surrogate(terms.ratio, clipped, terms.advantages, self.dual_clip)


@dataclass(frozen=True)
class Reinforce(Surrogate, name="reinforce"):
    """REINFORCE: x = −A·l. Papers: Williams 1992; arXiv 2402.14740 (RLOO), 2504.02546 (GPG)."""

    uses_ratio = False

    def __call__(self, terms: PolicyTerms) -> Tensor:
        return -terms.advantages * terms.logprobs


@dataclass(frozen=True)
class Ratio(Surrogate, name="ratio"):
    """Importance-sampled policy gradient without a clip: x = −A·ρ."""

    def __call__(self, terms: PolicyTerms) -> Tensor:
        return -terms.advantages * terms.ratio


@dataclass(frozen=True)
class CISPO(Surrogate, name="cispo"):
    """Clipped importance weight, every token keeps a gradient: x = −A·sg[clip(ρ, 1 − ε_low, 1 + ε_high)]·l.

    clip_low, clip_high: ε; 1.0 is no lower bound. mask_low, mask_high: drop tokens that PPO would clip: ρ > 1 + mask_high
    with A > 0, ρ < 1 − mask_low with A < 0; None is off.

    Paper: arXiv 2506.13585 (MiniMax-M1).
    """

    clip_low: float = 1.0
    clip_high: float = 0.28
    mask_low: float | None = None
    mask_high: float | None = None

    def __post_init__(self) -> None:
        positive(self, "clip_low", "clip_high", "mask_low", "mask_high", zero=True)

    def __call__(self, terms: PolicyTerms) -> Tensor:
        ratio, advantages = terms.ratio.detach(), terms.advantages
        loss = cispo(terms.logprobs, ratio.clamp(1 - self.clip_low, 1 + self.clip_high), advantages)
        if self.mask_high is not None:
            loss = torch.where((ratio > 1 + self.mask_high) & (advantages > 0), 0, loss)
        if self.mask_low is not None:
            loss = torch.where((ratio < 1 - self.mask_low) & (advantages < 0), 0, loss)
        return loss


@dataclass(frozen=True)
class SAPO(Surrogate, name="sapo"):
    """Soft adaptive gate in place of a clip: x = −A·f(ρ), f(ρ) = σ(τ·(ρ − 1))·4/τ, with the gradient through ρ.

    tau_pos, tau_neg: τ where A > 0, and elsewhere; tau_neg ≥ tau_pos. Paper: arXiv 2511.20347.
    """

    tau_pos: float = 1.0
    tau_neg: float = 1.05

    def __post_init__(self) -> None:
        positive(self, "tau_pos", "tau_neg")
        if self.tau_neg < self.tau_pos:
            raise ValueError(f"tau_neg = {self.tau_neg} must be at least tau_pos = {self.tau_pos}")

    def gate(self, terms: PolicyTerms) -> Tensor:
        """f(ρ) of each token."""
        tau = _by_sign(terms.advantages > 0, self.tau_pos, self.tau_neg)
        return (torch.sigmoid(tau * (terms.ratio - 1)) * 4 / tau).to(terms.ratio.dtype)

    def __call__(self, terms: PolicyTerms) -> Tensor:
        return -terms.advantages * self.gate(terms)


@dataclass(frozen=True)
class DetachedSAPO(SAPO, name="sapo_detached"):
    """Trinity-RFT's SAPO: x = −A·sg[f(ρ)]·l. Its gradient grows with ρ, which the paper's does not; prefer `sapo`."""

    def __call__(self, terms: PolicyTerms) -> Tensor:
        return -terms.advantages * self.gate(terms).detach() * terms.logprobs


@dataclass(frozen=True)
class TOPR(Surrogate, name="topr"):
    """Tapered off-policy REINFORCE: x = −sg[α]·A·l, α = clip(ρ, 0, 1) where A ≤ threshold, else 1.

    The paper's ρ is of the whole response: `ratio_level: sequence-sum`. Paper: arXiv 2503.14286.
    """

    advantage_threshold: float = 0.0

    def __call__(self, terms: PolicyTerms) -> Tensor:
        taper = terms.ratio.detach().clamp(0, 1)
        taper = torch.where(terms.advantages <= self.advantage_threshold, taper, 1)
        return -taper * terms.advantages * terms.logprobs


@dataclass(frozen=True)
class SPPO(Surrogate, name="sppo"):
    """Simple policy optimization of the log-ratio, inside a two-sided range: x = −A·(l − l_old)·1[1/(1+ε) ≤ ρ ≤ 1+ε].

    Paper: arXiv 2108.05828.
    """

    epsilon: float = 0.3

    def __post_init__(self) -> None:
        positive(self, "epsilon")

    def __call__(self, terms: PolicyTerms) -> Tensor:
        ratio = terms.ratio.detach()
        inside = (ratio >= 1 / (1 + self.epsilon)) & (ratio <= 1 + self.epsilon)
        return torch.where(inside, -terms.advantages * (terms.logprobs - terms.old_logprobs), 0)


@dataclass(frozen=True)
class OPMD(Surrogate, name="opmd"):
    """Online policy mirror descent: x = −A·l / (1 + τ). Papers: arXiv 2505.17826 (appendix A), 2501.12599."""

    uses_ratio = False
    tau: float = 1.0

    def __post_init__(self) -> None:
        positive(self, "tau", zero=True)

    def __call__(self, terms: PolicyTerms) -> Tensor:
        return -terms.advantages * terms.logprobs / (1 + self.tau)


@dataclass(frozen=True)
class GMPO(Surrogate, name="gmpo"):
    """Geometric-mean policy optimization: x = −A·exp(mean_t y'), y' = s·min(s·y, s·clip(y, −ε_low, ε_high)), s = sign A.

    y = l − l_old, so the bounds are in log space; A must be constant over a sequence. Goes with aggregation
    "seq-mean-token-mean". Paper: arXiv 2507.20673.
    """

    token_level = True
    token_separable = False
    clip_low: float = 0.4
    clip_high: float = 0.4

    def __post_init__(self) -> None:
        positive(self, "clip_low", "clip_high")

    def __call__(self, terms: PolicyTerms) -> Tensor:
        sign, y = terms.advantages.sign(), terms.token_log_ratio
        clipped = sign * torch.minimum(sign * y, sign * y.clamp(-self.clip_low, self.clip_high))
        return -terms.advantages * safe_exp(terms.sequence_mean(clipped))


@dataclass(frozen=True)
class CPGD(Surrogate, name="cpgd"):
    """Clipped policy gradient with drift: x = −A·l', l' = min(l, l_old + log(1 + ε_high)) where A > 0, else
    max(l, l_old + log(1 − ε_low)).

    The paper's drift term is the KL to l_old: `kl: {against: prev}`. Paper: arXiv 2505.12504.
    """

    token_level = True
    clip_low: float = 0.2
    clip_high: float = 0.2

    def __post_init__(self) -> None:
        positive(self, "clip_low", zero=True, below=1)
        positive(self, "clip_high", zero=True)

    def __call__(self, terms: PolicyTerms) -> Tensor:
        bounds = torch.tensor([1 + self.clip_high, 1 - self.clip_low], dtype=torch.float64).log().tolist()
        upper = torch.minimum(terms.logprobs, terms.old_logprobs + bounds[0])
        lower = torch.maximum(terms.logprobs, terms.old_logprobs + bounds[1])
        return -terms.advantages * torch.where(terms.advantages > 0, upper, lower)


@dataclass(frozen=True)
class VESPO(Surrogate, name="vespo"):
    """Variational sequence-level soft policy optimization: x = −sg[φ]·A·l, φ = W^k·exp(λ·(1 − W)), W = Π_t π/π_old.

    k and λ by the sign of A. log W is clamped to [log 1e-8, 20]. As TRL has it.
    """

    token_level = True
    token_separable = False
    k_pos: float = 2.0
    lambda_pos: float = 3.0
    k_neg: float = 3.0
    lambda_neg: float = 2.0

    def __post_init__(self) -> None:
        positive(self, "k_pos", "lambda_pos", "k_neg", "lambda_neg", zero=True)

    def __call__(self, terms: PolicyTerms) -> Tensor:
        log_weight = terms.sequence_sum(terms.token_log_ratio.detach().clamp(-20, 20)).clamp(-18.420680743952367, 20)
        up = terms.advantages >= 0
        k, scale = _by_sign(up, self.k_pos, self.k_neg), _by_sign(up, self.lambda_pos, self.lambda_neg)
        phi = (k * log_weight + scale * (1 - log_weight.exp())).exp().to(terms.logprobs.dtype)
        return -phi * terms.advantages * terms.logprobs
