"""Time by kernel, and whether the host keeps up."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch.profiler import ProfilerActivity, profile


def kernel_table(call: Callable[[], object], device: str) -> list[tuple[str, float]]:
    """Time each kernel (CPU: operator) of one call in ms, slowest first; warms up with one call."""
    call()
    activity = ProfilerActivity.CUDA if device == "cuda" else ProfilerActivity.CPU
    with profile(activities=[activity]) as seen:
        call()
        if device == "cuda":
            torch.cuda.synchronize()
    of_device = "self_device_time_total" if device == "cuda" else "self_cpu_time_total"
    rows = [(event.key, getattr(event, of_device) / 1e3) for event in seen.key_averages()]
    return sorted((row for row in rows if row[1] > 0), key=lambda row: -row[1])


def issue_and_total(call: Callable[[], object], device: str, repeats: int = 5) -> tuple[float, float]:
    """Time in ms until a call is issued and until it is done; the least of the repeats."""

    def wait() -> None:
        if device == "cuda":
            torch.cuda.synchronize()

    found = []
    for _ in range(repeats + 1):
        wait()
        began = time.perf_counter()
        call()
        issued = time.perf_counter()
        wait()
        found.append((1e3 * (issued - began), 1e3 * (time.perf_counter() - began)))
    return min(found[1:], key=lambda pair: pair[1])
