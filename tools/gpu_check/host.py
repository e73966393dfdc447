"""Stage host: whether the host issues a loss as fast as the card runs it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.common import CountOperators
from benchmarks.losses_case import LOSSES, make_data
from parallel_rl import LMHeadInput, count_valid
from tools.gpu_check.facts import Facts
from tools.gpu_check.profile import issue_and_total

_ISSUE_BOUND = 0.8  # of the time of a call: the card waits for the host
_CARD = ((8192, 131072, 4096), (8192, 16384, 4096), (2048, 16384, 4096))
_TINY = ((64, 128, 16),)


def run(facts: Facts, device: str) -> None:
    """GRPO, forward + backward, from hidden states and from logits: one card's vocabulary, and a shard of TP 8."""
    for tokens, vocab, size in _CARD if device == "cuda" else _TINY:
        for kind in ("hidden states", "logits"):
            name = f"GRPO from {kind}, T {tokens}, V {vocab}"
            with facts.required(name):
                _measure(facts, name, _call(kind, tokens, vocab, size, device), device)


def _measure(facts: Facts, name: str, call: Callable[[], object], device: str) -> None:
    call()
    with CountOperators() as operators:
        call()
    facts.tell(f"{name}, operators", operators.count)
    issue, total = issue_and_total(call, device)
    if device == "cuda":
        bound = "issue-bound" if issue > _ISSUE_BOUND * total else "the card decides"
        facts.tell(name, f"issued in {issue:.2f} ms, done in {total:.2f} ms: {bound}")
    else:
        facts.tell(name, total, "ms")


def _call(kind: str, tokens: int, vocab: int, size: int, device: str) -> Callable[[], object]:
    data = make_data(tokens, vocab, 16, device)
    counts, loss_fn = count_valid([data]), LOSSES["GRPO"]()
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    rows = data["input_ids"].shape

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, device=device).to(dtype).requires_grad_()

    if kind == "logits":
        logits = drawn(*rows, vocab)
        return lambda: torch.autograd.grad(loss_fn(logits, data, *counts)[0], logits)
    hidden, weight = drawn(*rows, size), drawn(vocab, size)
    # not backward(), which would accumulate from the second call on
    return lambda: torch.autograd.grad(loss_fn(LMHeadInput(hidden, weight), data, *counts)[0], (hidden, weight))
