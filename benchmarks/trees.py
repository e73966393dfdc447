"""A training step on a prefix tree's row beside the same step on the packed flat row: a small GPTModel with a GRPO loss.

Groups of answers to one prompt, and an agent's tree, in one process with one thread. Flat and tree steps alternate, and their
CPU time counts. Saved time is held against saved FLOPs, not tokens.
`python -m benchmarks.trees --help`.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch
from rich.table import Table
from torch import Tensor

from benchmarks.common import CpuClock, keep_freed_memory, peak_bytes, return_freed_memory, run_ranks, short_collections
from benchmarks.losses_case import GRPO, make_data
from benchmarks.report import add_report_options, report
from parallel_rl import PolicyLossFn, PrefixTreeLossWrapper, SequencePackingLossWrapper, count_valid
from parallel_rl import megatron as M
from parallel_rl.losses.core.base import LossFn
from parallel_rl.losses.core.call import LossWrapper

REACHED = 0.9  # of the FLOPs' ratio, by the times'
NOTHING_SHARED = 0.98  # flat time over tree time where sequences share nothing
BUILD = 0.005  # seconds to build a tree's micro-batch, per 1,000 flat tokens
MAX_ERROR = 1e-4  # relative, of the loss and of all gradients together (float32)


class Case(NamedTuple):
    """A prompt, and behind it `depth` − 1 levels of segments, at each of which every branch parts into `answers`."""

    answers: int
    prompt: int
    answer: int
    depth: int = 2

    @property
    def name(self) -> str:
        agent = "" if self.depth == 2 else f", depth {self.depth}"
        return f"{self.answers} answers{agent}, {self.prompt} : {self.answer}"

    @property
    def sequences(self) -> int:
        return int(self.answers ** (self.depth - 1))

    @property
    def length(self) -> int:
        return self.prompt + (self.depth - 1) * self.answer

    @property
    def tokens(self) -> tuple[int, int]:
        """Tokens of the flat row and of the tree's."""
        segments = sum(self.answers**level for level in range(1, self.depth))
        return self.sequences * self.length, self.prompt + segments * self.answer

    @property
    def pairs(self) -> tuple[float, float]:
        """Query-key pairs of one layer's attention, flat and tree."""
        n, p, a, depth = self
        levels = sum(n**level * a * (p + (level - 1) * a + a / 2) for level in range(1, depth))
        return self.sequences * self.length**2 / 2, p**2 / 2 + levels


class Sizes(NamedTuple):
    """Sizes of the model."""

    layers: int
    hidden: int
    heads: int
    vocab: int


@dataclass(frozen=True)
class Figures:
    """Median CPU-seconds and peak bytes of a step, (flat, tree); seconds to make the tree's micro-batch; flat over tree.

    `head` and `loss` are parts of the step's seconds, `time_ratio` is the median of the alternated runs.
    """

    tokens: tuple[int, int]
    seconds: tuple[float, float]
    head: tuple[float, float]
    loss: tuple[float, float]
    bytes: tuple[int, int]
    build: float
    time_ratio: float
    flops_ratio: float


class _Row(NamedTuple):
    """The work on a row: a step, its head alone and its loss alone."""

    step: Callable[[], object]
    head: Callable[[], object]
    loss: Callable[[], object]


