"""What the tests on a card share: a host that must not wait, and a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor


@contextmanager
def no_sync() -> Iterator[None]:
    """Inside, an operator that makes the host wait for the card raises."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def replayed(call: Callable[[], Sequence[Tensor]], renew: Callable[[], object]) -> list[Tensor]:
    """What a CUDA graph of `call` gives once `renew` has written other input to where the call reads it."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):  # kernels are built and the allocator is warm before the capture
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = call()
    renew()
    graph.replay()
    results = [x.clone() for x in captured]
    torch.cuda.synchronize()  # the graph's memory goes with the graph
    return results
