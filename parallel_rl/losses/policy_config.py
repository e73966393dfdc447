"""Options of the policy loss, one key for each axis of the algebra."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass, field
from typing import Literal

from parallel_rl.counts import Aggregation, WeightedBy, check_aggregation
from parallel_rl.functional.dppo import DPPO, REC, ClipCov, KLCov
from parallel_rl.functional.kl import KLType
from parallel_rl.functional.surrogate import Surrogate
from parallel_rl.functional.surrogates import PPO
from parallel_rl.losses.entropy_bonus import EntropyBonus
from parallel_rl.losses.off_policy_config import ImportanceConfig, OffPolicyMaskConfig, RatioLevel, RejectionConfig

#: surrogates in other modules; a config names them like those of `functional.surrogates`
MORE_SURROGATES = (ClipCov, DPPO, KLCov, REC)


def check_clamps(config: object, *names: str) -> None:
    """Refuse the first of the named bounds that is neither positive nor None."""
    for name in names:
        if (bound := getattr(config, name)) is not None and not bound > 0:
            raise ValueError(f"{name} = {bound} must be positive, or None for no clamp")


@dataclass(frozen=True)
class KLConfig:
    """KL penalty in the loss, aggregated like the surrogate; gradients: see `parallel_rl.functional.kl`.

    coefficient: β. estimator: k1, k2, k3, abs, or low_var_kl (k3 with verl's clamps).
    gradient: "plain": autograd. Times a differentiable weight: "score-function" exp(l − sg l), "generation" π/π_generation,
        "old" π/π_prev, or "ratio", the surrogate's at its level (TRL). "straight-through": the estimator's value, k2's
        gradient.
    weight_clamp: upper bound on the weight of "old" (corrected k3 of DeepSeek-V3.2 in Trinity-RFT: 2).
    against: the reference policy, or the policy at the start of the step (`prev`).
    input_clamp: bound on |log-ratio|; None is off. output_clamp: bound on |estimate|; None is off.
    """

    coefficient: float
    estimator: KLType = "k3"
    gradient: Literal["plain", "score-function", "generation", "old", "ratio", "straight-through"] = "score-function"
    against: Literal["reference", "prev"] = "reference"
    weight_clamp: float | None = None
    input_clamp: float | None = None
    output_clamp: float | None = None

    def __post_init__(self) -> None:
        if not self.coefficient > 0:
            raise ValueError(f"coefficient = {self.coefficient} must be positive; leave the KL out for none")
        check_clamps(self, "weight_clamp", "input_clamp", "output_clamp")
        if self.estimator == "k1" and self.gradient == "plain":
            warnings.warn(
                "a k1 estimate with its plain gradient regularises nothing in expectation; see parallel_rl.functional.kl",
                stacklevel=2,
            )
        if self.estimator == "k2" and self.gradient == "straight-through":
            raise ValueError(
                "gradient = 'straight-through' is that of k2, so it has no effect with estimator = 'k2'; leave it out"
            )
        if self.weight_clamp is not None and self.gradient != "old":
            raise ValueError(f"weight_clamp = {self.weight_clamp} has no effect with gradient = {self.gradient!r}")
        if self.estimator == "low_var_kl" and (self.input_clamp is not None or self.output_clamp is not None):
            raise ValueError(
                "estimator = 'low_var_kl' has its own clamps; leave out input_clamp and output_clamp, or use 'k3'"
            )


@dataclass(frozen=True)
class PolicyLossConfig:
    """Options of `PolicyLossFn`.

    surrogate: name of a surrogate (`parallel_rl.functional.surrogates`), with its options.
    aggregation: how tokens are averaged, see `parallel_rl.counts.token_weights`. With turn-mean, prompt-mean and
        trajectory-mean each turn (segment_ids [B, S]), prompt (group_ids [B]) or trajectory (run_ids [B]) of the step weighs
        the same; they need `statistics=` of `count`, and ids ≥ 0. max_length: divisor of "constant-length".
    token_weights: factors data["token_weights"] [B, S] ≥ 0; divide by the "count" of positive ones or their "sum".
    ratio_level: ρ of a token, or its geometric mean (GSPO) or product over the turn or sequence. A turn is a run of one id
        among the valid tokens of a sequence, in the field segment_ids [B, S]: integers ≥ 0 that do not decrease.
    ratio_gradient: "full" through the sequence's mean; "token" (GSPO-token): the same value, but each token's own gradient.
    on_policy: ρ = exp(l − sg l); prev_logprobs is not read.
    log_ratio_clamp: bound on |l − l_prev| of each token, gradient 0 beyond; None is off.
    importance, rejection, off_policy_mask, kl: see its options below; None is off.
    entropy_filter: fraction of the step's tokens, those of highest entropy, that keep the surrogate; denominators stay (arXiv
        2506.01939).
    entropy_bonus: c in − c·AGG(entropy), with gradient: a number, or {name: schedule} or {name: adaptive}.
    positive_nll_weight: μ of VAPO's NLL on sequences with rewards > 0, a mean over their tokens (arXiv 2504.05118).
    """

    surrogate: Surrogate = field(default_factory=PPO)
    aggregation: Aggregation = "token-mean"
    max_length: int | None = None
    token_weights: WeightedBy | None = None
    ratio_level: RatioLevel = "token"
    ratio_gradient: Literal["full", "token"] = "full"
    on_policy: bool = False
    log_ratio_clamp: float | None = None
    importance: ImportanceConfig | None = None
    rejection: RejectionConfig | None = None
    off_policy_mask: OffPolicyMaskConfig | None = None
    entropy_filter: float | None = None
    entropy_bonus: float | EntropyBonus = 0.0
    kl: KLConfig | None = None
    positive_nll_weight: float = 0.0

    @property
    def reads_prev(self) -> bool:
        if self.on_policy:
            return False
        mask, kl = self.off_policy_mask, self.kl
        return (
            self.surrogate.uses_ratio
            or self.importance is not None
            or self.rejection is not None
            or (mask is not None and mask.behaviour == "prev")
            or (kl is not None and (kl.against == "prev" or kl.gradient in ("old", "ratio")))
        )

    @property
    def reads_generation(self) -> bool:
        mask, kl = self.off_policy_mask, self.kl
        return (
            self.importance is not None
            or self.rejection is not None
            or (mask is not None and mask.behaviour == "generation")
            or (kl is not None and kl.gradient == "generation")
        )

    @property
    def reads_reference(self) -> bool:
        return self.kl is not None and self.kl.against == "reference"

    @property
    def reads_turns(self) -> bool:
        rules = () if self.rejection is None else self.rejection.rules
        levels = [self.ratio_level, *(part.level for part in (self.importance, *rules) if part is not None)]
        return any(level.startswith("turn") for level in levels)

    @property
    def collects(self) -> bool:
        """Return whether the loss needs the current policy on the whole step."""
        return self.surrogate.needs_statistics or self.entropy_filter is not None

    @property
    def counts_kept(self) -> bool:
        """Return whether the denominators count only the tokens that the rejection keeps."""
        return self.rejection is not None and self.rejection.denominator == "kept"

    @property
    def counts_survivors(self) -> bool:
        """Return whether a correction needs the whole step, or a denominator counts the kept tokens."""
        return (self.importance is not None and self.importance.normalize) or (
            self.rejection is not None and (self.counts_kept or bool(self.rejection.of_step))
        )

    @property
    def token_separable(self) -> bool:
        """Return whether a token's term depends on the current log-probs of no other token."""
        if self.ratio_level != "token" or self.off_policy_mask is not None or not self.surrogate.token_separable:
            return False
        if not self.on_policy:
            return True
        # prev is the current policy, so rules on its whole sequences do not separate
        weight, rejection = self.importance, self.rejection
        by_token = weight is None or (weight.level == "token" and weight.mode != "seq-mask-tis")
        return by_token and (rejection is None or (rejection.denominator == "original" and rejection.by_token))

    @property
    def weighs_sequences(self) -> bool:
        """Return whether a token's term depends on which other tokens of its sequence are valid."""
        weight, rejection = self.importance, self.rejection
        by_token = weight is None or (weight.level == "token" and weight.mode != "seq-mask-tis")
        kept_by_token = rejection is None or rejection.by_token
        counts = self.aggregation == "seq-mean-token-mean" or (self.aggregation == "turn-mean" and self.counts_kept)
        return counts or not (by_token and kept_by_token)

    def __post_init__(self) -> None:
        check_aggregation(self.aggregation, self.max_length, self.token_weights)
        if self.token_weights == "sum" and (self.positive_nll_weight or self.counts_kept):
            raise ValueError(
                "token_weights = 'sum' is incompatible with positive_nll_weight and with a rejection's denominator = 'kept', "
                "which count tokens; take 'count'"
            )
        bonus = 0.0 if isinstance(self.entropy_bonus, EntropyBonus) else self.entropy_bonus
        for name, value in (("entropy_bonus", bonus), ("positive_nll_weight", self.positive_nll_weight)):
            if not 0 <= value < math.inf:
                raise ValueError(f"{name} = {value} must be at least 0 and finite")
        if self.entropy_filter is not None and not 0 < self.entropy_filter < 1:
            raise ValueError(
                f"entropy_filter = {self.entropy_filter} must lie in (0, 1), or be None to keep all tokens"
            )
        check_clamps(self, "log_ratio_clamp")
        rejection = self.rejection
        if (
            rejection is not None
            and rejection.of_step
            and rejection.denominator == "kept"
            and self.aggregation != "token-mean"
        ):
            raise ValueError(
                f"aggregation = {self.aggregation!r} is incompatible with denominator = 'kept' and a rule of level 'step', "
                "which counts tokens alone; take 'token-mean', or denominator 'original'"
            )
        self._check_ratio()

    def _check_ratio(self) -> None:
        name, level = self.surrogate.name, self.ratio_level
        if level != "token" and (not self.surrogate.uses_ratio or self.surrogate.token_level):
            raise ValueError(f"ratio_level = {level!r} has no effect with the surrogate {name!r}")
        if self.ratio_gradient != "full" and level == "token":
            raise ValueError(f"ratio_gradient = {self.ratio_gradient!r} has no effect with ratio_level = 'token'")
        if not (self.surrogate.uses_ratio or self.reads_prev) and self.log_ratio_clamp is not None:
            raise ValueError(f"log_ratio_clamp = {self.log_ratio_clamp} has no effect with the surrogate {name!r}")
        if self.on_policy:
            reads = self.surrogate.uses_ratio or self.importance is not None or self.rejection is not None
            if not reads:
                raise ValueError(f"on_policy = True has no effect with the surrogate {name!r}, which has no ratio")
            wrong = {
                "log_ratio_clamp": self.log_ratio_clamp is not None,
                "ratio_level": level != "token",
                "off_policy_mask": self.off_policy_mask is not None and self.off_policy_mask.behaviour == "prev",
                "kl": self.kl is not None and (self.kl.against == "prev" or self.kl.gradient in ("old", "ratio")),
            }
            for key, is_wrong in wrong.items():
                if is_wrong:
                    raise ValueError(
                        f"{key} = {getattr(self, key)!r} has no effect with on_policy = True; leave out one of them"
                    )
