"""Targets and temperatures that no token has: refused by every function that takes them, alike."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from parallel_rl import NLLLoss, count_valid, linear_token_stats, token_stats
from parallel_rl.validation import validation
from parallel_rl.vocab.truncated_stats import truncated_token_stats

T, V, D = 4, 11, 3
LOGITS, TARGETS = torch.zeros(T, V), torch.arange(T)
HIDDEN, WEIGHT = torch.zeros(T, D), torch.zeros(V, D)

FUNCTIONS: dict[str, Callable[..., object]] = {
    "logits": lambda targets, t: token_stats(LOGITS, targets, temperature=t),
    "hidden states": lambda targets, t: linear_token_stats(HIDDEN, WEIGHT, targets, temperature=t),
    "top-k": lambda targets, t: truncated_token_stats(LOGITS, targets, top_k=3, temperature=t),
}


def a_token(value: float) -> Tensor:
    return torch.tensor([1.0, 1.0, value, 1.0])


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize(
    ("targets", "temperature", "message"),
    [
        *((TARGETS, t, f"temperature = {t} must be positive and finite") for t in (0.0, -0.5, math.inf, math.nan)),
        *(
            (TARGETS, a_token(t), rf"temperature = {t} at \[2\] must be positive and finite")
            for t in (0.0, -0.5, math.inf, math.nan)
        ),
        (TARGETS, torch.tensor(0.0), r"temperature = 0.0 at \[0\] must be positive"),
        (TARGETS, torch.ones(T - 1), r"temperature must be a number or floating point \[4\], got torch.float32 \[3\]"),
        (TARGETS, torch.ones(T).long(), r"temperature must be .* floating point \[4\], got torch.int64 \[4\]"),
        (TARGETS.bool(), 1.0, r"targets must be int64 or int32 \[4\], got torch.bool \[4\]"),
        (TARGETS.to(torch.uint8), 1.0, r"targets must be int64 or int32 \[4\], got torch.uint8 \[4\]"),
        (TARGETS.float(), 1.0, r"targets must be int64 or int32 \[4\], got torch.float32 \[4\]"),
        (TARGETS[1:], 1.0, r"targets must be int64 or int32 \[4\], got torch.int64 \[3\]"),
        (TARGETS + 8, 1.0, r"target 11 at \[3\] lies outside the vocabulary \[0, 11\)"),
    ],
)
def test_refused(name: str, targets: Tensor, temperature: float | Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        FUNCTIONS[name](targets, temperature)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_token_that_does_not_count_may_have_any_temperature(name: str) -> None:
    targets = TARGETS.clone()
    targets[2] = -100
    FUNCTIONS[name](targets, a_token(math.nan))
    with validation("never"):
        FUNCTIONS[name](TARGETS, a_token(0.0))


@pytest.mark.parametrize("name", [*FUNCTIONS, "a loss"])
@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.vmap, torch.func.jacrev], ids=lambda f: f.__name__)
def test_transforms_of_torch_func_are_named(name: str, transform: Callable) -> None:
    """Without a rule for them torch fails somewhere inside, in words that speak of none of our functions."""
    data = {"input_ids": TARGETS[None], "token_mask": torch.ones(1, T), "sample_mask": torch.ones(1)}
    counts = count_valid(data)
    functions: dict[str, tuple[Callable[[Tensor], Tensor], Tensor]] = {
        "logits": (lambda x: token_stats(x, TARGETS).lse.sum(), LOGITS),
        "hidden states": (lambda x: linear_token_stats(x, WEIGHT, TARGETS).lse.sum(), HIDDEN),
        "top-k": (lambda x: truncated_token_stats(x, TARGETS, top_k=3).lse.sum(), LOGITS),
        "a loss": (lambda x: NLLLoss()(x, data, *counts)[0], LOGITS[None]),
    }
    function, x = functions[name]
    x = x[None] if transform is torch.func.vmap else x
    with pytest.raises(ValueError, match=r"torch.func's transforms .* are not supported"):
        transform(function)(x)
