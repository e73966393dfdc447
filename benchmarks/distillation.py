"""Distillation from hidden states, forward + backward: ours beside whole logits and Liger's fused JSD.

Every method gets the same hidden states and heads, the teacher's of another width, and computes the mean JSD (β 0.5) of the
rows that predict a token; it is checked against float64 before it is timed. Memory is the peak beyond the inputs and the two
gradients of the student's. `python -m benchmarks.distillation --help`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import cache, partial
from importlib.util import find_spec
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.common import return_freed_memory, run_ranks
from benchmarks.linear import Figures, best_peer, measure_case, table
from benchmarks.linear_case import Case, Objective, Part, Truth
from benchmarks.linear_methods import Method
from benchmarks.report import add_report_options, matmul_rate, report
from parallel_rl import FullDistillationLossFn, LMHeadInput, count_valid
from parallel_rl.vocab.linear.plan import LinearMode

MEMORY = 1 / 5  # of the lowest-memory method with whole logits
TIME = 1.2  # of the fastest method with whole logits
BETA = 0.5
LIGER = "Liger fused linear JSD"


class Shape(NamedTuple):
    """Sizes of the whole problem."""

    tokens: int
    vocab: int
    hidden: int
    teacher: int  # hidden size


def plain_jsd(student: Tensor, teacher: Tensor) -> Tensor:
    """The mean JSD of rows [T, V] as one would write it."""
    log_q, log_p = student.float().log_softmax(-1), teacher.float().log_softmax(-1)
    log_m = ((log_p.exp() + log_q.exp()) / 2).log()
    of_teacher = torch.nn.functional.kl_div(log_m, log_p, reduction="sum", log_target=True)
    return (of_teacher + torch.nn.functional.kl_div(log_m, log_q, reduction="sum", log_target=True)) / 2 / len(student)


@cache
def compiled_jsd() -> Callable[[Tensor, Tensor], Tensor]:
    """Compile it, not at import: the compiler takes two seconds to come."""
    return torch.compile(plain_jsd)


def _ours(hidden: Tensor, weight: Tensor, case: Case, mode: LinearMode, budget: int | None) -> Tensor:
    data = {
        **case.data,
        "teacher_logits": LMHeadInput(case.data["teacher_hidden"][None], case.data["teacher_weight"]),
    }
    head = LMHeadInput(hidden[None], weight, mode=mode, budget=budget)
    return _loss_fn(False)(head, data, *count_valid([case.data]))[0]


def _our_logits(hidden: Tensor, weight: Tensor, case: Case) -> Tensor:
    logits = (hidden @ weight.T)[None]
    data = {**case.data, "teacher_logits": (case.data["teacher_hidden"] @ case.data["teacher_weight"].T)[None]}
    return _loss_fn(True)(logits, data, *count_valid([case.data]))[0]


def _loss_fn(consume: bool) -> FullDistillationLossFn:
    return FullDistillationLossFn({"divergence": {"name": "jsd", "beta": BETA}}, consume_logits=consume)


def _plain(hidden: Tensor, weight: Tensor, case: Case, compiled: bool) -> Tensor:
    teacher = case.data["teacher_hidden"][:-1] @ case.data["teacher_weight"].T
    return (compiled_jsd() if compiled else plain_jsd)(hidden[:-1] @ weight.T, teacher)


def _liger(hidden: Tensor, weight: Tensor, case: Case) -> Tensor:
    from liger_kernel.chunked_loss import LigerFusedLinearJSDLoss

    loss_fn = LigerFusedLinearJSDLoss(weight_hard_loss=0.0, weight_soft_loss=1.0, beta=BETA)
    of_teacher = case.data["teacher_hidden"][:-1], case.data["teacher_weight"]
    return loss_fn(hidden[:-1], weight, *of_teacher, case.targets[:-1])


def jsd(logprobs: Tensor, case: Case) -> Tensor:
    """Stand-in for the objective in `Case.truths`, which needs more than log-probs."""
    raise NotImplementedError


def methods(budget: int | None) -> list[Method]:
    """Ours, those with whole logits, and Liger's where it is installed."""
    found = [
        Method("ours, in_forward", partial(_ours, mode="in_forward", budget=budget), "in_forward", jsd),
        Method("ours, recompute", partial(_ours, mode="recompute", budget=budget), "information", jsd),
        Method("whole logits + our loss, in place", _our_logits, "peer", jsd),
        Method("whole logits + plain PyTorch", partial(_plain, compiled=False), "peer", jsd),
        Method("whole logits + compiled PyTorch", partial(_plain, compiled=True), "peer", jsd),
    ]
    if find_spec("liger_kernel") is not None:
        found.append(Method(LIGER, _liger, "information", jsd, low_precision=True))
    return found


def make_case(shape: Shape, dtype: torch.dtype, device: str) -> Case:
    """Make one case, the same on every call: row t of the one sequence predicts column t + 1, the last predicts none."""
    tokens, vocab, size, wide = shape
    g = torch.Generator().manual_seed(0)
    hidden, teacher_hidden = (torch.randn(tokens, n, generator=g).to(dtype).to(device) for n in (size, wide))
    weight, teacher_weight = (
        (torch.randn(vocab, n, generator=g) * 2 / n**0.5).to(dtype).to(device) for n in (size, wide)
    )
    targets = torch.randint(vocab, (tokens,), generator=g).to(device)
    data = {"input_ids": targets.roll(1)[None], "token_mask": torch.ones(1, tokens, device=device)}
    data |= {"sample_mask": torch.ones(1, device=device)}
    data |= {"teacher_hidden": teacher_hidden, "teacher_weight": teacher_weight}
    case = Case(hidden, weight, targets, hidden.new_zeros(tokens), data, {}, Part())
    case.truths[jsd] = _truth(case)
    return case


