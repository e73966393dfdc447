"""Common parts of the benchmarks: real gloo ranks, CPU clocks, peak memory, counts of operators, and what the machine is."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import platform
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.utils._python_dispatch import TorchDispatchMode

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_MMAP_MAX = -1, -3, -4  # of glibc's mallopt


class Seconds(NamedTuple):
    """CPU-seconds of one process: the least and the median of the repeats."""

    least: float
    median: float

    @classmethod
    def of(cls, times: Sequence[float]) -> Seconds:
        ordered = sorted(times)
        return cls(ordered[0], ordered[len(ordered) // 2])

    @classmethod
    def mean(cls, ranks: Sequence[Seconds]) -> Seconds:
        """Seconds of the average process."""
        return cls(*(sum(x) / len(x) for x in zip(*ranks, strict=True)))


class CpuClock:
    """CPU-seconds of this process (all its threads) since its making; waiting for another rank costs next to nothing."""

    def __init__(self) -> None:
        gc.collect()
        self._start = time.process_time()

    def __call__(self) -> float:
        return time.process_time() - self._start


class PeakMemory:
    """Peak resident bytes above what was resident when it was made, by the kernel's own count (Linux with glibc).

    What the allocator had kept for reuse is given back first, otherwise a method could use it unseen.
    """

    def __init__(self) -> None:
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # VmHWM starts again from VmRSS
        self._before = _status("VmRSS")

    def __call__(self) -> int:
        return max(0, _status("VmHWM") - self._before)


def peak_bytes(call: Callable[[], object], device: str) -> int:
    """Peak bytes of a call, and of what it returns, beyond what was there before: resident, or allocated on a card."""
    if device == "cpu":
        peak = PeakMemory()
        kept = call()
        most = peak()
        del kept
        return most
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    return torch.cuda.max_memory_allocated() - before


class CountOperators(TorchDispatchMode):
    """Counts the operators that torch dispatches inside, and the collectives among them."""

    def __init__(self) -> None:
        super().__init__()
        self.count = self.collectives = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.count += 1
        self.collectives += func.namespace == "c10d"
        return func(*args, **(kwargs or {}))


def return_freed_memory(threshold: int = 1 << 16) -> None:
    """Make glibc unmap a block above `threshold` bytes as soon as it is freed, so that a peak is one."""
    libc = ctypes.CDLL(None)
    libc.mallopt(_M_MMAP_THRESHOLD, threshold)
    libc.mallopt(_M_TRIM_THRESHOLD, threshold)


def keep_freed_memory() -> None:
    """Make glibc keep freed memory for reuse, as PyTorch does on a GPU.

    Otherwise the kernel's zeroing of fresh pages would decide between two methods, and differ from run to run: it can
    take longer than a whole pass.
    """
    libc = ctypes.CDLL(None)
    libc.mallopt(_M_MMAP_MAX, 0)
    libc.mallopt(_M_TRIM_THRESHOLD, -1)


def _status(field: str) -> int:
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"the kernel does not report {field}: peak memory is measured on Linux only")


@contextlib.contextmanager
def short_collections() -> Iterator[None]:
    """Hide what is alive from the garbage collector, so that the collections before each measurement are short."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def run_ranks(
    size: int, function: Callable[..., Any], *args: Any, timeout: float = 600.0, backend: str = "gloo"
) -> list[Any]:
    """`[function(rank, *args) for each rank]`, on `size` processes of a world, one thread each; with "nccl" each has a GPU."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ.update(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1", TORCHINDUCTOR_COMPILE_THREADS="1")
        mp.spawn(_rank, args=(size, folder, timeout, backend, function, args), nprocs=size)
        return [torch.load(Path(folder) / f"result{rank}", weights_only=False) for rank in range(size)]  # nosec B614 # own files


def _rank(
    rank: int, size: int, folder: str, timeout: float, backend: str, function: Callable[..., Any], args: tuple
) -> None:
    torch.set_num_threads(1)
    if backend == "nccl":
        torch.cuda.set_device(rank)
    dist.init_process_group(
        backend,
        store=dist.FileStore(f"{folder}/store", size),
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=timeout),
    )
    torch.save(function(rank, *args), Path(folder) / f"result{rank}")
    dist.barrier()
    dist.destroy_process_group()


def machine() -> dict[str, str]:
    """Processor, cores and versions: what the figures depend on."""
    model = platform.processor() or platform.machine()
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                model = line.split(":", 1)[1].strip()
                break
    packages = {}
    for name in ("torch", "megatron-core", "transformer-engine", "trl", "liger-kernel", "cut-cross-entropy"):
        with contextlib.suppress(PackageNotFoundError):
            packages[name] = version(name)
    return {
        "cpu": model,
        "cores": str(os.cpu_count()),
        "vector instructions": torch.backends.cpu.get_cpu_capability(),
        "python": platform.python_version(),
        **packages,
    }


def write_json(path: str | None, content: dict[str, Any]) -> None:
    """Writes a report where `--json` asks for one."""
    if path is not None:
        Path(path).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def verdict(missed: Sequence[str], check: bool) -> int:
    """Prints which figures are missed; the exit status is 1 where `--check` asks for them."""
    for line in missed:
        print(f"missed: {line}")
    if not missed:
        print("every figure is met")
    return 1 if missed and check else 0
