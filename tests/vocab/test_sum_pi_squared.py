"""Σπ² from the pass of the token statistics, against float64 softmax: on logits, truncated, from a head, on shards."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing import assert_close

from parallel_rl import LMHeadInput, linear_token_stats, token_logprobs, token_scores, token_stats
from parallel_rl.testing.pool import run_world
from parallel_rl.vocab.backends.choice import Backend
from parallel_rl.vocab.linear.plan import LinearMode
from parallel_rl.vocab.truncated_stats import truncated_token_stats

T, V, D = 12, 37, 7
TARGETS = torch.where(torch.arange(T) % 4 == 3, -100, torch.arange(T) * 3)
MODES: tuple[LinearMode, ...] = ("in_forward", "resident", "recompute")


def operands(scale: float = 1.0) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(0)
    return torch.randn(T, D, generator=g).double(), torch.randn(V, D, generator=g).double() * scale


def truth(z: Tensor, temperature: float | Tensor = 1.0) -> Tensor:
    return torch.where(TARGETS >= 0, (z / temperature).softmax(-1).square().sum(-1), 0)


@pytest.mark.parametrize("scale", [1e-3, 1.0, 40.0])
@pytest.mark.parametrize(
    ("dtype", "tolerance", "backend"),
    [
        (torch.float64, 1e-13, "eager"),
        (torch.float32, 1e-5, "eager"),
        pytest.param(torch.float32, 1e-5, "compiled", marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_of_logits(dtype: torch.dtype, tolerance: float, backend: Backend, scale: float) -> None:
    """From flat rows, where it is 1/V, to sure ones; a row beside has its own temperature."""
    hidden, weight = operands(scale)
    z, temperature = (hidden @ weight.T).to(dtype), torch.linspace(0.5, 2, T, dtype=torch.float64)
    leaf = z.clone().requires_grad_()
    stats = token_stats(leaf, TARGETS, temperature=temperature, sum_pi_squared=True, backend=backend)
    assert stats.sum_pi_squared is not None and not stats.sum_pi_squared.requires_grad
    assert_close(stats.sum_pi_squared.double(), truth(z.double(), temperature[:, None]), rtol=tolerance, atol=tolerance)
    assert stats.entropy is not None
    (stats.logprobs + stats.entropy).sum().backward()
    other = z.clone().requires_grad_()
    plain = token_stats(other, TARGETS, temperature=temperature, backend=backend)
    (plain.logprobs + plain.entropy).sum().backward()  # type: ignore[operator]
    assert plain.sum_pi_squared is None and torch.equal(plain.logprobs, stats.logprobs)
    assert torch.equal(leaf.grad, other.grad)  # type: ignore[arg-type]


def test_of_a_truncated_policy() -> None:
    hidden, weight = operands()
    z = hidden @ weight.T
    kept = torch.where(z >= z.topk(5).values[:, -1:], z, -math.inf)
    found = truncated_token_stats(z, TARGETS, top_k=5, sum_pi_squared=True).sum_pi_squared
    assert_close(found, truth(kept), rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("mode", MODES)
def test_of_a_head(mode: LinearMode) -> None:
    hidden, weight = operands()
    stats = linear_token_stats(
        hidden.clone().requires_grad_(), weight, TARGETS, mode=mode, budget=5000, sum_pi_squared=True,
        objective=lambda stats: (stats.logprobs * stats.sum_pi_squared).sum(),
    )  # fmt: skip
    assert_close(stats.sum_pi_squared, truth(hidden @ weight.T), rtol=1e-13, atol=1e-13)
    assert stats.loss is not None
    stats.loss.backward()


def on_ranks(rank: int) -> list[Tensor | None]:
    hidden, weight = operands()
    mine = slice(rank * 13, (rank + 1) * 13)  # 13, 13, 11
    at = {"group": dist.group.WORLD, "vocab_size": V, "sum_pi_squared": True}
    return [
        token_stats((hidden @ weight.T)[:, mine].contiguous(), TARGETS, **at).sum_pi_squared,
        linear_token_stats(hidden, weight[mine], TARGETS, **at).sum_pi_squared,
    ]


def test_on_shards() -> None:
    hidden, weight = operands()
    for found in run_world(3, on_ranks):
        for x in found:
            assert_close(x, truth(hidden @ weight.T), rtol=1e-13, atol=1e-13)


def test_it_comes_beside_the_entropy() -> None:
    with pytest.raises(ValueError, match="sum_pi_squared = True needs the entropy; set entropy = True"):
        token_stats(torch.zeros(T, V), TARGETS, entropy=False, sum_pi_squared=True)


@pytest.mark.parametrize("rule", [{}, {"top_k": 5}], ids=str)
def test_scores_of_a_batch(rule: dict) -> None:
    """Token-aligned, from logits and from a head, beside the same log-probs."""
    hidden, weight = operands()
    data = {
        "input_ids": (torch.arange(T) * 5 % V).view(2, 6),
        "sample_mask": torch.ones(2),
        "token_mask": torch.ones(2, 6),
    }
    data["token_mask"][0, 4:] = 0
    z = (hidden @ weight.T).view(2, 6, V)
    p = z if not rule else torch.where(z >= z.topk(5).values[..., -1:], z, -math.inf)
    want = torch.cat([torch.zeros(2, 1), p.softmax(-1).square().sum(-1)[:, :-1]], 1) * data["token_mask"]
    for output in (z, LMHeadInput(hidden.view(2, 6, D), weight, rows=9, budget=5000)):
        found = token_scores(output, data, sum_pi_squared=True, entropy=True, temperature=1.0, **rule)
        assert_close(found.sum_pi_squared * data["token_mask"], want, rtol=1e-12, atol=1e-12)
        assert_close(found.logprobs, token_logprobs(output, data, **rule), rtol=1e-12, atol=1e-12)
    assert token_scores(z, data)[1:] == (None, None)
