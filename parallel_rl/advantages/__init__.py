"""Advantages and returns: from the rewards of a step to a number for every token, the same for any split over ranks.

An estimator is a frozen dataclass with a name; where rewards and KL come from is `parallel_rl.experience`'s concern.
"""

from parallel_rl.advantages.base import AdvantageEstimator, Advantages
from parallel_rl.advantages.estimate import estimate, estimator_config
from parallel_rl.advantages.moments import Moments, moments, whiten
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
