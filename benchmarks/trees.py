"""A training step on a prefix tree's row beside the same step on the packed flat row: a small GPTModel with a GRPO loss.

Groups of answers to one prompt, in one process with one thread. Saved time is held against saved FLOPs, not tokens.
`python -m benchmarks.trees --help`.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch
from rich.table import Table
from torch import Tensor

from benchmarks.common import CpuClock, keep_freed_memory, peak_bytes, return_freed_memory, run_ranks, short_collections
from benchmarks.losses_case import GRPO, make_data
from benchmarks.report import add_report_options, report
from parallel_rl import PolicyLossFn
from parallel_rl import megatron as M
from parallel_rl.losses.core.base import LossFn

REACHED = 0.9  # of the FLOPs' ratio, by the times'
NOTHING_SHARED = 0.98  # flat time over tree time where sequences share nothing
BUILD = 0.005  # seconds to build a tree's micro-batch, per 1,000 flat tokens
MAX_ERROR = 1e-4  # relative, of the loss and of all gradients together (float32)


class Case(NamedTuple):
    """A group: answers to one prompt, and the tokens of each."""

    answers: int
    prompt: int
    answer: int

    @property
    def name(self) -> str:
        return f"{self.answers} answers, {self.prompt} : {self.answer}"

    @property
    def tokens(self) -> tuple[int, int]:
        """Tokens of the flat row and of the tree's."""
        return self.answers * (self.prompt + self.answer), self.prompt + self.answers * self.answer

    @property
    def pairs(self) -> tuple[float, float]:
        """Query-key pairs of one layer's attention, flat and tree."""
        n, p, a = self
        return n * (p + a) ** 2 / 2, p**2 / 2 + n * a * (p + a / 2)


class Sizes(NamedTuple):
    """Sizes of the model."""

    layers: int
    hidden: int
    heads: int
    vocab: int


@dataclass(frozen=True)
class Figures:
    """Median CPU-seconds and peak bytes of a step, (flat, tree); seconds to make the tree's micro-batch; flat over tree."""

    tokens: tuple[int, int]
    seconds: tuple[float, float]
    bytes: tuple[int, int]
    build: float
    time_ratio: float
    flops_ratio: float


def group_data(case: Case, vocab: int) -> tuple[dict[str, Tensor], Tensor]:
    """Fields [B, S] whose rows share the prompt alone, and the lengths."""
    width = case.prompt + case.answer
    data = make_data(case.answers * width, vocab, case.answers)
    ids = data["input_ids"]
    ids[:, : case.prompt] = ids[0, : case.prompt]
    ids[:, case.prompt] = torch.arange(case.answers)  # answers part at once
    data["token_mask"][:] = torch.arange(width) >= case.prompt
    return data, torch.full((case.answers,), width)


def measure(rank: int, cases: list[Case], sizes: Sizes, repeats: int) -> list[Figures]:
    """Measure every case, once both rows give the same loss and gradients: memory first, then time."""
    warnings.simplefilter("ignore")
    M.initialize()
    config = M.build_config(
        num_layers=sizes.layers, hidden_size=sizes.hidden, num_attention_heads=sizes.heads, dtype=torch.float32
    )
    model = M.wrap_model(M.build_model(config, sizes.vocab, max(case.prompt + case.answer for case in cases)))
    weights = sum(p.numel() for name, p in model.named_parameters() if p.dim() == 2 and "embedding" not in name)
    loss_fn = PolicyLossFn(GRPO, vocab_size=sizes.vocab)

    def steps(case: Case) -> tuple[list[Callable[[], float]], float]:
        data, lengths = group_data(case, sizes.vocab)
        flat = M.packed_batch(data, lengths)
        clock = CpuClock()
        tree = M.tree_batch(data, lengths)
        return [lambda batch=batch: _step(model, loss_fn, batch) for batch in (flat, tree)], clock()

    return_freed_memory()
    memory = []
    for case in cases:
        (flat, tree), _ = steps(case)
        _check(model, flat, tree, case)
        memory.append((peak_bytes(flat, "cpu"), peak_bytes(tree, "cpu")))
    keep_freed_memory()
    found = []
    for case, peaks in zip(cases, memory, strict=True):
        both, build = steps(case)
        times: tuple[list[float], list[float]] = [], []
        with short_collections():
            for step in both:
                step()
            for _ in range(repeats):
                for step, spent in zip(both, times, strict=True):
                    clock = CpuClock()
                    step()
                    spent.append(clock())
        flat, tree = map(statistics.median, times)
        of_flat, of_tree = (  # FLOPs of a forward; a backward takes twice as many
            2.0 * weights * tokens + 4.0 * sizes.layers * sizes.hidden * pairs
            for tokens, pairs in zip(case.tokens, case.pairs, strict=True)
        )
        found.append(Figures(case.tokens, (flat, tree), peaks, build, flat / tree, of_flat / of_tree))
    return found


