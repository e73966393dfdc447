"""Context ranks of a row: Megatron's, a micro-batch's own, or none in rollouts."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import torch
from megatron.core import parallel_state
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.utils import get_model_config
from torch.distributed import get_process_group_ranks

from parallel_rl.groups import group_rank, group_size
from parallel_rl.layout import CPLayout

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class Context(NamedTuple):
    """Ranks that share a row's tokens, this rank's place and how rows are cut (see `SequenceLayout`).

    tensor: tensor ranks that split a context rank's tokens (sequence parallelism); rows are padded for them.
    """

    size: int = 1
    rank: int = 0
    layout: CPLayout = "zigzag"
    tensor: int = 1

    @classmethod
    def present(cls, layout: CPLayout = "zigzag") -> Context:
        size, rank = parallel_state.get_context_parallel_world_size(), parallel_state.get_context_parallel_rank()
        return cls(size, rank, layout, parallel_state.get_tensor_model_parallel_world_size())

    @classmethod
    def of(cls, group: ProcessGroup | None, layout: CPLayout = "zigzag") -> Context:
        """Return the layout of a micro-batch's own group; None is a group of one."""
        return cls(group_size(group), group_rank(group), layout, parallel_state.get_tensor_model_parallel_world_size())


#: a single rank, inside `replicas`
ALONE = Context()


class _Alone:
    def size(self) -> int:
        return 1

    def rank(self) -> int:
        return 0


@contextlib.contextmanager
def replicas(models: Sequence[torch.nn.Module]) -> Iterator[None]:
    """Make every context rank a data replica that runs whole sequences, without sequence parallelism.

    Sequences then need no particular length. Tensor and pipeline parallelism stay. Not for training: gradients of norms would
    be summed over tensor ranks twice.

    >>> with replicas([model]), torch.no_grad():
    ...     inputs = padded_input(torch.tensor([[1, 2, 3]]), ALONE)
    ...     forward_logits(model, inputs).shape
    torch.Size([1, 3, 8])
    """
    with _changed([change for model in models for change in _sequence_parallel(model)]), _on_group(models, None):
        yield


@contextlib.contextmanager
def context_group(model: torch.nn.Module, group: ProcessGroup | None) -> Iterator[None]:
    """Run a model on another context group (dynamic CP) in a `with` block; None: one rank.

    Every rank of the group runs the same forwards; backward may follow outside. ValueError for activation recomputation, which
    would use the wrong group.
    """
    if get_model_config(model).recompute_granularity is not None:
        raise ValueError(
            "recompute_granularity runs a layer's forward again in backward, when its micro-batch's context group is gone; "
            "context groups of micro-batches need it off"
        )
    with _on_group([model], group):
        yield


@contextlib.contextmanager
def _changed(changes: Sequence[tuple[object, str, object]]) -> Iterator[None]:
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in changes]
    try:
        for owner, name, value in changes:
            setattr(owner, name, value)
        yield
    finally:
        for owner, name, value in before:
            setattr(owner, name, value)


@contextlib.contextmanager
def _on_group(models: Sequence[torch.nn.Module], group: ProcessGroup | None) -> Iterator[None]:
    changes = [change for model in models for change in _context(model, group)]
    engines = [
        module for model in models for module in model.modules() if hasattr(module, "set_context_parallel_group")
    ]
    before = [(module.cp_group, module.cp_global_ranks, module.cp_stream, module.cp_comm_type) for module in engines]
    try:
        with _changed(changes):
            for module, (*_, stream, kind) in zip(engines, before, strict=True):
                ranks, stream_of_layers = (
                    (None, None) if group is None else (get_process_group_ranks(group), stream or _side())
                )
                module.set_context_parallel_group(group, ranks, stream_of_layers, kind)  # type: ignore[operator]
            _forget_rotations()
            yield
    finally:
        for module, previous in zip(engines, before, strict=True):
            module.set_context_parallel_group(*previous)  # type: ignore[operator]
        _forget_rotations()


@lru_cache(maxsize=1)
def _side() -> torch.cuda.Stream:
    """Return an attention stream, in case Megatron started without context ranks and made none."""
    return torch.cuda.Stream()


def _sequence_parallel(model: torch.nn.Module) -> list[tuple[object, str, object]]:
    """List (owner, attribute, value in rollouts) of the config and of the flags copied from it."""
    names = ("sequence_parallel", "reduce_scatter_embeddings")
    owners = [(module, name) for module in model.modules() for name in names if name in vars(module)]
    return [(owner, name, False) for owner, name in [(get_model_config(model), "sequence_parallel"), *owners]]


def _context(model: torch.nn.Module, group: ProcessGroup | None) -> list[tuple[object, str, object]]:
    """List the same for the size of the context group in the config and for every holder of the group."""
    stand_in = _Alone() if group is None else group
    changes: list[tuple[object, str, object]] = [(get_model_config(model), "context_parallel_size", group_size(group))]
    seen: set[int] = set()
    for module in model.modules():
        # Transformer Engine has its own setter
        if not hasattr(module, "set_context_parallel_group") and "cp_group" in vars(module):
            changes.append((module, "cp_group", stand_in))
        collection = getattr(module, "pg_collection", None)
        if getattr(collection, "cp", None) is not None and id(collection) not in seen:
            seen.add(id(collection))
            changes.append((collection, "cp", stand_in))
    return changes


def _forget_rotations() -> None:
    # Megatron caches rotary angles per (module, length), not per context group
    RotaryEmbedding.forward.cache_clear()
