"""Cost of the packed policy loss, forward and backward, for 1, 16 and 256 sequences of the same total length.

One process and a small vocabulary, so that the loss's own work shows rather than the softmax's. Beside the time it
counts the operators that PyTorch dispatches: they must not grow with the number of sequences.
`python -m benchmarks.packing --help`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.common import CpuClock, Seconds, machine, short_collections, verdict, write_json
from parallel_rl import ClippedPGLossFn, SequencePackingLossWrapper, count_valid

SEQUENCES = (1, 16, 256)
MAX_RATIO = 1.3  # CPU time of a packed row, over that of one sequence of its length
CALLS = 5  # in one measurement: a call takes milliseconds
MAX_ERROR = 1e-5  # relative, of the packed loss and gradient against the padded ones (float32)
CONFIGS: dict[str, dict] = {
    "token": {"use_importance_sampling_correction": True},
    "sequence": {
        "sequence_level_importance_ratios": True,
        "token_level_loss": False,
        "use_importance_sampling_correction": True,
    },
}


@dataclass(frozen=True)
class Figures:
    """Of one number of sequences."""

    sequences: int
    seconds: Seconds  # of one call and its backward
    operators: int


class _CountOperators(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.count += 1
        return func(*args, **(kwargs or {}))


def make_data(tokens: int, vocab: int, sequences: int) -> dict[str, Tensor]:
    """[B, S] fields of B sequences with S = tokens / B, every fourth token masked."""
    generator = torch.Generator().manual_seed(0)
    shape = sequences, tokens // sequences

    def noise() -> Tensor:
        return torch.randn(shape, generator=generator)

    policy = -4 + noise()
    return {
        "input_ids": torch.randint(vocab, shape, generator=generator),
        "token_mask": (torch.arange(tokens).view(shape) % 4 != 0).long(),
        "sample_mask": torch.ones(sequences),
        "advantages": noise(),
        "prev_logprobs": policy,
        "generation_logprobs": policy + 0.05 * noise(),
        "reference_policy_logprobs": policy + 0.05 * noise(),
    }


def make_call(
    config: dict, data: dict[str, Tensor], vocab: int, packed: bool = True
) -> Callable[[], tuple[Tensor, Tensor]]:
    """A call that gives (loss, gradient), from `cu_seqlens` on: what a training step does for one packed row."""
    rows, width = data["input_ids"].shape
    logits = torch.randn(rows, width, vocab, generator=torch.Generator().manual_seed(1))
    logits = (logits.view(1, rows * width, vocab) if packed else logits).requires_grad_()
    counts = count_valid([data])
    loss_fn = ClippedPGLossFn(config)
    bounds = torch.arange(rows + 1, dtype=torch.int32) * width

    def call() -> tuple[Tensor, Tensor]:
        function = SequencePackingLossWrapper(loss_fn, bounds) if packed else loss_fn
        loss, _ = function(logits, data, *counts)
        (gradient,) = torch.autograd.grad(loss, logits)
        return loss.detach(), gradient

    return call


def check_result(config: dict, data: dict[str, Tensor], vocab: int) -> None:
    """The packed numbers against the padded ones.

    Raises:
        RuntimeError: they differ, so that the time says nothing.
    """
    loss, gradient = make_call(config, data, vocab)()
    padded_loss, padded_gradient = make_call(config, data, vocab, packed=False)()
    difference = (gradient.view_as(padded_gradient) - padded_gradient).norm() / padded_gradient.norm()
    if not max(difference.item(), (loss / padded_loss - 1).abs().item()) <= MAX_ERROR:
        raise RuntimeError(f"packed and padded differ: {loss} and {padded_loss}, gradients by {difference:.1e}")


def measure(config: dict, tokens: int, vocab: int, repeats: int) -> list[Figures]:
    """Every number of sequences; repeats are interleaved, so that a busy moment hits all alike."""
    calls, operators = [], []
    for sequences in SEQUENCES:
        data = make_data(tokens, vocab, sequences)
        check_result(config, data, vocab)
        calls.append(make_call(config, data, vocab))
        with _CountOperators() as counter:
            calls[-1]()
        operators.append(counter.count)
    times: list[list[float]] = [[] for _ in SEQUENCES]
    with short_collections():
        for _ in range(repeats):
            for call, measured in zip(calls, times, strict=True):
                clock = CpuClock()
                for _ in range(CALLS):
                    call()
                measured.append(clock() / CALLS)
    return [Figures(*x) for x in zip(SEQUENCES, map(Seconds.of, times), operators, strict=True)]


def missed(results: dict[str, list[Figures]]) -> list[str]:
    """The figures that were not met."""
    lines = []
    for name, rows in results.items():
        for row in rows[1:]:
            ratio = row.seconds.least / rows[0].seconds.least
            if ratio > MAX_RATIO:
                lines.append(f"{name}: {row.sequences} sequences take {ratio:.2f} x the time of one, over {MAX_RATIO}")
            if row.operators > rows[0].operators:
                lines.append(
                    f"{name}: {row.sequences} sequences take {row.operators} operators, one {rows[0].operators}"
                )
    return lines


def table(results: dict[str, list[Figures]]) -> Table:
    made = Table(
        "importance ratios", title="packed ClippedPGLossFn, forward + backward: CPU-milliseconds, least (median)"
    )
    for column in ("sequences", "ms", "÷ one sequence", "operators"):
        made.add_column(column, justify="right")
    for name, rows in results.items():
        for row in rows:
            made.add_row(
                name,
                str(row.sequences),
                f"{1e3 * row.seconds.least:.2f} ({1e3 * row.seconds.median:.2f})",
                f"{row.seconds.least / rows[0].seconds.least:.2f}",
                str(row.operators),
            )
    return made


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.packing", description=__doc__)
    parser.add_argument("--tokens", type=int, default=8192, help="total length, a multiple of 256")
    parser.add_argument("--vocab", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=40)
    parser.add_argument("--json", metavar="FILE", help="write the figures here")
    parser.add_argument("--check", action="store_true", help="exit with 1 where a figure is missed")
    options = parser.parse_args(arguments)
    if min(options.tokens, options.vocab, options.repeats) < 1 or options.tokens % max(SEQUENCES):
        parser.error(f"sizes must be positive, and --tokens must divide by {max(SEQUENCES)}")
    torch.set_num_threads(1)
    results = {
        name: measure(config, options.tokens, options.vocab, options.repeats) for name, config in CONFIGS.items()
    }
    description = machine()
    console = Console(width=max(120, Console().width))
    console.print(f"T = {options.tokens}, V = {options.vocab};", ", ".join(f"{k} {v}" for k, v in description.items()))
    console.print(table(results))
    failed = missed(results)
    write_json(
        options.json,
        {
            "machine": description,
            "options": {"tokens": options.tokens, "vocab": options.vocab, "repeats": options.repeats},
            "results": {name: [asdict(row) for row in rows] for name, rows in results.items()},
            "missed": failed,
        },
    )
    return verdict(failed, options.check)


if __name__ == "__main__":
    sys.exit(main())