def _truth(case: Case) -> Truth:
    """In float64, a few rows at a time."""
    weight, teacher_weight = case.weight.double(), case.data["teacher_weight"].double()
    total, of_weight, of_hidden, rows = 0.0, torch.zeros_like(weight), [], len(case.hidden) - 1
    parts = zip(case.hidden[:-1].split(256), case.data["teacher_hidden"][:-1].split(256), strict=True)
    for h, t in parts:
        z = (h.double() @ weight.T).requires_grad_()
        q, p = z.log_softmax(-1), (t.double() @ teacher_weight.T).log_softmax(-1)
        m = torch.logaddexp(p, q) - torch.log(torch.tensor(2.0, dtype=torch.float64))
        value = (p.exp() * (p - m) + q.exp() * (q - m)).sum() / 2 / rows
        (dz,) = torch.autograd.grad(value, z)
        total += value.item()
        of_hidden.append(dz @ weight)
        of_weight += dz.T @ h.double()
    loss = torch.tensor(total, dtype=torch.float64, device=weight.device)
    return Truth(loss, loss, torch.cat([*of_hidden, of_weight.new_zeros(1, weight.shape[1])]), of_weight)


def measure(
    rank: int, shape: Shape, dtype: torch.dtype, repeats: int, budget: int | None, device: str
) -> tuple[dict[str, Figures], float]:
    """Measure every method, and the TFLOP/s of a matrix product."""
    if device == "cpu":
        return_freed_memory()
    chosen, case = methods(budget), make_case(shape, dtype, device)
    return measure_case(chosen, case, repeats, device), matmul_rate(device, dtype)


def missed(results: dict[str, Figures], chosen: Sequence[Method], objective: Objective = jsd) -> list[str]:
    """List the missed targets."""
    least_time, least_bytes = best_peer(results, chosen, objective)
    lines = []
    for m in chosen:
        if m.kind != "in_forward":
            continue
        time_ratio, memory_ratio = (
            results[m.name].seconds.least / least_time,
            results[m.name].bytes / least_bytes,
        )
        if time_ratio > TIME:
            lines.append(f"{m.name} takes {time_ratio:.2f} x the time of the fastest with whole logits, over {TIME}")
        if memory_ratio > MEMORY:
            lines.append(f"{m.name} takes {memory_ratio:.2f} x the memory of the lowest, over {MEMORY}")
    return lines


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.distillation", description=__doc__)
    parser.add_argument("--tokens", type=int, help="default: 2048, on a GPU 8192")
    parser.add_argument("--vocab", type=int, help="default: 32768, on a GPU 131072")
    parser.add_argument("--hidden", type=int, help="of the student; default: 512, on a GPU 4096")
    parser.add_argument("--teacher", type=int, help="the teacher's hidden size; default: twice the student's")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="default: float32, on a GPU bfloat16")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--budget", type=int, help="bytes; default: 1/6 of the float32 logits of both")
    parser.add_argument("--repeats", type=int, default=5)
    add_report_options(parser, growth=False)
    options = parser.parse_args(arguments)
    gpu = options.device == "cuda"
    size = options.hidden or (4096 if gpu else 512)
    shape = Shape(
        options.tokens or (8192 if gpu else 2048),
        options.vocab or (131072 if gpu else 32768),
        size,
        options.teacher or 2 * size,
    )
    if min(*shape, options.repeats) < 1 or (options.budget is not None and options.budget < 1):
        parser.error("sizes must be positive")
    name = options.dtype or ("bfloat16" if gpu else "float32")
    budget = options.budget or max(2 * shape.tokens * shape.vocab * 4 // 6, 1 << 16)
    arguments_ = shape, getattr(torch, name), options.repeats, budget, options.device
    [(results, rate)] = run_ranks(1, measure, *arguments_, timeout=3600.0)
    chosen = [m for m in methods(budget) if m.name in results]
    if find_spec("liger_kernel") is None:
        print(f"not run: {LIGER}: liger-kernel is not installed (pip install -r benchmarks/peers.txt)")
    clock = "seconds" if gpu else "CPU-seconds, one thread"
    flops = shape.tokens * shape.vocab * (6 * shape.hidden + 2 * shape.teacher) // 6
    title = f"JSD from hidden states, forward + backward: {clock}, least (median)"
    bars = {
        clock: {m.name: results[m.name].seconds.least for m in chosen},
        "MB beyond inputs and gradients": {m.name: results[m.name].bytes / 1e6 for m in chosen},
    }
    sizes = {"T": shape.tokens, "V": shape.vocab, "D": shape.hidden, "teacher's D": shape.teacher}
    sizes |= {"dtype": name, "budget": budget, "device": options.device}
    return report(
        options,
        sizes,
        [table(results, chosen, jsd, title, flops)],
        {name: asdict(row) for name, row in results.items()},
        missed(results, chosen),
        bars,
        ceilings={"matmul TFLOP/s": rate},
    )


if __name__ == "__main__":
    sys.exit(main())
