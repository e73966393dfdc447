"""Megatron's process groups over the default one."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import param_and_grad_buffer

from parallel_rl.megatron.cpu import enable_cpu

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
