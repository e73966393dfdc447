"""Estimators of a single sample, by reward, tokens, values, greedy answer or teacher; masks of tokens by entropy (CLIP-B)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch

from parallel_rl.advantages.base import AdvantageEstimator, Advantages, TeacherKL, Whitening, in_unit, moments
from parallel_rl.advantages.returns import gae, length_adaptive_lambda, terminal_rewards
from parallel_rl.config.strict import at_least
from parallel_rl.functional.kl import KLType

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup


@dataclass(frozen=True, kw_only=True)
class Reinforce(AdvantageEstimator, name="reinforce"):
    """A_t = G_t, the token's discounted return: the reward itself if γ = 1 without KL (Williams 1992).

    gamma: γ in [0, 1].
    """

    gamma: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        in_unit(self, "gamma")
        if self.kl_form == "token" and self.gamma != 1:
            raise ValueError(f"gamma = {self.gamma} has no effect with kl_form = 'token'; leave one of them out")

    @property
    def discount(self) -> float:
        return self.gamma


@dataclass(frozen=True, kw_only=True)
class ReinforcePlusPlus(Reinforce, name="reinforce_plus_plus"):
    """A_t = G_t with the KL in the reward, whitened over the step (REINFORCE++, arXiv 2501.03262).

    Returns pass over masked holes (tool results).
    """

    whiten: Whitening = "population"


@dataclass(frozen=True, kw_only=True)
class ReMax(Reinforce, name="remax"):
    """A_t = G_t − r_greedy, the reward of the greedy answer to the same prompt (ReMax, arXiv 2310.10505)."""

    fields: ClassVar[tuple[str, ...]] = ("rewards", "greedy_rewards", "token_mask")

    def tokens(
        self, batch: Mapping[str, Tensor], scores: Tensor, mask: Tensor, group: ProcessGroup | None
    ) -> Advantages:
        returns = super().tokens(batch, scores, mask, group).returns
        return Advantages(torch.where(mask, returns - batch["greedy_rewards"][:, None], 0.0), returns)


@dataclass(frozen=True, kw_only=True)
class GAEEstimator(AdvantageEstimator, name="gae"):
    """A_t = Σ_k (γλ)^k δ_{t+k} over valid tokens, R_t = A_t + V_t (arXiv 1506.02438); see `returns.gae`.

    Attributes:
        gamma: γ in [0, 1]. lam: λ in [0, 1].
        value_lam: λ of the returns that the value function learns; None: the same (VAPO, arXiv 2504.05118: 1).
        length_adaptive: α of λ_i = 1 − 1/(α·n_i), which replaces `lam` for the advantages (VAPO: 0.05); 0: off.
        bootstrap: use the field `bootstrap_values` [N] as V after the last token (0 where a response ended).
    """

    gamma: float = 1.0
    lam: float = 1.0
    value_lam: float | None = None
    length_adaptive: float = 0.0
    bootstrap: bool = False

    fields: ClassVar[tuple[str, ...]] = ("rewards", "values", "token_mask")

    def __post_init__(self) -> None:
        super().__post_init__()
        in_unit(self, "gamma", "lam", *(("value_lam",) if self.value_lam is not None else ()))
        at_least(self, length_adaptive=0)
        if self.length_adaptive and self.lam != 1:
            raise ValueError(
                f"lam = {self.lam} has no effect with length_adaptive = {self.length_adaptive}; leave it out"
            )
        if self.kl_form == "token":
            raise ValueError("kl_form = 'token' has no effect on gae, whose token rewards are discounted; leave it out")

    @property
    def needs(self) -> tuple[str, ...]:
        return (*super().needs, *(("bootstrap_values",) if self.bootstrap else ()))

    def tokens(
        self, batch: Mapping[str, Tensor], scores: Tensor, mask: Tensor, group: ProcessGroup | None
    ) -> Advantages:
        rewards = terminal_rewards(scores, mask, batch.get("kl"), self.kl_coefficient)
        lam = length_adaptive_lambda(mask, self.length_adaptive) if self.length_adaptive else self.lam
        last = batch["bootstrap_values"] if self.bootstrap else None
        return Advantages(*gae(rewards, batch["values"].to(rewards.dtype), mask, self.gamma, lam, self.value_lam, last))


@dataclass(frozen=True, kw_only=True)
class OnPolicyDistillation(AdvantageEstimator, name="on_policy_distillation"):
    """A_t = c·(log p_teacher − log p_old) of the sampled token: the reverse KL's policy gradient alone.

    It reads no reward; with a reward use the option `teacher_kl` of another estimator. Papers: arXiv 2306.13649, 2601.02780.

    coefficient: c, above 0. estimator: k in −c·k, an estimate of the KL; only k1 has the gradient of the KL.
    log_prob_min_clamp: lower bound < 0 of both log-probs; None: none. loss_max_clamp: bound of |k|; None: none.
    """

    coefficient: float = 1.0
    estimator: KLType = "k1"
    log_prob_min_clamp: float | None = None
    loss_max_clamp: float | None = None

    fields: ClassVar[tuple[str, ...]] = ("teacher_token_logprobs", "prev_logprobs", "token_mask")

    def __post_init__(self) -> None:
        super().__post_init__()
        self._teacher_term()  # validates the options
        for name in ("kl_coefficient", "teacher_kl"):
            if getattr(self, name):
                raise ValueError(
                    f"{name} = {getattr(self, name)} has no effect on on_policy_distillation, whose advantage is a KL itself; "
                    "leave it out"
                )

    def tokens(
        self, batch: Mapping[str, Tensor], scores: Tensor, mask: Tensor, group: ProcessGroup | None
    ) -> Advantages:
        term = self._teacher_term()(batch["prev_logprobs"], batch["teacher_token_logprobs"])
        values = torch.where(mask, term, 0.0)
        return Advantages(values, values)

    def _teacher_term(self) -> TeacherKL:
        return TeacherKL(self.coefficient, self.estimator, self.log_prob_min_clamp, self.loss_max_clamp)


def entropy_signal(logprobs: Tensor, entropy: Tensor, mask: Tensor) -> Tensor:
    """Compute S = p·(H + log p) of the sampled token, its effect on the entropy; 0 if masked."""
    keep = mask.bool()
    safe, h = torch.where(keep, logprobs, 0.0), torch.where(keep, entropy, 0.0)
    return torch.where(keep, safe.exp() * (h + safe), 0.0)


def clip_by_batch(
    advantages: Tensor, signal: Tensor, mask: Tensor, mu: float = 2.5, group: ProcessGroup | None = None
) -> Tensor:
    """Keep tokens by CLIP-B: all with A ≥ 0, and those with S − mean ≥ −μ·std over the step's tokens.

    Args:
        advantages, signal, mask: one shape; `signal` from `entropy_signal`, its std is the population's.
        mu: μ ≥ 0.
        group: the data ranks, which all call this; None is one process.

    Raises:
        ValueError: shapes that differ, or μ below 0.
    """
    if not advantages.shape == signal.shape == mask.shape:
        shapes = [list(x.shape) for x in (advantages, signal, mask)]
        raise ValueError(f"advantages, signal and mask must be of one shape, got {shapes}")
    if not mu >= 0:
        raise ValueError(f"mu = {mu} must be at least 0")
    keep = mask.bool()
    step = moments(signal, keep, group)
    below = signal.double() - step.mean < -mu * step.variance().sqrt()
    return keep & ~(below & (torch.where(keep, advantages, 0.0) < 0))
