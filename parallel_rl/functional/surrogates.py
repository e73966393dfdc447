"""Policy-gradient surrogates, one small class each, its fields its options; see `Surrogate`.

Notation: l = log π of the token with gradient, l_old of the policy at the start of the step, ρ the ratio at the loss's level,
A the advantage, sg stop-gradient.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from parallel_rl.config.strict import positive
from parallel_rl.functional.ratio import cispo, clipped_surrogate, safe_exp
from parallel_rl.functional.surrogate import Clipped, PolicyTerms, Surrogate, driven_out


def _by_sign(up: Tensor, above: float, below: float) -> Tensor:
    # float64, which `torch.where` on two numbers would round to float32
    return torch.full(up.shape, below, dtype=torch.float64, device=up.device).masked_fill(up, above)


@dataclass(frozen=True)
class PPO(Surrogate, name="ppo"):
    """Clipped surrogate, at most −A·c where A < 0 (dual clip):
    x = max(−A·ρ, −A·clip(ρ, 1 − ε_low, 1 + ε_high)).

    clip_low: ε_low. clip_high: ε_high (clip-higher of DAPO: 0.28). dual_clip: c > 1; None is off. A c above 1 + ε_high is also
        the two-sided clip δ of INTELLECT-2.
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

    def clipped(self, terms: PolicyTerms) -> Clipped:
        low, high = terms.ratio < 1 - self.clip_low, terms.ratio > 1 + self.clip_high
        dual = None if self.dual_clip is None else (terms.ratio > self.dual_clip) & (terms.advantages < 0)
        return Clipped(low, high, driven_out(low, high, terms.advantages), dual)


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
    """Clipped importance weight: x = −A·sg[clip(ρ, 1 − ε_low, 1 + ε_high)]·l.
    Every token keeps a gradient.

    clip_low: ε_low; 1.0 is no lower bound. clip_high: ε_high. mask_low: drop tokens with ρ < 1 − mask_low and A < 0, as PPO's
        clip does; None is off. mask_high: drop tokens with ρ > 1 + mask_high and A > 0; None is off.
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

    def clipped(self, terms: PolicyTerms) -> Clipped:
        low, high = terms.ratio < 1 - self.clip_low, terms.ratio > 1 + self.clip_high
        return Clipped(low, high, low | high)


@dataclass(frozen=True)
class SAPO(Surrogate, name="sapo"):
    """Soft adaptive gate in place of a clip, with the gradient through ρ:
    x = −A·f(ρ), f(ρ) = σ(τ·(ρ − 1))·4/τ.

    tau_pos: τ where A > 0. tau_neg: τ where A ≤ 0, at least tau_pos. Paper: arXiv 2511.20347.
    """

    tau_pos: float = 1.0
    tau_neg: float = 1.05

    def __post_init__(self) -> None:
        positive(self, "tau_pos", "tau_neg")
        if self.tau_neg < self.tau_pos:
            raise ValueError(f"tau_neg = {self.tau_neg} must be at least tau_pos = {self.tau_pos}")

    def gate(self, terms: PolicyTerms) -> Tensor:
        """Return f(ρ) of each token."""
        tau = _by_sign(terms.advantages > 0, self.tau_pos, self.tau_neg)
        return (torch.sigmoid(tau * (terms.ratio - 1)) * 4 / tau).to(terms.ratio.dtype)

    def __call__(self, terms: PolicyTerms) -> Tensor:
        return -terms.advantages * self.gate(terms)


@dataclass(frozen=True)
class DetachedSAPO(SAPO, name="sapo_detached"):
    """Trinity-RFT's SAPO: x = −A·sg[f(ρ)]·l. Unlike the paper's, its gradient grows with ρ; prefer `sapo`."""

    def __call__(self, terms: PolicyTerms) -> Tensor:
        return -terms.advantages * self.gate(terms).detach() * terms.logprobs


@dataclass(frozen=True)
class TOPR(Surrogate, name="topr"):
    """Tapered off-policy REINFORCE: x = −sg[α]·A·l, α = clip(ρ, 0, 1) where A ≤ threshold, else 1.

    advantage_threshold: the threshold. Paper: arXiv 2503.14286, with ρ of the whole response (`ratio_level: sequence-sum`).
    """

    advantage_threshold: float = 0.0

    def __call__(self, terms: PolicyTerms) -> Tensor:
        taper = terms.ratio.detach().clamp(0, 1)
        taper = torch.where(terms.advantages <= self.advantage_threshold, taper, 1)
        return -taper * terms.advantages * terms.logprobs


@dataclass(frozen=True)
class SPPO(Surrogate, name="sppo"):
    """Simple policy optimization of the log-ratio in a two-sided range (arXiv 2108.05828):
    x = −A·(l − l_old)·1[1/(1+ε) ≤ ρ ≤ 1+ε].

    epsilon: ε.
    """

    epsilon: float = 0.3

    def __post_init__(self) -> None:
        positive(self, "epsilon")

    def __call__(self, terms: PolicyTerms) -> Tensor:
        ratio = terms.ratio.detach()
        inside = (ratio >= 1 / (1 + self.epsilon)) & (ratio <= 1 + self.epsilon)
        return torch.where(inside, -terms.advantages * (terms.logprobs - terms.old_logprobs), 0)

    def clipped(self, terms: PolicyTerms) -> Clipped:
        low, high = terms.ratio < 1 / (1 + self.epsilon), terms.ratio > 1 + self.epsilon
        return Clipped(low, high, low | high)


@dataclass(frozen=True)
class OPMD(Surrogate, name="opmd"):
    """Online policy mirror descent: x = −A·l / (1 + τ).

    tau: τ. Papers: arXiv 2505.17826 (appendix A), 2501.12599.
    """

    uses_ratio = False
    tau: float = 1.0

    def __post_init__(self) -> None:
        positive(self, "tau", zero=True)

    def __call__(self, terms: PolicyTerms) -> Tensor:
        return -terms.advantages * terms.logprobs / (1 + self.tau)


@dataclass(frozen=True)
class GMPO(Surrogate, name="gmpo"):
    """Geometric-mean policy optimization (arXiv 2507.20673), for aggregation "seq-mean-token-mean":
    x = −A·exp(mean_t y'), y' = s·min(s·y, s·clip(y, −ε_low, ε_high)), s = sign A, y = l − l_old, A constant over a sequence.

    clip_low: ε_low. clip_high: ε_high.
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

    def clipped(self, terms: PolicyTerms) -> Clipped:
        low, high = terms.token_log_ratio < -self.clip_low, terms.token_log_ratio > self.clip_high
        return Clipped(low, high, driven_out(low, high, terms.advantages))


@dataclass(frozen=True)
class CPGD(Surrogate, name="cpgd"):
    """Clipped policy gradient with drift (arXiv 2505.12504):
    x = −A·l', l' = min(l, l_old + log(1 + ε_high)) where A > 0, else max(l, l_old + log(1 − ε_low)).

    The paper's drift term is the KL to l_old: `kl: {against: prev}`.

    clip_low: ε_low. clip_high: ε_high.
    """

    token_level = True
    clip_low: float = 0.2
    clip_high: float = 0.2

    def __post_init__(self) -> None:
        positive(self, "clip_low", zero=True, below=1)
        positive(self, "clip_high", zero=True)

    def __call__(self, terms: PolicyTerms) -> Tensor:
        low, high = self._bounds()
        upper = torch.minimum(terms.logprobs, terms.old_logprobs + high)
        lower = torch.maximum(terms.logprobs, terms.old_logprobs + low)
        return -terms.advantages * torch.where(terms.advantages > 0, upper, lower)

    def clipped(self, terms: PolicyTerms) -> Clipped:
        bounds = self._bounds()
        low, high = terms.token_log_ratio < bounds[0], terms.token_log_ratio > bounds[1]
        return Clipped(low, high, driven_out(low, high, terms.advantages))

    def _bounds(self) -> list[float]:
        return torch.tensor([1 - self.clip_low, 1 + self.clip_high], dtype=torch.float64).log().tolist()


@dataclass(frozen=True)
class VESPO(Surrogate, name="vespo"):
    """Variational sequence-level soft policy optimization, as in TRL:
    x = −sg[φ]·A·l, φ = W^k·exp(λ·(1 − W)), W = Π_t π/π_old. log W is clamped to [log 1e-8, 20].

    k_pos: k where A ≥ 0. lambda_pos: λ where A ≥ 0. k_neg: k where A < 0. lambda_neg: λ where A < 0.
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