def group_data(case: Case, vocab: int) -> tuple[dict[str, Tensor], Tensor]:
    """Fields [B, S] whose rows share the segments of their common branches, and the lengths."""
    data = make_data(case.sequences * case.length, vocab, case.sequences)
    ids, sequence = data["input_ids"], torch.arange(case.sequences)
    ids[:, : case.prompt] = ids[0, : case.prompt]
    for level in range(1, case.depth):
        below = case.answers ** (case.depth - 1 - level)
        first = case.prompt + (level - 1) * case.answer
        ids[:, first : first + case.answer] = ids[sequence // below * below, first : first + case.answer]
        ids[:, first] = sequence // below % case.answers  # branches part at once
    data["token_mask"][:] = torch.arange(case.length) >= case.prompt
    return data, torch.full((case.sequences,), case.length)


def measure(rank: int, cases: list[Case], sizes: Sizes, repeats: int) -> list[Figures]:
    """Measure every case, once both rows give the same loss and gradients: memory first, then time."""
    warnings.simplefilter("ignore")
    M.initialize()
    config = M.build_config(
        num_layers=sizes.layers, hidden_size=sizes.hidden, num_attention_heads=sizes.heads, dtype=torch.float32
    )
    model = M.wrap_model(M.build_model(config, sizes.vocab, max(case.length for case in cases)))
    weights = sum(p.numel() for name, p in model.named_parameters() if p.dim() == 2 and "embedding" not in name)
    loss_fn = PolicyLossFn(GRPO, vocab_size=sizes.vocab)

    def rows(case: Case) -> tuple[list[_Row], float]:
        data, lengths = group_data(case, sizes.vocab)
        flat = M.packed_batch(data, lengths)
        clock = CpuClock()
        tree = M.tree_batch(data, lengths)
        build = clock()
        assert flat.packed is not None and tree.input.tree is not None
        losses = (
            SequencePackingLossWrapper(loss_fn, flat.packed.cu_seqlens),
            PrefixTreeLossWrapper(loss_fn, tree.input.tree),
        )
        return [_row(model, loss_fn, *both, sizes) for both in zip((flat, tree), losses, strict=True)], build

    return_freed_memory()
    memory = []
    for case in cases:
        (flat, tree), _ = rows(case)
        _check(model, flat.step, tree.step, case)
        memory.append((peak_bytes(flat.step, "cpu"), peak_bytes(tree.step, "cpu")))
    keep_freed_memory()
    found = []
    for case, peaks in zip(cases, memory, strict=True):
        both, build = rows(case)
        with short_collections():
            times = {part: _alternated([getattr(row, part) for row in both], repeats) for part in _Row._fields}
        of_flat, of_tree = (  # FLOPs of a forward; a backward takes twice as many
            2.0 * weights * tokens + 4.0 * sizes.layers * sizes.hidden * pairs
            for tokens, pairs in zip(case.tokens, case.pairs, strict=True)
        )
        medians = {part: tuple(map(statistics.median, zip(*pairs, strict=True))) for part, pairs in times.items()}
        ratio = statistics.median(flat / tree for flat, tree in times["step"])
        of_parts = medians["step"], medians["head"], medians["loss"]
        found.append(Figures(case.tokens, *of_parts, peaks, build, ratio, of_flat / of_tree))
    return found


def _alternated(both: Sequence[Callable[[], object]], repeats: int) -> list[tuple[float, float]]:
    """CPU-seconds (flat, tree) of each run, flat and tree in turns."""
    for call in both:
        call()
    runs = []
    for _ in range(repeats):
        spent = []
        for call in both:
            clock = CpuClock()
            call()
            spent.append(clock())
        runs.append((spent[0], spent[1]))
    return runs


def _row(model: Any, loss_fn: LossFn, batch: M.MicroBatch, wrapped: LossWrapper, sizes: Sizes) -> _Row:
    """Make the work on a row; head and loss read random tensors of the step's shapes."""
    tokens = batch.input.tokens.numel()
    logits = torch.randn(1, tokens, sizes.vocab, requires_grad=True)
    hidden = torch.randn(tokens, sizes.hidden, requires_grad=True)
    weight = torch.randn(sizes.vocab, sizes.hidden, requires_grad=True)

    def head() -> None:
        torch.autograd.grad(hidden @ weight.t(), (hidden, weight), logits.detach()[0])

    def loss() -> None:
        torch.autograd.grad(wrapped(logits, batch.data, *count_valid(batch.data))[0], logits)

    return _Row(lambda: _step(model, loss_fn, batch), head, loss)


def _step(model: Any, loss_fn: LossFn, batch: M.MicroBatch) -> float:
    model.zero_grad_buffer()
    return M.forward_backward(model, loss_fn, [batch]).floats()["loss"]


def _check(model: Any, flat: Callable[[], Any], tree: Callable[[], Any], case: Case) -> None:
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
    """List the missed figures."""
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
    made = Table("prompt : answer", title="a step on the flat packed row / on the tree's row; times are of the CPU")
    for heading in (
        "tokens",
        "step, s",
        "head, ms",
        "loss, ms",
        "peak MB",
        "build, ms",
        "time ratio",
        "FLOPs ratio",
        "reached",
    ):
        made.add_column(heading, justify="right")
    for case, one in results.items():
        columns = (
            ("{}", one.tokens, 1), ("{:.3f}", one.seconds, 1), ("{:.0f}", one.head, 1e3), ("{:.0f}", one.loss, 1e3),
            ("{:.0f}", one.bytes, 1e-6),
        )  # fmt: skip
        cells = [" / ".join(form.format(scale * x) for x in both) for form, both, scale in columns]
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
    segment = -(-options.unit // 4)
    cases += [Case(2, 4 * segment, segment, depth=6), Case(options.answers[0], 0, 4 * options.unit)]
    [figures] = run_ranks(1, measure, cases, sizes, options.repeats, timeout=3600.0)
    results = dict(zip(cases, figures, strict=True))
    numbers = {case.name: asdict(one) for case, one in results.items()}
    bars = {"flat time / tree time": {case.name: one.time_ratio for case, one in results.items()}}
    return report(options, sizes._asdict(), [table(results)], numbers, missed(results), bars)


if __name__ == "__main__":
    sys.exit(main())
