"""Base of the estimators: registration by name, inputs, and moments over groups and over all ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal, NamedTuple

import torch

from parallel_rl.advantages.returns import discounted_returns, terminal_rewards
from parallel_rl.agreement import communication_device
from parallel_rl.config.strict import Variants, at_least
from parallel_rl.functional.kl import KLType, kl_estimate
from parallel_rl.groups import all_gather, group_size

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup

    from parallel_rl.advantages.table import SampleTable

Whitening = Literal["none", "center", "population", "unbiased"]
_EPS = 1e-8


class Moments(NamedTuple):
    """Count, mean, Σ(x − mean)², minimum and maximum of n numbers; 0-dim float64."""

    number: Tensor
    mean: Tensor
    square: Tensor
    low: Tensor
    high: Tensor

    def variance(self, correction: int = 0) -> Tensor:
        """Return Σ(x − mean)²/(n − correction); 0 where that is undefined."""
        return self.square / (self.number - correction).clamp(min=1)


def moments(x: Tensor, mask: Tensor, group: ProcessGroup | None = None) -> Moments:
    """Compute the moments of the valid x of all ranks of `group`, which all call this, in one all-gather.

    >>> step = moments(torch.tensor([1.0, 3.0, 9.0]), torch.tensor([1, 1, 0]))
    >>> float(step.mean), float(step.variance())
    (2.0, 1.0)
    """
    value, keep = x.detach().double(), mask.bool()
    count = keep.sum().double()
    mean = torch.where(keep, value, 0.0).sum() / count.clamp(min=1)
    square = torch.where(keep, value - mean, 0.0).square().sum()
    infinity = value.new_full((1,), torch.inf)
    low = torch.cat([torch.where(keep, value, torch.inf).flatten(), infinity]).amin()
    high = torch.cat([torch.where(keep, value, -torch.inf).flatten(), -infinity]).amax()
    local = torch.stack([count, mean, square, low, high])
    parts = all_gather(local.to(communication_device(group, local.device)), group).to(local.device)
    return _merge(*parts.unbind(1)) if group_size(group) > 1 else Moments(*local.unbind())


def _merge(count: Tensor, mean: Tensor, square: Tensor, low: Tensor, high: Tensor) -> Moments:
    """Pool the moments [ranks] without a difference of large squares (Chan, Golub and LeVeque)."""
    total = count.sum()
    pooled = (count * mean).sum() / total.clamp(min=1)
    return Moments(total, pooled, (square + count * (mean - pooled).square()).sum(), low.amin(), high.amax())


def whiten(
    x: Tensor,
    mask: Tensor,
    mode: Whitening = "population",
    group: ProcessGroup | None = None,
    *,
    keep_mean: bool = False,
) -> Tensor:
    """Whiten x over the valid entries of all ranks (mean 0, deviation 1); 0 outside `mask`.

    >>> whiten(torch.tensor([1.0, 3.0, 9.0]), torch.tensor([1, 1, 0]))
    tensor([-1.,  1.,  0.])

        center:     x − mean
        population: (x − mean) / √max(Σ(x − mean)²/n, ε)            as OpenRLHF, LightRFT, NeMo-RL
        unbiased:   (x − mean) / √(Σ(x − mean)²/(n − 1) + ε)        as verl, Trinity-RFT

    ε is 1e-8. Entries that are all equal become exactly 0.

    Args:
        x, mask: one shape, any; masked entries may be NaN.
        mode: see above; "none" leaves valid entries as they are.
        group: data ranks, which all call this; None is one process.
        keep_mean: add the mean again.
    """
    if mode not in ("none", "center", "population", "unbiased"):
        raise ValueError(f"whitening = {mode!r} is not valid; choose none, center, population or unbiased")
    if x.shape != mask.shape:
        raise ValueError(f"the mask of a whitening must be {list(x.shape)} like its numbers, got {list(mask.shape)}")
    keep = mask.bool()
    if mode == "none":
        return torch.where(keep, x, 0.0)
    step = moments(x, keep, group)
    value = torch.where(step.low == step.high, 0.0, x.double() - step.mean)
    if mode == "population":
        value = value * step.variance().clamp(min=_EPS).rsqrt()
    elif mode == "unbiased":
        value = value * (step.variance(1) + _EPS).rsqrt()
    value = value + step.mean if keep_mean else value
    return torch.where(keep, value, 0.0).to(x.dtype)


@dataclass(frozen=True)
class TeacherKL:
    """−c·k per sampled token, k an estimate of KL(policy ‖ teacher); k1 gives the reverse KL's gradient.

        A_t += −c·clamp(k(log π_old, log p_teacher), ±loss_max_clamp)

    A token receives its own term alone, before whitening and clipping. Papers: arXiv 2306.13649, 2601.02780; the clamps are
    verl's, the sum is slime's `opd_kl_coef`.

    >>> import torch
    >>> TeacherKL(0.5)(torch.tensor([-1.0, -2.0]), torch.tensor([-1.5, -0.5]))
    tensor([-0.2500,  0.7500])

    Attributes:
        coefficient: c, above 0.
        estimator: k1, k2, k3, abs or low_var_kl, see `functional.kl`. As an advantage only k1 has the gradient of the KL.
        log_prob_min_clamp: lower bound < 0 of both log-probs; None: none. loss_max_clamp: bound of |k|; None: none.
    """

    coefficient: float = 1.0
    estimator: KLType = "k1"
    log_prob_min_clamp: float | None = None
    loss_max_clamp: float | None = None

    def __post_init__(self) -> None:
        if not self.coefficient > 0:
            raise ValueError(f"coefficient = {self.coefficient} must be above 0")
        if self.log_prob_min_clamp is not None and not self.log_prob_min_clamp < 0:
            raise ValueError(
                f"log_prob_min_clamp = {self.log_prob_min_clamp} must be below 0, as log-probs are; None: none"
            )
        if self.loss_max_clamp is not None and not self.loss_max_clamp > 0:
            raise ValueError(f"loss_max_clamp = {self.loss_max_clamp} must be above 0; None: none")

    def __call__(self, policy: Tensor, teacher: Tensor) -> Tensor:
        """Compute the term from the sampled tokens' log-probs, both of one shape."""
        if self.log_prob_min_clamp is not None:
            policy, teacher = (x.clamp(min=self.log_prob_min_clamp) for x in (policy, teacher))
        return -self.coefficient * kl_estimate(policy, teacher, self.estimator, output_clamp=self.loss_max_clamp)


