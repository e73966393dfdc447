"""What a rank of the pool has to let go of by hand."""

import gc
import sys

from parallel_rl.testing.pool import run_world


def release_experts() -> None:
    """Let go of models with experts: their layers keep the last graph, whose hooks keep the model, and it Megatron's groups.

    A group has threads that never rest, and a session makes hundreds.
    """
    layers = sys.modules.get("megatron.core.transformer.moe.moe_layer")
    if layers is not None:
        for referrer in gc.get_referrers(layers.MoELayer):  # its instances among them
            if isinstance(referrer, layers.MoELayer):
                referrer.__dict__.clear()


def release_in_the_pool(ranks: int) -> None:
    """Let go of them on so many ranks of the pool, where code of the package ran a model with experts."""
    run_world(ranks, _release)


def _release(rank: int) -> None:
    release_experts()
