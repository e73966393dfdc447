"""Stage kernels: the passes over the logits at the shapes that matter, each cut of them, and the peers beside them."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from unittest.mock import patch

import torch

from benchmarks.peers import broken, join_megatron
from benchmarks.report import copy_bandwidth
from benchmarks.token_stats_gpu import H200_SECONDS, measure
from benchmarks.token_stats_gpu_methods import OURS, make_case, methods, ours, shard
from parallel_rl.vocab.backends.choice import CUTS, Backend, Cut
from parallel_rl.vocab.shards import Truncation, VocabShard
from parallel_rl.vocab.threshold import kept_floor
from tools.gpu_check.facts import Facts
from tools.gpu_check.profile import issue_and_total, kernel_table

_SHAPES = (
    (8192, 128256, torch.bfloat16),
    (8192, 16032, torch.bfloat16),
    (8192, 18992, torch.bfloat16),
    (1100, 128256, torch.bfloat16),
    (8192, 128256, torch.float32),
)
_TINY = ((24, 512, torch.float32),)


def run(facts: Facts, device: str) -> None:
    """Time each shape with each cut, name the best, then show the kernels by name, and the peers at the first shape."""
    cuda = device == "cuda"
    copy = copy_bandwidth(device, 1 << (31 if cuda else 20))
    facts.tell("copy", copy, "GB/s")
    backend: Backend = "triton" if cuda else "eager"
    for tokens, width, dtype in _SHAPES if cuda else _TINY:
        _shape(facts, tokens, width, dtype, backend, copy)
    for dtype in (torch.bfloat16, torch.float32):
        _threshold(facts, *(_SHAPES if cuda else _TINY)[0][:2], dtype, backend, copy)
    _peers(facts, *(_SHAPES if cuda else _TINY)[0], backend)


def _shape(facts: Facts, tokens: int, width: int, dtype: torch.dtype, backend: Backend, copy: float) -> None:
    device = "cuda" if backend == "triton" else "cpu"
    case = make_case(tokens, width, dtype, device)
    where = f"T {tokens}, V {width}, {str(dtype).removeprefix('torch.')}"
    of_shard = width < 32768 and backend == "triton"
    method = shard(backend) if of_shard else ours(backend)[1]
    goals = H200_SECONDS.get(method.name if of_shard else OURS) if _is_h200(device) and tokens == 8192 else None
    times = {}
    for cut in _cuts(tokens, backend):
        with facts.required(f"{where}, {cut}"), _applied(cut):
            figures = measure([method], case, 7, device, checked=False)[method.name]
            times[cut] = figures.forward.median, figures.both.median
            share = figures.forward_bandwidth / copy, figures.both_bandwidth / copy
            words = f"forward {1e3 * times[cut][0]:.3f} ms ({share[0]:.0%} of copy), both {1e3 * times[cut][1]:.3f} ms"
            facts.tell(f"{where}, {cut or 'as it is'}", f"{words} ({share[1]:.0%})")
    if None in times:
        for at, what in enumerate(("forward", "forward + backward")):
            most = None if goals is None or dtype != torch.bfloat16 else 1e3 * goals[at]
            facts.tell(f"{where}, entropy, {what}", 1e3 * times[None][at], "ms", most=most)
        best = min(times, key=lambda cut: times[cut][1])
        if len(times) > 1:
            facts.tell(
                f"{where}, the best cut", f"{best or 'as it is'}: {times[None][1] / times[best][1]:.2f} × as fast"
            )
    work = torch.empty_like(case.logits)

    def step() -> None:
        work.copy_(case.logits)
        forward, backward = method.start(work, case)
        backward(forward())

    with facts.optional(f"{where}, by kernel"):  # the profiler needs CUPTI
        for name, milliseconds in kernel_table(step, device)[:4]:
            facts.tell(f"{where}, kernel {name}", milliseconds, "ms")


def _threshold(facts: Facts, tokens: int, width: int, dtype: torch.dtype, backend: Backend, copy: float) -> None:
    """Compare top-p by two reads with the search that reads the logits for each digit: results and times."""
    device, name = "cuda" if backend == "triton" else "cpu", str(dtype).removeprefix("torch.")
    g = torch.Generator(device).manual_seed(0)
    z = (3 * torch.randn(tokens, width, generator=g, device=device)).to(dtype)
    kinds: tuple[Backend, Backend] = (backend, "eager")
    by = [VocabShard(0, width, width, truncation=Truncation(top_p=0.95), backend=kind) for kind in kinds]
    with facts.required(where := f"top-p, T {tokens}, V {width}, {name}"):
        some = z[: min(tokens, 512)]
        same = torch.equal(*(kept_floor(some, shard) for shard in by))
        facts.check(f"{where}: thresholds by both searches", same, "they differ")
        milliseconds = issue_and_total(lambda: kept_floor(z, by[0]), device)[1]
        facts.tell(
            where, f"{milliseconds:.3f} ms, {milliseconds * copy * 1e6 / z.nbytes:.1f} reads at the speed of a copy"
        )
        slower = issue_and_total(lambda: kept_floor(some, by[1]), device, 1)[1]
        facts.tell(f"{where}, a read a digit, T {len(some)}", slower, "ms")


def _cuts(tokens: int, backend: Backend) -> list[tuple[str, Cut] | None]:
    """As it is, then other cuts of one pass; programs a multiprocessor matter where the rows do not fill a card."""
    if backend != "triton":
        return [None]
    sizes = [(lanes, warps) for lanes in (256, 512, 1024) for warps in (4, 8)]
    found = [(name, Cut(*size, 32)) for name in ("stats", "gradient") for size in sizes]
    if tokens < 4096:
        found += [("stats", Cut(512, 4, programs)) for programs in (4, 8, 16)]
    return [None, *found]


def _applied(swept: tuple[str, Cut] | None) -> AbstractContextManager[object]:
    if swept is None:
        return nullcontext()
    return patch.dict(CUTS, {(swept[0], torch.cuda.get_device_capability()): swept[1]})


def _peers(facts: Facts, tokens: int, width: int, dtype: torch.dtype, backend: Backend) -> None:
    device = "cuda" if backend == "triton" else "cpu"
    case = make_case(tokens, width, dtype, device)
    with facts.optional("Megatron's groups"):
        join_megatron()
    every = methods(device, backend)
    for module, why in broken().items():
        facts.not_run(module, why)
    for method in every:
        with facts.optional(name := f"beside peers: {method.name}"):
            figures = measure([method], case, 5, device, checked=False)[method.name]
            text = f"forward {1e3 * figures.forward.median:.3f} ms, both {1e3 * figures.both.median:.3f} ms"
            facts.tell(name, f"{text}, {figures.both_bytes:.2f} bytes a logit")


def _is_h200(device: str) -> bool:
    return device == "cuda" and "H200" in torch.cuda.get_device_name()
