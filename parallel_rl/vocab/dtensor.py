"""DTensor logits: this rank's shard and its placements."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch.distributed as dist

from parallel_rl.groups import group_rank, group_size

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.placement_types import Placement

ROLES = {1: "context_parallel_group", 2: "vocab_parallel_group"}  # by the dimension of logits [B, S, V] that they cut
_ARGUMENTS = {1: "context", 2: "tensor"}  # of `ParallelGroups.from_device_mesh`


@dataclass(frozen=True, eq=False)
class LogitShard:
    """This rank's shard of logits, with gradient.

    Attributes:
        logits: [B, S_local, V_local].
        length: S, over all context ranks.
        vocab_size: V, over all tensor ranks, with the model's padding columns.
        vocab_start: the first column's id.
        cut: the sequence is cut over context ranks, into contiguous parts like `torch.chunk`'s.
    """

    logits: Tensor
    length: int
    vocab_size: int
    vocab_start: int
    cut: bool


def is_dtensor(x: object) -> bool:
    """Return whether `x` is a DTensor, without importing DTensor.

    >>> is_dtensor(3)
    False
    """
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(x, module.DTensor)


def check_plain(name: str, x: object) -> None:
    """Raise ValueError for a DTensor where a plain tensor is read."""
    if is_dtensor(x):
        raise ValueError(
            f"{name} is a DTensor; give {name}.full_tensor() of what is whole on every rank, .to_local() of a shard"
        )


def shard_of_dtensor(
    logits: DTensor, tensor_group: ProcessGroup | None, context_group: ProcessGroup | None
) -> LogitShard:
    """Read placements of logits [B, S, V]: Shard(-1) over the tensor, Shard(1) over the context group.

    Rows may be sharded (Shard(0), data ranks) or replicated over other mesh dimensions.

    Raises:
        ValueError: another placement, by the mesh dimension's name; a group that is no dimension of the mesh.
    """
    mesh = logits.device_mesh
    if logits.dim() != 3:
        raise ValueError(f"next_token_logits must be [B, S/cp, V/tp], got a DTensor {list(logits.shape)}")
    groups = {1: context_group, 2: tensor_group}
    cuts = dict.fromkeys(groups, False)
    for axis, placement in enumerate(logits.placements):
        if mesh.size(axis) == 1:
            continue
        name = (mesh.mesh_dim_names or ())[axis] if mesh.mesh_dim_names else str(axis)
        role = next((dim for dim, group in groups.items() if _same(group, mesh.get_group(axis))), None)
        cut = _cut_dimension(placement, name, logits.dim())
        if cut in groups:
            if role != cut:
                raise ValueError(
                    f"the logits are {placement} over {name!r}, which is not the {ROLES[cut]}; take the groups of "
                    f"ParallelGroups.from_device_mesh(mesh, {_ARGUMENTS[cut]}={name!r})"
                )
            cuts[cut] = True
        elif role is not None:
            raise ValueError(
                f"the logits are {placement} over {name!r}, the {ROLES[role]}, which needs Shard({-1 if role == 2 else 1}); "
                f"give no {ROLES[role]} for logits that it does not cut so"
            )
    for dim, group in groups.items():
        if group_size(group) > 1 and not cuts[dim]:
            raise ValueError(
                f"the {ROLES[dim]} is not a dimension of the logits' mesh ({', '.join(mesh.mesh_dim_names or ())})"
            )
    width = -(-logits.shape[2] // group_size(tensor_group))
    start = min(group_rank(tensor_group) * width, logits.shape[2])
    return LogitShard(logits.to_local(), logits.shape[1], logits.shape[2], start, cuts[1])


def _cut_dimension(placement: Placement, name: str, dims: int) -> int | None:
    if placement.is_partial():
        raise ValueError(
            f"the logits are {placement} over {name!r}: sums that are not taken yet; redistribute them to Shard(-1) first"
        )
    if placement.is_replicate():
        return None
    dim = getattr(placement, "dim", None)
    if dim is None or not placement.is_shard():
        raise ValueError(
            f"the logits are {placement} over {name!r}; they may be Shard(-1), Shard(1), Shard(0) or Replicate()"
        )
    return int(dim) % dims


def _same(group: ProcessGroup | None, other: ProcessGroup) -> bool:
    return group is not None and dist.get_process_group_ranks(group) == dist.get_process_group_ranks(other)
