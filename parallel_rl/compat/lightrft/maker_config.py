"""Options of the experience maker."""

from __future__ import annotations

from dataclasses import dataclass, field

from parallel_rl.advantages import AdvantageEstimator
from parallel_rl.advantages.grouped import GRPO
from parallel_rl.experience.dynamic_sampling import DynamicSampling
from parallel_rl.experience.failures import FailedSamplesConfig
from parallel_rl.experience.kl_control import kl_controller
from parallel_rl.experience.shaping import RewardShaping
from parallel_rl.functional.kl import KLType


@dataclass(frozen=True, kw_only=True)
class ExperienceConfig(RewardShaping):
    """Options of `ExperienceMaker`; rewards are shaped after the KL and before the advantages.

    Attributes:
        samples_per_prompt: n. dynamic_sampling: which prompts stay, by their raw rewards. kl_estimator: of each token's KL.
        advantages: the estimator; its `kl_coefficient` is the KL controller's initial value.
        weight_clip: multiply advantages by min(P/P', weight_clip), for P' of the step's P prompts with unequal rewards.
        mask_truncated: do not train on truncated responses; their rewards stay in the baselines.
        failed_samples: treatment of samples without a finite reward or finite log-probs.
        kl_target, kl_horizon: make the coefficient adaptive, see `AdaptiveKLController`; the controller is updated last.
    """

    samples_per_prompt: int = 8
    dynamic_sampling: DynamicSampling | None = None
    kl_estimator: KLType = "k3"
    advantages: AdvantageEstimator = field(default_factory=GRPO)
    weight_clip: float | None = None
    mask_truncated: bool = False
    failed_samples: FailedSamplesConfig = field(default_factory=FailedSamplesConfig)
    kl_target: float | None = None
    kl_horizon: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.samples_per_prompt < 1:
            raise ValueError(f"samples_per_prompt = {self.samples_per_prompt} must be at least 1")
        if self.weight_clip is not None and not self.weight_clip > 1:
            raise ValueError(f"weight_clip = {self.weight_clip} must be above 1")
        if self.weight_clip is not None and not self.advantages.grouped:
            raise ValueError(
                f"weight_clip = {self.weight_clip} needs a grouped estimator, not {self.advantages.name!r}"
            )
        if "rewards" not in self.advantages.needs:
            for name in ("reward_scale", "overlong", "running_norm", "reward_clip"):
                if getattr(self, name):
                    raise ValueError(f"{name} has no effect: advantages {self.advantages.name!r} read no rewards")
        if self.kl_target is not None and not self.advantages.kl_coefficient:
            raise ValueError(f"kl_target = {self.kl_target} needs advantages.kl_coefficient above 0 to start from")
        if self.failed_samples.timeout is not None:
            raise ValueError(
                f"failed_samples.timeout = {self.failed_samples.timeout:g} has no effect on sources.score; give it to "
                "reward_function(..., timeout=)"
            )
        kl_controller(self.advantages.kl_coefficient, self.kl_target, self.kl_horizon)
