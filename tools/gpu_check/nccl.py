"""Stage nccl: the collectives that the library uses, between the cards of this machine and between ranks that share one."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.common import run_ranks
from tools.gpu_check.facts import Facts

_DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.uint8)
_REPEATS = 20


def run(facts: Facts, device: str) -> None:
    """NCCL over all cards, then gloo with two ranks on the first; on a CPU gloo alone."""
    if device == "cuda":
        facts.tell("NCCL", ".".join(map(str, torch.cuda.nccl.version())))
        _world(facts, device, torch.cuda.device_count(), "nccl")
    _world(facts, device, 2, "gloo")


def _world(facts: Facts, device: str, ranks: int, backend: str) -> None:
    where = f"{backend}, {ranks} rank{'s' * (ranks > 1)}"
    with facts.required(where):
        found = run_ranks(ranks, collectives, device, timeout=30.0, backend=backend)[0]
        for name, why in found["failed"].items():
            # gloo has not every collective for tensors of a card, and the library does not need those that it lacks
            (facts.not_run if backend == "gloo" else lambda name, why: facts.check(name, False, why))(
                f"{where}: {name}", why
            )
        facts.tell(f"{where}: collectives that are right", found["right"])
        for name, seconds in found["seconds"].items():
            facts.tell(f"{where}: {name}", 1e6 * seconds, "µs")


def collectives(rank: int, device: str) -> dict:
    """Run each collective in each dtype: how many are right, why others are not, and what two of the losses take."""
    failed: dict[str, str] = {}
    right = 0
    size = dist.get_world_size()
    for dtype in _DTYPES:
        for name, call in _calls(rank, size, dtype, device).items():
            try:
                got, want = call()
                if got.tolist() == want.tolist():
                    right += 1
                else:
                    failed[f"{name} {dtype}"] = f"gave {got.flatten()[:4].tolist()}, not {want.flatten()[:4].tolist()}"
            except Exception as error:  # each backend has its own for what it lacks
                failed[f"{name} {dtype}"] = str(error).splitlines()[0]
    parts, gathered = torch.zeros(8192, 4, device=device), torch.zeros(size * 8192, 4, device=device)
    seconds = {
        "all-gather of [8192, 4] floats": _seconds(lambda: dist.all_gather_into_tensor(gathered, parts), device),
        "all-reduce of [8192] floats": _seconds(lambda: dist.all_reduce(parts[:, 0].contiguous()), device),
    }
    return {"failed": failed, "right": right, "seconds": seconds}


def _calls(rank: int, size: int, dtype: torch.dtype, device: str) -> dict[str, Callable[[], tuple[Tensor, Tensor]]]:
    """Each collective's result and what it should be."""

    def full(value: int, *shape: int) -> Tensor:
        return torch.full(shape or (4,), value, dtype=dtype, device=device)

    total = sum(range(1, size + 1))
    ramp = torch.cat([full(other + 1) for other in range(size)])

    def reduced(op: dist.ReduceOp, want: int) -> tuple[Tensor, Tensor]:
        x = full(rank + 1)
        dist.all_reduce(x, op)
        return x, full(want)

    def gathered() -> tuple[Tensor, Tensor]:
        out = full(0, size * 4)
        dist.all_gather_into_tensor(out, full(rank + 1))
        return out, ramp

    def scattered() -> tuple[Tensor, Tensor]:
        out = full(0)
        dist.reduce_scatter_tensor(out, full(rank + 1, size * 4))
        return out, full(total)

    def exchanged() -> tuple[Tensor, Tensor]:
        out = full(0, size * 4)
        dist.all_to_all_single(out, full(rank + 1, size * 4))
        return out, ramp

    def broadcast() -> tuple[Tensor, Tensor]:
        x = full(rank + 1)
        dist.broadcast(x, 0)
        return x, full(1)

    return {
        "all-reduce sum": lambda: reduced(dist.ReduceOp.SUM, total),
        "all-reduce max": lambda: reduced(dist.ReduceOp.MAX, size),
        "all-gather": gathered,
        "reduce-scatter": scattered,
        "all-to-all": exchanged,
        "broadcast": broadcast,
    }


def _seconds(call: Callable[[], object], device: str) -> float:
    def wait() -> float:
        if device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    call()
    began = wait()
    for _ in range(_REPEATS):
        call()
    return (wait() - began) / _REPEATS