def _step(model: Any, loss_fn: LossFn, batch: M.MicroBatch) -> float:
    model.zero_grad_buffer()
    return M.forward_backward(model, loss_fn, [batch]).floats()["loss"]


def _check(model: Any, flat: Callable[[], float], tree: Callable[[], float], case: Case) -> None:
    """Raise RuntimeError where the tree's row gives another loss or gradient than the flat row."""
    found = []
    for step in (flat, tree):
        loss = step()
        gradients = torch.cat([M.gradient(p).flatten().double() for _, p in M.global_parameters([model])])
        found.append((loss, gradients))
    (want, right), (loss, got) = found
    apart = max(abs(loss - want) / max(abs(want), 1e-2), float((got - right).norm() / right.norm()))
    if not apart <= MAX_ERROR:
        raise RuntimeError(f"{case.name}: loss or gradients of the tree are off by {apart:.1e}")


def missed(results: dict[Case, Figures]) -> list[str]:
    """The figures that were not met."""
    lines = []
    for case, one in results.items():
        least = REACHED * one.flops_ratio if case.prompt else NOTHING_SHARED
        if one.time_ratio < least:
            lines.append(f"{case.name}: flat time is {one.time_ratio:.2f} x the tree's; {least:.2f} is the figure")
        limit = BUILD * one.tokens[0] / 1000
        if one.build > limit:
            lines.append(f"{case.name}: {1e3 * one.build:.0f} ms to build the tree; {1e3 * limit:.0f} is the figure")
    return lines


def table(results: dict[Case, Figures]) -> Table:
    made = Table("prompt : answer", title="a step on the flat packed row / on the tree's row")
    for heading in ("tokens", "CPU-seconds", "peak MB", "build, ms", "time ratio", "FLOPs ratio", "reached"):
        made.add_column(heading, justify="right")
    for case, one in results.items():
        of_rows = zip(one.tokens, one.seconds, (x / 1e6 for x in one.bytes), strict=True)
        texts = [(f"{tokens}", f"{seconds:.3f}", f"{peak:.0f}") for tokens, seconds, peak in of_rows]
        cells = [" / ".join(parts) for parts in zip(*texts, strict=True)]
        ratios = one.time_ratio, one.flops_ratio, one.time_ratio / one.flops_ratio
        made.add_row(case.name, *cells, f"{1e3 * one.build:.0f}", *(f"{ratio:.2f}" for ratio in ratios))
    return made


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.trees", description=__doc__)
    parser.add_argument("--answers", type=int, nargs="+", default=[8, 16], help="of a group")
    parser.add_argument("--unit", type=int, default=128, help="tokens: prompts and answers are 4:1, 2:2 and 1:4 of it")
    for name, size in (("layers", 4), ("hidden", 256), ("heads", 8), ("vocab", 4096), ("repeats", 5)):
        parser.add_argument(f"--{name}", type=int, default=size)
    add_report_options(parser, growth=False)
    options = parser.parse_args(arguments)
    sizes = Sizes(options.layers, options.hidden, options.heads, options.vocab)
    if min(*options.answers, options.unit, *sizes, options.repeats) < 1 or options.vocab < max(options.answers):
        parser.error("sizes must be positive, and --vocab must hold a first token for each answer")
    cases = [Case(n, p * options.unit, a * options.unit) for n in options.answers for p, a in ((4, 1), (2, 2), (1, 4))]
    cases.append(Case(options.answers[0], 0, 4 * options.unit))
    [figures] = run_ranks(1, measure, cases, sizes, options.repeats, timeout=3600.0)
    results = dict(zip(cases, figures, strict=True))
    numbers = {case.name: asdict(one) for case, one in results.items()}
    bars = {"flat time / tree time": {case.name: one.time_ratio for case, one in results.items()}}
    return report(options, sizes._asdict(), [table(results)], numbers, missed(results), bars)


if __name__ == "__main__":
    sys.exit(main())
