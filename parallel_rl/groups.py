"""The process groups that a loss needs, under one name each."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh


# torch 2.13 renamed it; 2.8 knows the old name only.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def group_size(group: ProcessGroup | None) -> int:
    """Count the ranks of `group`; None is a group of one."""
    return 1 if group is None else dist.get_world_size(group)


def group_rank(group: ProcessGroup | None) -> int:
    """Return this process's rank in `group`; None is a group of one."""
    return 0 if group is None else dist.get_rank(group)


def job_backend() -> str:
    """Return the backend of a job's default group: NCCL with a GPU for each local rank, else gloo.

    PARALLEL_RL_BACKEND=gloo lets several ranks share a GPU. ValueError for another value, or for fewer GPUs than ranks.
    """
    devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    backend = os.environ.get("PARALLEL_RL_BACKEND") or ("nccl" if devices else "gloo")
    if backend not in ("gloo", "nccl"):
        raise ValueError(f"PARALLEL_RL_BACKEND = {backend!r} is not valid; choose gloo or nccl, or leave it out")
    if backend == "nccl" and ranks > devices:
        raise ValueError(
            f"this machine has {devices} GPU{'s' * (devices != 1)} for {ranks} ranks, and NCCL takes one a GPU; start with "
            f"torchrun --nproc-per-node {max(devices, 1)}, or set PARALLEL_RL_BACKEND=gloo, with which ranks share a GPU, or "
            "an empty CUDA_VISIBLE_DEVICES= for ranks on the CPU"
        )
    return backend


def take_device() -> torch.device:
    """Select this rank's GPU, or the CPU without one; ranks share GPUs if there are too few."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    index = int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count()
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def current_device() -> torch.device:
    """Return this process's selected GPU, or the CPU."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def check_rank(rank: int | None, group: ProcessGroup | None) -> None:
    """Compare the caller's rank, if any, with the group's; ValueError if they differ."""
    if rank is not None and rank != group_rank(group):
        raise ValueError(f"vocab_parallel_rank = {rank}, but this process is rank {group_rank(group)} of the group")


def all_gather(x: Tensor, group: ProcessGroup | None) -> Tensor:
    """Gather [...] to [ranks, ...] in rank order, with one collective; without gradient."""
    size = group_size(group)
    if size == 1:
        return x[None]
    x = x.contiguous()
    gathered = x.new_empty(size * x.shape[0], *x.shape[1:])
    _all_gather(gathered, x, group=group)
    return gathered.view(size, *x.shape)


class Pending(NamedTuple):
    """A collective under way, and its future result."""

    result: Tensor
    work: dist.Work | None

    def wait(self) -> Tensor:
        """Return the result; on a GPU the stream waits for it, not the host."""
        if self.work is not None:
            self.work.wait()
        return self.result


def all_gather_start(x: Tensor, group: ProcessGroup | None, out: Tensor | None = None) -> Pending:
    """Start to gather [n, ...] to [ranks · n, ...] in rank order, into `out` if given and ranks > 1."""
    size = group_size(group)
    if size == 1:
        return Pending(x, None)
    gathered = x.new_empty(size * x.shape[0], *x.shape[1:]) if out is None else out
    return Pending(gathered, _all_gather(gathered, x.contiguous(), group=group, async_op=True))


