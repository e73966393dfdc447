"""OpenRLHF's correction of the mismatch between trainer and sampler: a gate on tokens or rows, and importance weights."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from parallel_rl.config.strict import nearest
from parallel_rl.losses.core.batch import TokenBatch
from parallel_rl.losses.core.measures import sequence_mean
from parallel_rl.losses.off_policy_config import ImportanceConfig

Level = Literal["off", "token", "seq"]
Mode = Literal["mask", "clip"]
Gating = Literal["ratio", "binary_kl", "tv"]

_CHOICES = {"level": ("off", "token", "seq"), "mode": ("mask", "clip"), "gating": ("ratio", "binary_kl", "tv")}


@dataclass(frozen=True)
class Correction:
    """Treatment of units (tokens or rows) whose statistic of ω = π_old/π_rollout is outside [low, high].

    level: the unit; "off" corrects nothing. gating: "ratio" is ω, of a row its geometric mean; "binary_kl" and "tv" are
    divergences of the two Bernoulli distributions of the sampled token, of a row their mean. mode: "mask" drops units
    outside, and the others keep their tokens' ω unclamped; "clip" clamps each token's ω, and also raises small ones to `low`
    (Q30).
    """

    level: Level = "off"
    mode: Mode = "mask"
    gating: Gating = "ratio"
    threshold: Sequence[float] = (0.5, 5.0)

    def __post_init__(self) -> None:
        for name, valid in _CHOICES.items():
            if getattr(self, name) not in valid:
                value = getattr(self, name)
                raise ValueError(f"is_correction_{name} = {value!r} is not valid; {nearest(str(value), valid)}")
        if len(self.threshold) != 2 or not self.low <= self.high:
            raise ValueError(f"is_correction_threshold = {list(self.threshold)} must be [low, high] with low ≤ high")
        if self.mode == "clip" and (self.level == "seq" or self.gating != "ratio"):
            raise ValueError(
                "is_correction_mode = 'clip' clamps the ratio of each token: it needs is_correction_level = 'token' and "
                f"is_correction_gating = 'ratio', got {self.level!r} and {self.gating!r}"
            )
        if self.gating != "ratio" and self.level != "off" and self.low > 0:
            raise ValueError(
                f"is_correction_gating = {self.gating!r} has an upper bound only: is_correction_threshold = "
                f"{list(self.threshold)} must begin with 0"
            )

    @property
    def low(self) -> float:
        return self.threshold[0]

    @property
    def high(self) -> float:
        return self.threshold[1]

    @property
    def importance(self) -> ImportanceConfig:
        """Return ω as the library's importance weight; "mask" is applied apart from it, by `filtered`."""
        if self.mode == "mask" or (self.low <= 0 and self.high == math.inf):
            return ImportanceConfig()
        return ImportanceConfig(mode="tis", low=max(self.low, 0.0), high=self.high)

    @torch.no_grad()
    def filtered(self, batch: TokenBatch) -> tuple[Tensor, Tensor]:
        """Mark [T_local] tokens outside the band, alone or by row; return their fraction's share too.

        A row without a token is no unit (the origin: outside, as its statistic is NaN).
        """
        old, rollout = batch["old_logprobs"], batch["rollout_logprobs"]
        statistic = old - rollout if self.gating == "ratio" else _divergence(old, rollout, self.gating)
        by_row = self.level == "seq"
        statistic = batch.segment_mean(statistic) if by_row else statistic
        statistic = statistic.exp() if self.gating == "ratio" else statistic
        outside = (statistic < self.low) | (statistic > self.high)
        if not by_row:
            return outside, batch.token_mean(outside).value
        fraction = sequence_mean(batch, outside, batch.tokens_per_sequence > 0)
        return batch.expand(outside), fraction.value


def _divergence(old: Tensor, rollout: Tensor, gating: Gating) -> Tensor:
    """Compute a divergence of the sampled token's Bernoullis, probabilities within [1e-6, 1 − 1e-6]."""
    p, q = (x.exp().clamp(1e-6, 1 - 1e-6) for x in (rollout, old))
    if gating == "tv":
        return (p - q).abs()
    return p * (p / q).log() + (1 - p) * ((1 - p) / (1 - q)).log()
