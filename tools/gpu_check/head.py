"""Stage head: its products beside the model of them, the fused LM head's modes at several budgets, and the peers' heads."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from benchmarks import linear
from benchmarks.linear_case import Case, Shape, make_case
from benchmarks.linear_methods import Method, methods, ours
from benchmarks.linear_model import product_seconds
from benchmarks.peers import broken, join_megatron
from parallel_rl.vocab.linear.gemm import add_hidden_gradient, add_weight_gradient, project
from parallel_rl.vocab.linear.plan import budget_bytes
from tools.gpu_check.facts import Facts
from tools.gpu_check.profile import issue_and_total, kernel_table

_BUDGETS: tuple[int | None, ...] = (None, 448 << 20, 1 << 30, 4 << 30)
_CARD, _TINY = Shape(8192, 131072, 4096), Shape(48, 96, 16)
_REPEATS = 3
_ROWS = (512, 1024, 1152, 1280, 1408, 2048, 2176, 2304, 4096)  # of a chunk, where whole waves of tiles are few or many


def run(facts: Facts, device: str) -> None:
    """Time each mode at each budget, by kernel at the default one, then the peers."""
    cuda = device == "cuda"
    case = make_case(_CARD if cuda else _TINY, torch.bfloat16 if cuda else torch.float32, device, truths=False)
    facts.tell("shape", f"M {len(case.hidden)}, D {case.hidden.shape[1]}, V {len(case.weight)}, {case.hidden.dtype}")
    facts.tell("default budget", budget_bytes(None, case.hidden.device) / 2**20, "MiB")
    with facts.required("products"):
        _products(facts, case)
    for budget in _BUDGETS if cuda else (None, 1 << 14):
        for method in ours(budget):
            with facts.required(f"{method.name}, budget {budget}"):
                _time(facts, method, case, budget, cuda and "H200" in torch.cuda.get_device_name())
    for method in ours(None):
        with facts.optional(f"{method.name}, by kernel"):  # the profiler needs CUPTI
            for name, milliseconds in kernel_table(partial(linear.step, method, case), device)[:8]:
                facts.tell(f"{method.name}, kernel {name[:90]}", milliseconds, "ms")
    with facts.optional("Megatron's groups"):
        join_megatron()
    every = methods(device, None)
    for module, why in broken().items():
        facts.not_run(module, why)
    for method in [*every, Method("QuACK chunked, sum", _quack, "peer")]:
        if not method.name.startswith("ours"):
            with facts.optional(method.name):
                _time(facts, method, case, None, False)


def _products(facts: Facts, case: Case) -> None:
    """Time the three products at the rows that a plan chooses among: it counts their waves, which only a card confirms."""
    hidden, weight = case.hidden.detach(), case.weight.detach()
    (total, size), width = hidden.shape, len(weight)
    z = torch.empty(min(max(_ROWS), total), width, device=hidden.device)
    dz = (torch.randn(total, width, device=hidden.device) / width).to(hidden.dtype)
    of_hidden = torch.empty(total, size, device=hidden.device)
    for rows in sorted({min(rows, total) for rows in _ROWS}):
        each = z[:rows].nbytes + hidden[:rows].nbytes + weight.nbytes
        model = product_seconds(rows, size, width, each)
        _product(facts, f"logits of {rows} rows", partial(project, hidden[:rows], weight, z[:rows]), model)
    for rows in sorted({min(rows, total) for rows in (1024, 4096, total)}):
        part, out = dz[:rows], of_hidden[:rows]
        model = product_seconds(rows, width, size, part.nbytes + weight.nbytes + out.nbytes)
        _product(facts, f"gradient of {rows} hidden rows", partial(add_hidden_gradient, out, part, weight, True), model)
    out = torch.empty_like(weight)
    model = product_seconds(width, total, size, dz.nbytes + hidden.nbytes + out.nbytes)
    of_weight = partial(add_weight_gradient, out, dz, hidden, True)
    _product(facts, f"gradient of the weight from {total} rows", of_weight, model)


def _product(facts: Facts, name: str, call: Callable[[], object], model: float) -> None:
    milliseconds = issue_and_total(call, "cuda" if torch.cuda.is_available() else "cpu")[1]
    facts.tell(f"product: {name}", f"{milliseconds:.3f} ms, an H200's by the model {1e3 * model:.3f}")


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
