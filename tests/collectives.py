"""Which collectives run: seen where torch dispatches them, whatever Python function asked for them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode


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