def sum_start(x: Tensor, group: ProcessGroup | None, scatter: bool) -> Pending:
    """Start Σ over ranks of [n, ...], in place, or with `scatter` of this rank's [n / ranks, ...] of it."""
    size = group_size(group)
    if size == 1:
        return Pending(x, None)
    if not scatter:
        return Pending(x, dist.all_reduce(x, group=group, async_op=True))
    part = x.new_empty(x.shape[0] // size, *x.shape[1:])
    return Pending(part, _reduce_scatter(part, x, group=group, async_op=True))


def reduce_(x: Tensor, group: ProcessGroup | None, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
    """Reduce over the ranks, in place; without gradient."""
    if group_size(group) > 1:
        dist.all_reduce(x, op, group=group)
    return x


def group_sum(x: Tensor, group: ProcessGroup | None) -> Tensor:
    """Σ over the ranks of `group`, differentiable: the backward is the sum of the ranks' cotangents."""
    if group_size(group) == 1:
        return x
    summed: Tensor = _GroupSum.apply(x, group)
    return summed


def sum_over_ranks(number: int, group: ProcessGroup | None, device: torch.device | None = None) -> int:
    """Σ of an integer over the ranks of `group`, which communicates from `device`."""
    return _reduce_integer(number, dist.ReduceOp.SUM, group, device)


def max_over_ranks(number: int, group: ProcessGroup | None, device: torch.device | None = None) -> int:
    """Return the largest integer of the ranks of `group`, which communicates from `device`."""
    return _reduce_integer(number, dist.ReduceOp.MAX, group, device)


def mean_over_ranks(values: Tensor, group: ProcessGroup | None, device: torch.device | None = None) -> float:
    """Return the mean of the values of all ranks of `group`, from `device`; NaN without values."""
    total = torch.tensor([float(values.sum()), float(values.numel())], dtype=torch.float64, device=device)
    reduce_(total, group)
    return float(total[0] / total[1])


def _reduce_integer(
    number: int, op: dist.ReduceOp.RedOpType, group: ProcessGroup | None, device: torch.device | None
) -> int:
    return int(reduce_(torch.tensor(number, device=device), group, op))


class _GroupSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group  # type: ignore[attr-defined]
        x = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, grad: Tensor) -> tuple[Tensor, None]:
        return _GroupSum.apply(grad, ctx.group), None  # type: ignore[attr-defined]


@dataclass(frozen=True)
class ParallelGroups:
    """Tensor, context and data parallel process groups; None is a group of one.

    `data` is without context parallelism (ranks that hold different sequences). `data_context` is data × context in
    one group, where the framework has it: `reduce_metrics` then costs one collective instead of two.

    >>> groups = ParallelGroups()  # one process; else ParallelGroups.from_megatron(), or .from_device_mesh(mesh, data="dp")
    >>> groups.tp_size, groups.dp_rank
    (1, 0)
    """

    tensor: ProcessGroup | None = None
    context: ProcessGroup | None = None
    data: ProcessGroup | None = None
    data_context: ProcessGroup | None = None

    def __post_init__(self) -> None:
        if self.data_context is not None and group_size(self.data_context) != self.dp_size * self.cp_size:
            raise ValueError(
                f"data_context has {group_size(self.data_context)} ranks; data × context has "
                f"{self.dp_size} × {self.cp_size} = {self.dp_size * self.cp_size}"
            )

    @classmethod
    def from_megatron(cls) -> ParallelGroups:
        """Take the groups of megatron-core's `parallel_state`; ValueError if not initialised."""
        from megatron.core import parallel_state

        if not parallel_state.model_parallel_is_initialized():
            raise ValueError(
                "megatron-core has no groups yet; call parallel_state.initialize_model_parallel(...) first"
            )
        return cls(
            tensor=parallel_state.get_tensor_model_parallel_group(),
            context=parallel_state.get_context_parallel_group(),
            data=parallel_state.get_data_parallel_group(),
            data_context=parallel_state.get_data_parallel_group(with_context_parallel=True),
        )

    @classmethod
    def from_device_mesh(
        cls, mesh: DeviceMesh, *, tensor: str | None = None, context: str | None = None, data: str | None = None
    ) -> ParallelGroups:
        """Take groups of a `DeviceMesh`'s named dimensions, one rank if left out; ValueError if unknown."""
        names = mesh.mesh_dim_names or ()
        for field, name in (("tensor", tensor), ("context", context), ("data", data)):
            if name is not None and name not in names:
                raise ValueError(
                    f"{field} = {name!r} is not a dimension of the mesh; it has {', '.join(names) or 'no names'}"
                )
        return cls(*(None if name is None else mesh.get_group(name) for name in (tensor, context, data)))

    @property
    def tp_size(self) -> int:
        return group_size(self.tensor)

    @property
    def tp_rank(self) -> int:
        return group_rank(self.tensor)

    @property
    def cp_size(self) -> int:
        return group_size(self.context)

    @property
    def cp_rank(self) -> int:
        return group_rank(self.context)

    @property
    def dp_size(self) -> int:
        return group_size(self.data)

    @property
    def dp_rank(self) -> int:
        return group_rank(self.data)