class Advantages(NamedTuple):
    """Advantages and returns, [N, S] each, 0 at masked tokens.

    `returns` are the value function's targets (gae), or the advantages before teacher, whitening and clipping (all others).
    """

    advantages: Tensor
    returns: Tensor


@dataclass(frozen=True, kw_only=True)
class AdvantageEstimator(Variants):
    """Base of the estimators: a score for each sample or token, less KLs, then whitened, then clipped.

    Attributes:
        kl_coefficient: c of the KL subtracted from the reward; needs the field `kl`. 0: none.
        kl_form: "return": −c Σ_{s≥t} kl_s, the KL from the token on (PPO, REINFORCE++); "token": −c kl_t (NeMo-RL).
        teacher_kl: a teacher's term per token, added to the advantages (on-policy distillation with the task); needs the
            fields `teacher_token_logprobs` and `prev_logprobs`. None: none.
        whiten: whitening over the valid tokens of all data ranks, see `moments.whiten`; "none": no whitening.
        clip_low: lower bound of the final advantages; None: none. clip_high: upper bound; None: none.
    """

    kl_coefficient: float = 0.0
    kl_form: Literal["return", "token"] = "return"
    teacher_kl: TeacherKL | None = None
    whiten: Whitening = "none"
    clip_low: float | None = None
    clip_high: float | None = None

    fields: ClassVar[tuple[str, ...]] = ("rewards", "token_mask")
    grouped: ClassVar[bool] = False

    def __post_init__(self) -> None:
        at_least(self, kl_coefficient=0)
        if self.kl_form == "token" and self.kl_coefficient == 0:
            raise ValueError("kl_form = 'token' has no effect with kl_coefficient = 0; set kl_coefficient")
        if self.clip_low is not None and self.clip_high is not None and self.clip_low > self.clip_high:
            raise ValueError(f"clip_low = {self.clip_low} must not be above clip_high = {self.clip_high}")

    @property
    def needs(self) -> tuple[str, ...]:
        """Return the fields of a batch that this estimator reads."""
        teacher_fields = () if self.teacher_kl is None else ("teacher_token_logprobs", "prev_logprobs")
        return (*self.fields, *(("kl",) if self.kl_coefficient else ()), *teacher_fields)

    @property
    def discount(self) -> float:
        """Return γ of the returns."""
        return 1.0

    def check_batch(self, batch: Mapping[str, Tensor]) -> None:
        """Refuse invalid fields, after the checks of their shapes."""

    def scores(self, table: SampleTable) -> Tensor:
        """Return [M] the score of each sample of the step."""
        return table.rewards

    def tokens(
        self, batch: Mapping[str, Tensor], scores: Tensor, mask: Tensor, group: ProcessGroup | None
    ) -> Advantages:
        """Compute [N, S] advantages before whitening, and returns, from this rank's scores [N].

        Args:
            batch: the fields of `needs`, 0 at masked places, and sample_mask [N] bool.
            group: the data ranks, which all call this.
        """
        if self.kl_form == "token":
            values = torch.where(mask, scores[:, None] - self.kl_coefficient * batch["kl"], 0.0)
        elif self.kl_coefficient == 0 and self.discount == 1:
            values = torch.where(mask, scores[:, None], 0.0)
        else:
            rewards = terminal_rewards(scores, mask, batch.get("kl"), self.kl_coefficient)
            values = discounted_returns(rewards, mask, self.discount)
        return Advantages(values, values)

    def finish(
        self, estimate: Advantages, batch: Mapping[str, Tensor], mask: Tensor, group: ProcessGroup | None
    ) -> Advantages:
        """Add the teacher's term, whiten over the ranks of `group`, then clip."""
        advantages = estimate.advantages
        if self.teacher_kl is not None:
            teacher_term = self.teacher_kl(batch["prev_logprobs"], batch["teacher_token_logprobs"])
            advantages = torch.where(mask, advantages + teacher_term, 0.0)
        advantages = whiten(advantages, mask, self.whiten, group)
        if self.clip_low is not None or self.clip_high is not None:
            advantages = torch.where(mask, advantages.clamp(self.clip_low, self.clip_high), 0.0)
        return Advantages(advantages, estimate.returns)


def in_unit(config: object, *names: str) -> None:
    """Refuse attributes outside [0, 1]."""
    for name in names:
        if not 0 <= getattr(config, name) <= 1:
            raise ValueError(f"{name} = {getattr(config, name)} must lie in [0, 1]")
