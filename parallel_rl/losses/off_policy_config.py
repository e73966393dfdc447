"""Options of the off-policy corrections: importance weights, rejection, masks."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from parallel_rl.functional.importance import MismatchStatistic, Truncation
from parallel_rl.losses.core.batch import PoolLevel

RatioLevel = Literal["token", "turn-mean", "turn-sum", "sequence-mean", "sequence-sum"]


@dataclass(frozen=True)
class ImportanceConfig:
    """ω, constant, multiplies the surrogate: π_prev/π_generation, against the mismatch of trainer and sampler.

    level: the weight of a token, or one a turn or a sequence: geometric mean or product.
    mode: "none" leaves it; "tis" clamps it into [low, high]; "icepop" takes 0 outside; "seq-mask-tis" keeps the token weights
        of sequences whose geometric mean lies within, and takes 0 in the others. Denominators stay.
    normalize: divide by its mean over the step (after the truncation).
    """

    level: RatioLevel = "token"
    mode: Literal["none"] | Truncation = "none"
    low: float = 0.0
    high: float = math.inf
    normalize: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.low <= self.high:
            raise ValueError(f"low = {self.low} and high = {self.high} must be 0 ≤ low ≤ high")
        bounded = self.low > 0 or self.high < math.inf
        if bounded != (self.mode != "none"):
            raise ValueError(f"mode = {self.mode!r} with bounds [{self.low}, {self.high}]: give both or none")
        if self.mode == "seq-mask-tis" and self.level != "token":
            raise ValueError(f"mode = 'seq-mask-tis' keeps token weights, so level = {self.level!r} is incompatible")


@dataclass(frozen=True)
class RejectionRule:
    """Tokens, turns or sequences whose mismatch of trainer and sampler lies outside [low, high] leave the mask.

    statistic: "k1" with bounds on the ratio π_prev/π_generation; with `high` alone "k2" = a²/2 and "k3" = e^a − 1 − a of its
        logarithm a, "tv" = |π_prev − π_generation|, and "binary_kl" = KL(π_generation ‖ π_prev) of "this token or another".
    level: of each token, or the sum, mean or largest over its turn or whole sequence; "step": tokens with the largest values
        leave until the mean over what is left of the step is at most `high`. M2PO (arXiv 2510.01161) is "k2" at this level, its
        threshold is 2·high; equal values leave together, and where all are too large all leave.
    signed: only what A would drive further out leaves: above the bounds with A > 0, below them with A < 0, the side being that
        of π_prev/π_generation at the same level.
    """

    statistic: MismatchStatistic
    high: float
    low: float = 0.0
    level: PoolLevel | Literal["step"] = "token"
    signed: bool = False

    @property
    def bounds(self) -> tuple[float, float]:
        """Of the statistic; of its logarithm for k1."""
        if self.statistic != "k1":
            return self.low, self.high
        return -math.inf if self.low == 0 else math.log(self.low), math.log(self.high)

    @property
    def words(self) -> str:
        """What the rule asks for, such as "k1 in [0.5, 2], turn-max"."""
        bounds = f"in [{self.low:g}, {self.high:g}]" if self.statistic == "k1" else f"at most {self.high:g}"
        return f"{self.statistic} {bounds}, {self.level}{', signed' if self.signed else ''}"

    def __post_init__(self) -> None:
        if not 0 <= self.low < self.high:
            raise ValueError(f"low = {self.low} and high = {self.high} must be 0 ≤ low < high")
        if self.statistic != "k1" and self.low > 0:
            raise ValueError(
                f"low = {self.low} has no effect with statistic = {self.statistic!r}, which is never negative"
            )
        if self.statistic == "tv" and not self.level.endswith("sum") and self.high >= 1:
            raise ValueError(f"high = {self.high} has no effect with statistic = 'tv', which is never above 1")
        if self.statistic == "k1" and self.level == "step":
            raise ValueError(
                "level = 'step' is the mean of a statistic that is never negative; statistic = 'k1' is one that is"
            )
        if self.signed and self.statistic != "k1" and self.level.endswith("max"):
            raise ValueError(
                f"signed = True is incompatible with level = {self.level!r}: the largest {self.statistic} has no side"
            )


@dataclass(frozen=True)
class RejectionConfig:
    """Rejection of tokens, turns and sequences: a rejected one carries no surrogate, no KL and no entropy bonus.

    rules: every one must pass. denominator: counts of all valid tokens and sequences ("original"), or of the step's kept ones.
    """

    rules: tuple[RejectionRule, ...]
    denominator: Literal["original", "kept"] = "original"

    @property
    def of_step(self) -> dict[str, RejectionRule]:
        """The rules that look at the whole step, by the names of their samples."""
        return {f"rejection_{index}": rule for index, rule in enumerate(self.rules) if rule.level == "step"}

    @property
    def by_token(self) -> bool:
        """Whether a token's fate depends on no other token of its turn or sequence."""
        return all(rule.level in ("token", "step") for rule in self.rules)

    def __post_init__(self) -> None:
        if not self.rules:
            raise ValueError("rules is empty; leave the rejection out for none")


@dataclass(frozen=True)
class OffPolicyMaskConfig:
    """Sequences that drifted: tokens with A < 0 carry no surrogate where the sequence's mean of l_behaviour − l exceeds delta.

    Paper: arXiv 2512.02556 (DeepSeek-V3.2).
    """

    delta: float
    behaviour: Literal["prev", "generation"] = "prev"

    def __post_init__(self) -> None:
        if not math.isfinite(self.delta):
            raise ValueError(f"delta = {self.delta} must be a finite number")
