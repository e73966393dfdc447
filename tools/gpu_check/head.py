"""Stage head: the fused LM head's modes at several budgets, where their time goes, and the peers' heads."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from benchmarks import linear
from benchmarks.linear_case import Case, Shape, make_case
from benchmarks.linear_methods import Method, methods
from benchmarks.peers import join_megatron
from parallel_rl.vocab.linear.plan import budget_bytes
from tools.gpu_check.facts import Facts
from tools.gpu_check.profile import kernel_table

_BUDGETS: tuple[int | None, ...] = (None, 448 << 20, 1 << 30, 4 << 30)
_CARD, _TINY = Shape(8192, 131072, 4096), Shape(48, 96, 16)
_REPEATS = 3


def run(facts: Facts, device: str) -> None:
    """Time each mode at each budget, by kernel at the default one, then the peers."""
    cuda = device == "cuda"
    case = make_case(_CARD if cuda else _TINY, torch.bfloat16 if cuda else torch.float32, device, truths=False)
    facts.tell("shape", f"M {len(case.hidden)}, D {case.hidden.shape[1]}, V {len(case.weight)}, {case.hidden.dtype}")
    facts.tell("default budget", budget_bytes(None, case.hidden.device) / 2**20, "MiB")
    for budget in _BUDGETS if cuda else (None, 1 << 14):
        for method in methods(device, budget):
            if method.name.startswith("ours"):
                _time(facts, method, case, budget, cuda and "H200" in torch.cuda.get_device_name())
    for method in methods(device, None):
        if method.name.startswith("ours"):
            for name, milliseconds in kernel_table(partial(linear.step, method, case), device)[:8]:
                facts.tell(f"{method.name}, kernel {name[:90]}", milliseconds, "ms")
    with facts.optional("Megatron's groups"):
        join_megatron()
    for method in [*methods(device, None), Method("QuACK chunked, sum", _quack, "peer")]:
        if not method.name.startswith("ours"):
            with facts.optional(method.name):
                _time(facts, method, case, None, False)


def _time(facts: Facts, method: Method, case: Case, budget: int | None, is_h200: bool) -> None:
    mode = method.name.removeprefix("ours, ")
    at_default = is_h200 and budget is None
    where = method.name if budget is None else f"{method.name}, budget {budget / 2**20:.4g} MiB"
    linear.time_once(method, case)
    seconds = min(linear.time_once(method, case) for _ in range(_REPEATS))
    most = linear.GPU_SECONDS.get(mode) if at_default else None
    facts.tell(where, 1e3 * seconds, "ms", most=None if most is None else 1e3 * most)
    if case.hidden.is_cuda:
        held = linear.measure_memory(method, case, passes=1)
        facts.tell(
            f"{where}, memory",
            held / 1e9,
            "GB",
            most=linear.GPU_BYTES.get(mode, 0) / 1e9 or None if at_default else None,
        )


def _quack(hidden: Tensor, weight: Tensor, case: Case) -> Tensor:
    """It has a mean or a sum alone, no weight per token."""
    from quack.linear_cross_entropy import chunked_linear_cross_entropy

    loss: Tensor = chunked_linear_cross_entropy(hidden, weight, case.targets, reduction="sum")
    return loss
