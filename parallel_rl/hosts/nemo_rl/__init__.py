"""NeMo-RL (its source of August 2026): our losses in its call, its losses under the law, its configs in our keys."""

from parallel_rl.hosts.nemo_rl.loss import HostLoss

__all__ = ["HostLoss"]
