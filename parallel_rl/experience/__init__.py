"""Experience from prompts: samples, rewards, log-probs, KL, shaping, dynamic sampling, advantages."""

from importlib import import_module

from parallel_rl.experience.dynamic_sampling import Drawn, DynamicSampling, draw_groups
from parallel_rl.experience.failures import FailedSamplesConfig, SampleFailures
from parallel_rl.experience.pipeline import (
    AdaptiveKLController,
    FixedKLController,
    Models,
    ask_models,
    compute_advantages,
    kl_controller,
    shape_rewards,
)
from parallel_rl.experience.rewards import register_reward, reward_function
from parallel_rl.experience.samples import Experience, Samples, padded_samples
from parallel_rl.experience.shaping import (
    Overlong,
    RewardScale,
    RewardShaping,
    RunningMoments,
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

_OF_LIGHTRFT = ["ExperienceConfig", "ExperienceMaker", "Made", "Sources", "text_rewards"]
__all__ = [
    *_OF_LIGHTRFT,
    "AdaptiveKLController",
    "Completion",
    "CompletionServer",
    "CompletionServerConfig",
    "CompletionServerError",
    "Drawn",
    "DynamicSampling",
    "Experience",
    "FailedSamplesConfig",
    "FixedKLController",
    "HTTPReward",
    "HTTPRewardConfig",
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
]


def __getattr__(name: str) -> object:
    """Load names of LightRFT's maker, which may not be imported here, on first use."""
    if name in _OF_LIGHTRFT:
        return getattr(import_module("parallel_rl.compat.lightrft.maker"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
