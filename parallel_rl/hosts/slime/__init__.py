"""slime (its source of August 2026) and miles: our losses in its call, its custom losses under the law."""

from parallel_rl.hosts.slime.loss import custom_loss

__all__ = ["custom_loss"]
