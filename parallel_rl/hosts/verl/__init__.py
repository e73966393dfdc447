"""verl (0.9.1): our losses in its registry, its losses under the law, its configs in our keys."""

from parallel_rl.hosts.verl.loss import policy_loss, register

__all__ = ["policy_loss", "register"]
