"""Experience from prompts: samples, rewards, log-probs, KL, shaping, dynamic sampling, advantages."""

from parallel_rl.experience.dynamic_sampling import Drawn, DynamicSampling, draw_groups
from parallel_rl.experience.failures import FailedSamplesConfig, SampleFailures
from parallel_rl.experience.kl_control import AdaptiveKLController, FixedKLController, kl_controller
from parallel_rl.experience.maker import ExperienceMaker, Made, Sources, text_rewards
from parallel_rl.experience.maker_config import ExperienceConfig
from parallel_rl.experience.pipeline import Models, ask_models, compute_advantages, shape_rewards
from parallel_rl.experience.rewards import register_reward, reward_function
from parallel_rl.experience.running_moments import RunningMoments
from parallel_rl.experience.samples import Experience, Samples, padded_samples
from parallel_rl.experience.shaping import (
    Overlong,
    RewardScale,
    RewardShaping,
    SoftOverlong,
    StopProperly,
    clip_filter_like_weight,
    compute_reward,
)
from parallel_rl.servers.completion_server import (
    CompletionServer,
    CompletionServerConfig,
    CompletionServerError,
    Sampling,
)
from parallel_rl.servers.completions import Completion
from parallel_rl.servers.http_reward import HTTPReward, HTTPRewardConfig, RewardServerError

__all__ = [
    "AdaptiveKLController",
    "Completion",
    "CompletionServer",
    "CompletionServerConfig",
    "CompletionServerError",
    "Drawn",
    "DynamicSampling",
    "Experience",
    "ExperienceConfig",
    "ExperienceMaker",
    "FailedSamplesConfig",
    "FixedKLController",
    "HTTPReward",
    "HTTPRewardConfig",
    "Made",
    "Models",
    "Overlong",
    "RewardScale",
    "RewardServerError",
    "RewardShaping",
    "RunningMoments",
    "SampleFailures",
    "Samples",
    "Sampling",
    "SoftOverlong",
    "Sources",
    "StopProperly",
    "ask_models",
    "clip_filter_like_weight",
    "compute_advantages",
    "compute_reward",
    "draw_groups",
    "kl_controller",
    "padded_samples",
    "register_reward",
    "reward_function",
    "shape_rewards",
    "text_rewards",
]
