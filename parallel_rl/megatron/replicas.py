"""Rolling out with a model that trains under context and sequence parallelism."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.utils import get_model_config


class _Alone:
    """Stands where a context group is read for its size and rank."""

    def size(self) -> int:
        return 1

    def rank(self) -> int:
        return 0


@contextlib.contextmanager
def replicas(models: Sequence[torch.nn.Module]) -> Iterator[None]:
    """Let every context rank run whole sequences by itself (a data replica) and sequence parallelism is off.

    Sequences need no particular length then. Tensor and pipeline parallelism stay. For use without gradients: the
    gradients of the norms would be summed over the tensor ranks twice.

    >>> with replicas([model]), torch.no_grad():
    ...     inputs = padded_input(torch.tensor([[1, 2, 3]]), context_parallel=False)
    ...     forward_logits(model, inputs).shape
    torch.Size([1, 3, 8])
    """
    changes = [change for model in models for change in _changes(model)]
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in changes]
    engines = [
        module for model in models for module in model.modules() if hasattr(module, "set_context_parallel_group")
    ]
    ways = [(module.cp_group, module.cp_global_ranks, module.cp_stream, module.cp_comm_type) for module in engines]
    try:
        for owner, name, value in changes:
            setattr(owner, name, value)
        for module, way in zip(engines, ways, strict=True):
            module.set_context_parallel_group(None, None, None, way[-1])  # type: ignore[operator]
        _forget_rotations()
        yield
    finally:
        for owner, name, value in before:
            setattr(owner, name, value)
        for module, way in zip(engines, ways, strict=True):
            module.set_context_parallel_group(*way)  # type: ignore[operator]
        _forget_rotations()


def _changes(model: torch.nn.Module) -> list[tuple[object, str, object]]:
    """(owner, attribute, value inside): the config, the flags that Megatron copies from it, and every holder of the
    context group.
    """
    alone = _Alone()
    config = get_model_config(model)
    changes: list[tuple[object, str, object]] = [
        (config, "sequence_parallel", False),
        (config, "context_parallel_size", 1),
    ]
    seen: set[int] = set()
    for module in model.modules():
        names = ["sequence_parallel", "reduce_scatter_embeddings"]
        names += (
            [] if hasattr(module, "set_context_parallel_group") else ["cp_group"]
        )  # Transformer Engine wants its own setter
        for name in names:
            if name in vars(module):
                changes.append((module, name, alone if name == "cp_group" else False))
        collection = getattr(module, "pg_collection", None)
        if getattr(collection, "cp", None) is not None and id(collection) not in seen:
            seen.add(id(collection))
            changes.append((collection, "cp", alone))
    return changes


def _forget_rotations() -> None:
    # Megatron caches rotary angles per (module, length), not per context group.
    RotaryEmbedding.forward.cache_clear()
