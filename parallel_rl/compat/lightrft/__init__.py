"""LightRFT's losses (0.1.1) and the pure functions of its experience maker, by its names and arguments."""

from parallel_rl.compat.language import GPTLMLoss, KDLoss, PRMLoss
from parallel_rl.compat.lightrft.losses import (
    AdaptiveKLController,
    FixedKLController,
    HPSLoss,
    LogSigmoidLoss,
    PolicyLoss,
    ValueLoss,
    clip_filter_like_weight_func,
    compute_approx_kl,
    compute_reward,
    create_high_entropy_mask,
    entropy_from_logits,
    get_advantages_and_returns,
    get_cumulative_returns,
    log_probs_from_logits,
    masked_mean,
    unpacking_samples,
)
from parallel_rl.compat.preference import DPOLoss, KTOLoss, LogExpLoss, PairWiseLoss, VanillaKTOLoss

__all__ = [
    "PolicyLoss",
    "ValueLoss",
    "GPTLMLoss",
    "KDLoss",
    "DPOLoss",
    "KTOLoss",
    "VanillaKTOLoss",
    "PairWiseLoss",
    "LogSigmoidLoss",
    "LogExpLoss",
    "HPSLoss",
    "PRMLoss",
    "AdaptiveKLController",
    "FixedKLController",
    "clip_filter_like_weight_func",
    "compute_approx_kl",
    "compute_reward",
    "create_high_entropy_mask",
    "entropy_from_logits",
    "get_advantages_and_returns",
    "get_cumulative_returns",
    "log_probs_from_logits",
    "masked_mean",
    "unpacking_samples",
]
