"""Megatron's process groups, and the context ranks of a row: Megatron's, a micro-batch's own, or none in rollouts."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import param_and_grad_buffer
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.utils import get_model_config
from torch.distributed import get_process_group_ranks

from parallel_rl.groups import group_rank, group_size
from parallel_rl.layout import CPLayout
from parallel_rl.megatron.cpu import enable_cpu

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

# the world and group sizes of the last `initialize`
_present: list[tuple[object, tuple[int, int, int, int, int | None, int | None, float]]] = []


def initialize(
    tp: int = 1,
    cp: int = 1,
    pp: int = 1,
    *,
    ep: int = 1,
    etp: int | None = None,
    seed: int = 0,
    virtual_pp: int | None = None,
    timeout: float = 1800.0,
) -> None:
    """Create Megatron's process groups and random states; the rest of the world is data parallel.

    A layout of the same sizes is kept, another one is destroyed first. Without CUDA, `enable_cpu()` is called.

    >>> initialize(tp=1, cp=1, pp=1)

    Args:
        tp, cp, pp: tensor, context and pipeline parallel sizes.
        ep, etp: expert parallel size, and ranks per expert's matrices (None: tp). They divide a stage separately: its tensor
            × context × data ranks are ep · etp · (replicas of an expert).
        seed: of Megatron's random states; must be the same on every rank.
        virtual_pp: model chunks per pipeline stage (interleaved schedule).
        timeout: seconds that a rank waits in one collective of these groups.

    Raises:
        ValueError: a size below 1, or a world that is not divisible by tp·cp·pp and by etp·ep·pp.
        RuntimeError: torch.distributed is not initialised.
    """
    expert_tp = tp if etp is None else etp
    for name, size in (("tp", tp), ("cp", cp), ("pp", pp), ("ep", ep), ("etp", expert_tp)):
        if size < 1:
            raise ValueError(f"{name} = {size} must be at least 1")
    if not dist.is_initialized():
        raise RuntimeError("call torch.distributed.init_process_group first (torchrun sets its environment)")
    world = dist.get_world_size()
    if world % (tp * cp * pp):
        raise ValueError(
            f"the world has {world} ranks, which is not divisible by tp {tp} × cp {cp} × pp {pp} = {tp * cp * pp}"
        )
    if world % (expert_tp * ep * pp):
        raise ValueError(
            f"the world has {world} ranks, which is not divisible by etp {expert_tp} × ep {ep} × pp {pp} = "
            f"{expert_tp * ep * pp}"
        )
    on_host = enable_cpu()
    layout = (tp, cp, pp, ep, etp, virtual_pp, timeout)
    if not (parallel_state.model_parallel_is_initialized() and _present == [(dist.group.WORLD, layout)]):
        destroy()
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=tp,
            context_parallel_size=cp,
            pipeline_model_parallel_size=pp,
            virtual_pipeline_model_parallel_size=virtual_pp,
            expert_model_parallel_size=ep,
            expert_tensor_parallel_size=etp,
            distributed_timeout_minutes=timeout / 60,
        )
        _present[:] = [(dist.group.WORLD, layout)]
    if dist.get_backend() == "gloo" and torch.cuda.is_available():
        reduce_one_by_one()
    # the host has one random state, which Megatron's tracker must not swap
    tensor_parallel.model_parallel_cuda_manual_seed(seed, inference_rng_tracker=on_host, force_reset_rng=True)


def reduce_one_by_one() -> None:
    """Make Megatron's DDP reduce each bucket separately; gloo's coalesced collectives refuse GPU tensors."""
    param_and_grad_buffer._coalescing_manager = _one_by_one


@contextlib.contextmanager
def _one_by_one(group: dist.ProcessGroup, async_ops: bool = False) -> Iterator[None]:
    if async_ops:
        raise ValueError("collectives that overlap do not run over gloo on GPUs; set overlap_grad_reduce to false")
    yield


def destroy() -> None:
    """Destroy Megatron's process groups, their communicators and threads; the default process group stays.

    Call it before `torch.distributed.destroy_process_group()`, which keeps the threads of a gloo group that Megatron refers to:
    a thread that frees a tensor at interpreter exit aborts the finished process.

    >>> destroy()
    >>> initialize()
    """
    _present.clear()
    groups = getattr(parallel_state, "_global_process_group_list", None) or []
    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
        for name, value in list(vars(parallel_state).items()):
            if isinstance(value, dist.ProcessGroup):  # Megatron keeps a few
                setattr(parallel_state, name, None)
    for group in groups:
        if isinstance(group, dist.ProcessGroup) and group in dist.distributed_c10d._world.pg_map:
            dist.destroy_process_group(group)


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
