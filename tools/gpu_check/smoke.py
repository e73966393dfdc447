"""Stage smoke: what the machine is, and whether the numbers are right on it at all."""

from __future__ import annotations

import os
import shutil
from importlib.metadata import PackageNotFoundError, version

import torch

from benchmarks import linear, token_stats_gpu, token_stats_gpu_methods
from benchmarks.linear_case import Shape, make_case
from benchmarks.linear_methods import ours as our_heads
from benchmarks.report import copy_bandwidth, matmul_rate
from parallel_rl import token_stats
from parallel_rl.vocab.backends import choice
from parallel_rl.vocab.backends.torch_backend import compiler_works
from parallel_rl.vocab.sampling import sample_keys, sample_tokens
from parallel_rl.vocab.truncated_stats import truncated_token_stats
from tools.gpu_check.facts import Facts

PACKAGES = (
    "triton",
    "megatron-core",
    "transformer-engine",
    "liger-kernel",
    "quack-kernels",
    "cut-cross-entropy",
    "trl",
)
_TOKENS, _SEED = 200, 0


def run(facts: Facts, device: str) -> None:
    """Describe the machine, then check statistics, head, truncation and draws against float64 or the host."""
    describe(facts, device)
    for vocab in (4096, 5003):  # whole lanes, and a tail
        _statistics(facts, device, vocab)
    _head(facts, device)
    _truncated(facts, device)
    facts.tell("copy", copy_bandwidth(device, 1 << (31 if device == "cuda" else 20)), "GB/s")
    for dtype in (torch.bfloat16, torch.float32):
        rate = matmul_rate(device, dtype, None if device == "cuda" else 64)
        facts.tell(f"matrix product, {_name(dtype)}", rate, "TFLOP/s")
    with facts.required("torch.compile"):  # last: it takes as long as all kernels, and on a card little depends on it
        facts.check("torch.compile", compiler_works(device), "it does not work; the eager backend is used")


def describe(facts: Facts, device: str) -> None:
    """Versions, the card and its sizes."""
    facts.tell("torch", torch.__version__)
    for package in PACKAGES:
        try:
            facts.tell(package, version(package))
        except PackageNotFoundError:
            facts.not_run(package, "not installed")
    facts.tell("C compiler", str(os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")))
    if device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        facts.tell("card", f"{properties.name}, {torch.cuda.device_count()} of them, CUDA {torch.version.cuda}")
        facts.tell("memory", properties.total_memory / 2**30, "GiB")
        facts.tell("multiprocessors", properties.multi_processor_count)
        backend = "triton" if choice.runs_on_triton(torch.empty(1, device=device), "auto") else "torch"
        facts.check("Triton is chosen", backend == "triton", f"the backend is {backend}")


def _statistics(facts: Facts, device: str, vocab: int) -> None:
    for dtype in (torch.bfloat16, torch.float32):
        case = token_stats_gpu_methods.make_case(_TOKENS, vocab, dtype, device)
        for method in token_stats_gpu_methods.ours("auto" if device == "cuda" else "eager"):
            with facts.required(name := f"{method.name}, V {vocab}, {_name(dtype)}"):
                token_stats_gpu.check_result(method, case, torch.empty_like(case.logits))
                facts.check(name, True)


def _head(facts: Facts, device: str) -> None:
    sizes = Shape(_TOKENS, 5000, 256) if device == "cuda" else Shape(48, 96, 16)
    for dtype in (torch.bfloat16, torch.float32):
        case = make_case(sizes, dtype, device)
        for method in our_heads(1 << 20):  # a peer takes seconds to come
            with facts.required(name := f"head: {method.name}, {_name(dtype)}"):
                errors = linear.check_result(method, case)
                facts.tell(name, f"errors {', '.join(f'{error:.0e}' for error in errors)}")


def _truncated(facts: Facts, device: str) -> None:
    g = torch.Generator().manual_seed(_SEED)
    z = 3 * torch.randn(_TOKENS, 500, generator=g)
    targets, keys = z.argmax(1), sample_keys(_SEED, torch.arange(_TOKENS), torch.zeros(_TOKENS, dtype=torch.int64))
    with facts.required("top-k and top-p as on the host"):
        here, there = (
            truncated_token_stats(z.to(x), targets.to(x), top_k=50, top_p=0.9, entropy=False).logprobs.cpu()
            for x in (device, "cpu")
        )
        facts.check("top-k and top-p as on the host", bool((here - there).abs().max() < 1e-5), f"{here} and {there}")
    with facts.required("draws as on the host"):
        here, there = (sample_tokens(z.to(x), keys.to(x), top_p=0.9).cpu() for x in (device, "cpu"))
        same = (here == there).double().mean().item()
        facts.tell("draws as on the host", same, least=0.99)
    with facts.required("NaN where no loss is"):
        poisoned = z.to(device).clone()
        poisoned[::2] = torch.nan
        kept = torch.where(torch.arange(_TOKENS) % 2 == 1, targets, -100).to(device)
        stats = token_stats(poisoned.requires_grad_(), kept)
        stats.logprobs.sum().backward()
        assert poisoned.grad is not None
        facts.check("NaN where no loss is", bool(poisoned.grad.isfinite().all()), "the gradient is not finite")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
