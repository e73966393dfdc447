"""Options of the experience maker, in the order in which they take effect."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from parallel_rl.advantages import AdvantageEstimator
from parallel_rl.advantages.grouped import GRPO
from parallel_rl.experience.kl_control import kl_controller
from parallel_rl.experience.shaping import Overlong, RewardScale
from parallel_rl.functional.kl import KLType


@dataclass(frozen=True)
class DynamicSampling:
    """A prompt stays iff low < mean raw reward of its samples < high; others are drawn in its place (DAPO, arXiv 2503.14476).

    Attributes:
        low, high: in the unit of the rewards, both excluded.
        max_rounds: draws in all, the first one included.
        exhausted: what happens to the prompts that are then still missing: an "error", or "mask": the last ones drawn stand in
            their places with `sample_mask` 0.
    """

    low: float = 0.0
    high: float = 1.0
    max_rounds: int = 10
    exhausted: Literal["error", "mask"] = "error"

    def __post_init__(self) -> None:
        if not self.low < self.high:
            raise ValueError(f"low = {self.low} must be below high = {self.high}")
        if self.max_rounds < 2:
            raise ValueError(f"max_rounds = {self.max_rounds} must be at least 2: with one nothing is drawn again")


@dataclass(frozen=True)
class ExperienceConfig:
    """How experience is made. The options take effect from the top to the bottom.

    Attributes:
        samples_per_prompt: n.
        dynamic_sampling: which prompts stay, by their raw rewards.
        kl_estimator: of the KL to the reference, per token.
        reward_scale: cut and mapped raw rewards.
        overlong: what becomes of the rewards of long or truncated responses.
        running_norm: rewards are divided by the standard deviation of all rewards of the run so far, this step's included.
        running_minus_mean: their mean is taken off before.
        reward_clip: bounds of the rewards.
        advantages: the estimator; its `kl_coefficient` is where the KL controller starts.
        weight_clip: advantages are multiplied by min(P/P', weight_clip), P' of the step's P prompts having rewards that differ.
        mask_truncated: truncated responses are not trained on; their rewards stay in their groups' baselines.
        kl_target, kl_horizon: make the coefficient adaptive, see `AdaptiveKLController`; the controller moves last.
    """

    samples_per_prompt: int = 8
    dynamic_sampling: DynamicSampling | None = None
    kl_estimator: KLType = "k3"
    reward_scale: RewardScale | None = None
    overlong: Overlong | None = None
    running_norm: bool = False
    running_minus_mean: bool = False
    reward_clip: tuple[float, float] | None = None
    advantages: AdvantageEstimator = field(default_factory=GRPO)
    weight_clip: float | None = None
    mask_truncated: bool = False
    kl_target: float | None = None
    kl_horizon: float | None = None

    def __post_init__(self) -> None:
        if self.samples_per_prompt < 1:
            raise ValueError(f"samples_per_prompt = {self.samples_per_prompt} must be at least 1")
        if self.running_minus_mean and not self.running_norm:
            raise ValueError(
                "running_minus_mean = True has no effect with running_norm = False; set it, or leave this out"
            )
        if self.reward_clip is not None and not self.reward_clip[0] < self.reward_clip[1]:
            raise ValueError(f"reward_clip = {list(self.reward_clip)} must be two numbers, the smaller first")
        if self.weight_clip is not None and not self.weight_clip > 1:
            raise ValueError(f"weight_clip = {self.weight_clip} must be above 1")
        if self.weight_clip is not None and not self.advantages.grouped:
            raise ValueError(
                f"weight_clip = {self.weight_clip} goes with an estimator by group, not {self.advantages.name!r}"
            )
        if "rewards" not in self.advantages.needs:
            for name in ("reward_scale", "overlong", "running_norm", "reward_clip"):
                if getattr(self, name):
                    raise ValueError(
                        f"{name} has no effect with advantages {self.advantages.name!r}, which reads no rewards"
                    )
        if self.kl_target is not None and not self.advantages.kl_coefficient:
            raise ValueError(f"kl_target = {self.kl_target} needs advantages.kl_coefficient above 0 to start from")
        kl_controller(self.advantages.kl_coefficient, self.kl_target, self.kl_horizon)
