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
    """Importance weight ω = π_prev/π_generation, a constant factor that corrects the sampler's mismatch.

    level: one weight per token, turn or sequence; for a turn or sequence the geometric mean or the product.
    mode: "none": unchanged; "tis": clamp to [low, high]; "icepop": 0 outside; "seq-mask-tis": keep the token weights of
        sequences whose geometric mean lies within the bounds, 0 for the others. Denominators stay.
    low: lower bound of the weight. high: upper bound of the weight.
    normalize: divide by its mean over the step, after the truncation.
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
    """Drop tokens, turns or sequences whose trainer-sampler mismatch lies outside [low, high].

    statistic: "k1" bounds the ratio π_prev/π_generation. The others take `high` only, with a the ratio's logarithm. "k2" is
        a²/2, "k3" is e^a − 1 − a, "tv" is |π_prev − π_generation|. "binary_kl" is KL(π_generation ‖ π_prev) of "this token or
        another".
    low: smallest value that is kept. high: largest value that is kept.
    level: per token, or the sum, mean or maximum over its turn or sequence. "step" drops the tokens with the largest values
        until the mean over the rest of the step is at most `high`: M2PO (arXiv 2510.01161) is "k2" at this level with
        threshold 2·high; equal values are dropped together, and all tokens if all are too large.
    signed: drop only what A would drive further out: above the bounds with A > 0, below them with A < 0; the side is that of
        π_prev/π_generation at the same level.
    """

    statistic: MismatchStatistic
    high: float
    low: float = 0.0
    level: PoolLevel | Literal["step"] = "token"
    signed: bool = False

    @property
    def bounds(self) -> tuple[float, float]:
        """Return the bounds of the statistic; for k1 of its logarithm."""
        if self.statistic != "k1":
            return self.low, self.high
        return -math.inf if self.low == 0 else math.log(self.low), math.log(self.high)

    @property
    def words(self) -> str:
        """Return the rule in words, such as "k1 in [0.5, 2], turn-max"."""
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
                "level = 'step' needs a statistic that is never negative; statistic = 'k1' has either sign, take 'k2' or 'k3'"
            )
        if self.signed and self.statistic != "k1" and self.level.endswith("max"):
            raise ValueError(
                f"signed = True is incompatible with level = {self.level!r}: the largest {self.statistic} has no sign"
            )


@dataclass(frozen=True)
class RejectionConfig:
    """Rejection: rejected tokens, turns and sequences have no surrogate, KL or entropy bonus.

    rules: a token must pass all of them. denominator: counts of all valid tokens and sequences ("original"), or of those kept.
    """

    rules: tuple[RejectionRule, ...]
    denominator: Literal["original", "kept"] = "original"

    @property
    def of_step(self) -> dict[str, RejectionRule]:
        """Return the rules on the whole step, by the names of their samples."""
        return {f"rejection_{index}": rule for index, rule in enumerate(self.rules) if rule.level == "step"}

    @property
    def by_token(self) -> bool:
        """Return whether a token is rejected independently of the others in its turn and sequence."""
        return all(rule.level in ("token", "step") for rule in self.rules)

    def __post_init__(self) -> None:
        if not self.rules:
            raise ValueError("rules is empty; leave the rejection out for none")


@dataclass(frozen=True)
class OffPolicyMaskConfig:
    """Mask of drifted sequences: no surrogate if A < 0 and the sequence's mean of l_behaviour − l > delta.

    delta: largest mean of l_behaviour − l that is kept, in nats.
    behaviour: the log-probs compared with: of the step's start ("prev") or of the sampler ("generation").

    Paper: arXiv 2512.02556 (DeepSeek-V3.2).
    """

    delta: float
    behaviour: Literal["prev", "generation"] = "prev"

    def __post_init__(self) -> None:
        if not math.isfinite(self.delta):
            raise ValueError(f"delta = {self.delta} must be a finite number")
