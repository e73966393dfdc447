"""Which collectives run: seen where torch dispatches them, whatever Python function asked for them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.linear_model import run_operator


@contextmanager
def recorded() -> Iterator[list[str]]:
    """The c10d operators that run inside, in order; an all-reduce with its operation, as "allreduce_ MAX"."""
    seen: list[str] = []
    reduce_op = [""]
    all_reduce = dist.all_reduce

    def named(tensor, op=dist.ReduceOp.SUM, *args, **kwargs):  # type: ignore[no-untyped-def]
        reduce_op[0] = str(op).rsplit(".", 1)[-1]
        return all_reduce(tensor, op, *args, **kwargs)

    class Record(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            if func.namespace == "c10d":
                name = func.name().removeprefix("c10d::")
                seen.append(f"{name} {reduce_op[0]}" if name == "allreduce_" else name)
            return func(*args, **(kwargs or {}))

    with patch.object(dist, "all_reduce", named), Record():
        yield seen


#: what NCCL sends
_DTYPES = {
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
    *(torch.int8, torch.uint8, torch.int32, torch.int64),
}
_ROWS = 1 << 10


class Refused(TorchDispatchMode):
    """Notes what NCCL would refuse of the collectives inside, where the meta device stands for the card.

    Who asks such a tensor how many rows each rank has (`Statistics.reduce` does) hears of a few for each.
    """

    def __init__(self) -> None:
        super().__init__()
        self.collectives = 0
        self.refused: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if func.namespace == "c10d":
            name = func.name().removeprefix("c10d::")
            self.collectives += 1
            for x in tree_leaves((args, kwargs)):
                if isinstance(x, torch.Tensor):
                    if x.device.type == "cpu":
                        self.refused.append(f"{name} of a host tensor")
                    if x.dtype not in _DTYPES:
                        self.refused.append(f"{name} of {x.dtype}")
                    if not x.is_contiguous():
                        self.refused.append(f"{name} of strides {x.stride()} for {tuple(x.shape)}")
        options = kwargs or {}
        if func.name() == "aten::_to_copy" and args[0].is_meta and options.get("device") == torch.device("cpu"):
            assert args[0].dtype == torch.int64, "only numbers of rows are waited for"
            return torch.full(args[0].shape, _ROWS)
        return run_operator(func, args, options)
