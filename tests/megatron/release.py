"""What a rank of the pool has to let go of by hand."""

import gc
import sys


def release_experts() -> None:
    """Let go of models with experts: their layers keep the last graph, whose hooks keep the model, and it Megatron's groups.

    A group has threads that never rest, and a session makes hundreds.
    """
    layers = sys.modules.get("megatron.core.transformer.moe.moe_layer")
    if layers is not None:
        for referrer in gc.get_referrers(layers.MoELayer):  # its instances among them
            if isinstance(referrer, layers.MoELayer):
                referrer.__dict__.clear()
