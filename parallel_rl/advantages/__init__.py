"""Advantages and returns: from a step's rewards to a number for every token, alike for any split over ranks.

An estimator is a frozen dataclass with a name; rewards and KL come from `parallel_rl.experience`.
"""

from parallel_rl.advantages.base import AdvantageEstimator, Advantages, Moments, moments, whiten
from parallel_rl.advantages.estimate import estimate, estimator_config
from parallel_rl.advantages.returns import GAE, discounted_returns, gae, length_adaptive_lambda, terminal_rewards

__all__ = [
    "AdvantageEstimator",
    "Advantages",
    "GAE",
    "Moments",
    "discounted_returns",
    "estimate",
    "estimator_config",
    "gae",
    "length_adaptive_lambda",
    "moments",
    "terminal_rewards",
    "whiten",
]
