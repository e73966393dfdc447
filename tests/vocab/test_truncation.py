"""Top-k, top-p and recorded kept sets against rows that are sorted whole, in float64."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from parallel_rl import token_stats
from parallel_rl.testing.pool import WorldError, run_world
from parallel_rl.vocab.backends.choice import Backend
from parallel_rl.vocab.shards import Truncation, VocabShard
from parallel_rl.vocab.threshold import kept_floor
from parallel_rl.vocab.truncated_stats import truncated_token_stats
from tests.vocab.sorted_rows import kept_by_sorting

T, V = 24, 37
RULES: list[dict] = [
    {"top_k": 5},
    {"top_p": 0.7},
    {"top_k": 9, "top_p": 0.9, "temperature": 0.6},
    {"top_k": 1},
    {"top_p": 1e-9},
    {"top_k": V, "top_p": 1.0},
    {"top_p": 0.999, "temperature": 1.7},
]


def make(dtype: torch.dtype = torch.float64, seed: int = 0) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Logits with ties, −inf and both signs of zero; targets; upstream gradients of log-prob, entropy and lse."""
    g = torch.Generator().manual_seed(seed)
    z = (2 * torch.randn(T, V, generator=g, dtype=torch.float64)).to(dtype)
    z[1] = 0.25
    z[2, 4:] = -math.inf
    z[3, ::2] = z[3].amax()
    z[4] = torch.where(torch.arange(V) % 3 == 0, 0.0, -0.0)
    z[5] = z[5].abs().neg()
    z[6] *= 1e-30
    z[7] = z[7] + 300
    targets = torch.where(torch.arange(T) % 2 == 0, z.argmax(1), torch.randint(V, (T,), generator=g))
    return z, targets, [torch.randn(T, generator=g, dtype=torch.float64) for _ in range(3)]


def dense(z: Tensor, keep: Tensor, targets: Tensor, upstream: list[Tensor], temperature: float = 1.0) -> list[Tensor]:
    """(log-prob, entropy, lse, gradient) of the kept words in float64; a dropped target's log-prob is −inf without gradient."""
    z = z.double().clone().requires_grad_()
    u = torch.where(keep, z / temperature, -math.inf)
    lse = u.logsumexp(1)
    log_p = torch.where(keep & (u > -math.inf), u - lse[:, None], 0)
    inside = keep.gather(1, targets[:, None])[:, 0] & (z.gather(1, targets[:, None])[:, 0] > -math.inf)
    logp = torch.where(inside, log_p.gather(1, targets[:, None])[:, 0], 0)
    entropy = -(torch.where(keep & (u > -math.inf), log_p.exp(), 0) * log_p).sum(1)
    sum((x * g).sum() for x, g in zip((logp, entropy, lse), upstream, strict=True)).backward()
    assert z.grad is not None
    return [torch.where(inside, logp, -math.inf).detach(), entropy.detach(), lse.detach(), z.grad]


def check(got: list[Tensor], want: list[Tensor], tolerance: float) -> None:
    for mine, truth in zip(got, want, strict=True):
        assert torch.equal(mine == -math.inf, truth == -math.inf)
        finite = truth > -math.inf
        torch.testing.assert_close(mine[finite].double(), truth[finite], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float64, 1e-12), (torch.float32, 2e-5), (torch.bfloat16, 2e-2), (torch.float16, 2e-2)],
)
def test_against_sorted_rows(rule: dict, dtype: torch.dtype, tolerance: float) -> None:
    z, targets, upstream = make(dtype)
    want = dense(z, kept_by_sorting(z, **rule), targets, upstream, rule.get("temperature", 1.0))
    leaf = z.clone().requires_grad_()
    stats = truncated_token_stats(leaf, targets, **rule)
    assert stats.entropy is not None
    math_dtype = stats.logprobs.dtype
    inside = stats.logprobs > -math.inf
    grads = [torch.where(inside, upstream[0], 7.0), *upstream[1:]]  # what arrives at a dropped token has no effect
    torch.autograd.backward(list(stats[:3]), [g.to(math_dtype) for g in grads])
    assert leaf.grad is not None and leaf.grad.dtype == dtype
    check([stats.logprobs, stats.entropy, stats.lse, leaf.grad], want, tolerance)


@pytest.mark.slow
def test_the_compiled_search_finds_the_same_floors() -> None:
    z, _, _ = make(torch.float32)
    read = VocabShard(0, V, V, temperature=0.8, truncation=Truncation(9, 0.8), backend="eager")
    floors = [kept_floor(z, shard) for shard in (read, replace(read, backend="compiled"))]
    assert torch.equal(*floors)


@settings(max_examples=60, deadline=None)
@given(
    row=st.lists(
        st.just(-math.inf) | st.integers(-4, 4).map(float) | st.floats(-60, 60, width=32), min_size=2, max_size=12
    ),
    data=st.data(),
)
def test_any_row(row: list[float], data: st.DataObject) -> None:
    """Ties and gaps of every kind; p stays clear of the boundaries, where rounding decides."""
    z = torch.tensor([row], dtype=torch.float32)
    if bool((z == -math.inf).all()):
        return
    k = data.draw(st.none() | st.integers(1, len(row)))
    p = data.draw(st.floats(0.05, 0.95)) if k is None else data.draw(st.none() | st.floats(0.05, 0.95))
    if p is not None:
        kept = kept_by_sorting(z, k)[0]
        mass = torch.where(kept, z[0].double(), -math.inf).softmax(0)
        held = torch.stack([mass[z[0] > x].sum() for x in z[0]])
        if bool(((held - p).abs() < 1e-6).any()):
            return
    floor = kept_floor(z, VocabShard(0, len(row), len(row), truncation=Truncation(k, p), backend="eager"))
    assert torch.equal(z >= floor, kept_by_sorting(z, k, p))


def test_gradcheck() -> None:
    z = make()[0][8:10, :11].clone()
    targets = z.argmax(1)

    def outputs(z: Tensor) -> tuple[Tensor, ...]:
        return tuple(x for x in truncated_token_stats(z, targets, top_k=5, top_p=0.9, temperature=0.9) if x is not None)

    assert torch.autograd.gradcheck(outputs, z.requires_grad_())
    kept_ids = torch.stack([torch.randperm(11, generator=torch.Generator().manual_seed(i))[:6] for i in range(2)])

    def replayed(z: Tensor) -> tuple[Tensor, ...]:
        return tuple(x for x in truncated_token_stats(z, targets, kept_ids=kept_ids, temperature=0.9) if x is not None)

    assert torch.autograd.gradcheck(replayed, z)
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(truncated_token_stats(z, targets, top_k=3).lse.sum(), z, create_graph=True)


def test_a_rule_that_keeps_all_gives_the_plain_statistics() -> None:
    z, targets, _ = make(torch.float32)
    plain = token_stats(z, targets)
    for rule in ({"top_k": V}, {"top_p": 1.0}):
        for mine, truth in zip(truncated_token_stats(z, targets, **rule)[:3], plain[:3], strict=True):
            assert mine is not None and truth is not None
            assert torch.equal(mine, truth)


def test_temperature_per_token() -> None:
    z, targets, upstream = make()
    heat = torch.linspace(0.4, 2.0, T, dtype=torch.float64)
    keep = torch.cat([kept_by_sorting(z[i : i + 1], top_p=0.8, temperature=heat[i].item()) for i in range(T)])
    stats = truncated_token_stats(z, targets, top_p=0.8, temperature=heat)
    want = dense(z / heat[:, None], keep, targets, upstream)
    assert stats.entropy is not None
    check([stats.logprobs, stats.entropy, stats.lse], want[:3], 1e-12)


@pytest.mark.parametrize("backend", ["eager", pytest.param("compiled", marks=pytest.mark.slow)])
def test_consumed_logits_hold_the_gradient_in_place(backend: Backend) -> None:
    z, targets, upstream = make(torch.float32)
    upstream = [g.float() for g in upstream]
    gradients = []
    for consume in (False, True):
        leaf = z.clone().requires_grad_()
        work = leaf * 1
        grads: list[Tensor] = []
        work.register_hook(grads.append)
        stats = truncated_token_stats(work, targets, top_k=6, top_p=0.9, consume_logits=consume, backend=backend)
        total = sum((torch.where(x > -math.inf, x, 0) * g).sum() for x, g in zip(stats[:3], upstream, strict=True))  # type: ignore[operator]
        total.backward(retain_graph=True)
        assert (grads[0].data_ptr() == work.data_ptr()) == consume
        gradients.append(leaf.grad)
        if consume:
            with pytest.raises(RuntimeError, match="consume_logits=False"):
                total.backward()
    torch.testing.assert_close(*gradients, rtol=0, atol=0)


def test_ignored_tokens_are_zero_whatever_the_logits_hold() -> None:
    z, targets, upstream = make()
    want = dense(z, kept_by_sorting(z, top_k=4, top_p=0.9), targets, upstream)
    ignored = torch.arange(T) % 3 == 0
    z[ignored] = torch.tensor([math.nan, math.inf, -math.inf]).double().repeat(V)[:V]
    targets[ignored] = -100
    kept_ids = torch.where(ignored[:, None], 10**6, torch.arange(5))
    for rule in ({"top_k": 4, "top_p": 0.9}, {"kept_ids": kept_ids}):
        leaf = z.clone().requires_grad_()
        stats = truncated_token_stats(leaf, targets, **rule)
        torch.autograd.backward(list(stats[:3]), upstream)  # type: ignore[arg-type]
        for x in (*stats[:3], leaf.grad):
            assert x is not None and bool((x[ignored] == 0).all())
        if "top_k" in rule:
            got = [stats.logprobs, stats.entropy, stats.lse, leaf.grad]
            check([x[~ignored] for x in got if x is not None], [x[~ignored] for x in want], 1e-11)


def test_what_stands_at_ignored_tokens_is_not_checked() -> None:
    z, targets, _ = make()
    targets[2] = -100
    kept_ids = torch.tensor([1, 2, -1, -1]).repeat(T, 1)
    kept_ids[2] = 2
    assert bool(
        truncated_token_stats(z, targets, kept_ids=kept_ids).lse.isfinite().all()
    )  # -1 fills up any number of times
    heat = torch.ones(T, dtype=torch.float64)
    heat[2] = 0
    assert bool(truncated_token_stats(z, targets, top_k=3, temperature=heat).lse.isfinite().all())


# Recorded kept sets.


def recorded_sets(z: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """(kept ids [T, K] filled up with −1, in no order; the words kept, [T, V] bool, the target among them)."""
    keep = kept_by_sorting(torch.where(z == -math.inf, -50.0, z.double()), top_p=0.8)
    rows = [row.nonzero()[:, 0].flip(0) for row in keep]
    ids = torch.full((T, max(len(row) for row in rows)), -1)
    for i, row in enumerate(rows):
        ids[i, len(row) % 2 : len(row) % 2 + len(row)] = row[: ids.shape[1] - len(row) % 2]
    keep = torch.zeros(T, V + 1, dtype=torch.bool).scatter(1, ids % (V + 1), True)[:, :V]
    return ids, keep | (torch.arange(V) == targets[:, None])


@pytest.mark.parametrize("consume", [False, True])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 2e-5), (torch.bfloat16, 2e-2)]
)
def test_a_recorded_set_is_replayed(dtype: torch.dtype, tolerance: float, consume: bool) -> None:
    z, targets, upstream = make(dtype)
    ids, keep = recorded_sets(z, targets)
    leaf = z.clone().requires_grad_()
    stats = truncated_token_stats(leaf * 1, targets, kept_ids=ids, temperature=0.7, consume_logits=consume)
    assert stats.entropy is not None
    inside = torch.where(stats.logprobs > -math.inf, stats.logprobs, 0)
    outputs = [inside, stats.entropy, stats.lse]
    torch.autograd.backward(outputs, [g.to(stats.lse.dtype) for g in upstream])
    want = dense(z, keep, targets, upstream, 0.7)
    assert leaf.grad is not None
    check([stats.logprobs, stats.entropy, stats.lse, leaf.grad], want, tolerance)


# Bad input.


@pytest.mark.parametrize(
    ("rule", "words"),
    [
        ({"top_k": V + 1}, f"top_k = {V + 1} exceeds vocab_size = {V}"),
        ({"top_k": 0}, "top_k = 0 must be an integer >= 1"),
        ({"top_k": -1}, "top_k = -1 must be"),
        ({"top_k": 2.5}, "top_k = 2.5 must be"),
        ({"top_k": True}, "top_k = True must be an integer"),
        ({"top_p": True}, r"top_p = True must lie in \(0, 1\]"),
        ({"top_p": "0.5"}, r"top_p = '0.5' must lie in \(0, 1\]"),
        ({"top_p": 0.0}, r"top_p = 0.0 must lie in \(0, 1\]"),
        ({"top_p": -0.5}, r"top_p = -0.5 must lie in \(0, 1\]"),
        ({"top_p": 1.01}, r"top_p = 1.01 must lie in \(0, 1\]"),
        ({"top_p": math.nan}, r"top_p = nan must lie in \(0, 1\]"),
        ({}, "give top_k, top_p or kept_ids"),
        ({"top_k": 2, "kept_ids": torch.zeros(T, 3, dtype=torch.int64)}, "top_k = 2 and top_p = None would have no effect"),
        ({"kept_ids": torch.zeros(T - 1, 3, dtype=torch.int64)}, r"kept_ids must be \[24, K\], got \[23, 3\]"),
        ({"kept_ids": torch.full((T, 3), V)}, r"kept_ids = 37 at \[0, 0\] lies outside the vocabulary"),
        ({"kept_ids": torch.full((T, 3), -2)}, r"kept_ids = -2 at \[0, 0\] lies outside the vocabulary"),
        ({"kept_ids": torch.zeros(T, 3)}, "kept_ids must hold integers"),
        ({"kept_ids": torch.tensor([[7, -1, 3, 7]]).expand(T, 4)}, r"kept_ids names 7 twice at \[0\]; a kept set has each"),
        ({"top_k": 3, "temperature": 0.0}, "temperature = 0.0 must be positive and finite"),
        ({"top_p": 0.5, "temperature": math.inf}, "temperature = inf must be positive and finite"),
        ({"top_p": 0.5, "temperature": math.nan}, "temperature = nan must be positive and finite"),
        ({"top_p": 0.5, "temperature": torch.linspace(1, 0, T)}, rf"temperature = 0.0 at \[{T - 1}\] must be positive and"),
        ({"top_k": 3, "temperature": torch.ones(T).index_fill(0, torch.tensor([4]), math.inf)}, r"= inf at \[4\] must be"),
    ],
)  # fmt: skip
def test_bad_input(rule: dict, words: str) -> None:
    z, targets, _ = make()
    with pytest.raises(ValueError, match=words):
        truncated_token_stats(z, targets, **rule)


def test_logits_given_up_must_be_contiguous() -> None:
    z, targets, _ = make()
    with pytest.raises(ValueError, match="must be contiguous"):
        truncated_token_stats(z.t().contiguous().t(), targets, top_k=3, consume_logits=True)


def _too_many_on_one_rank(rank: int) -> None:
    z, targets, _ = make()
    truncated_token_stats(z[:, :18].contiguous(), targets % 36, top_k=36 + (rank == 1), group=dist.group.WORLD)


def test_a_fault_on_one_rank_is_raised_on_all() -> None:
    with pytest.raises(WorldError) as caught:
        run_world(2, _too_many_on_one_rank)
    assert sorted(caught.value.errors) == [0, 1]
    assert all("rank 1: top_k = 37 exceeds vocab_size = 36" in x for x in caught.value.errors.values())


def test_truncation_is_false_where_it_keeps_all() -> None:
    assert not Truncation()
    assert Truncation(top_k=3) and Truncation(top_p=0.5) and Truncation(kept_sets=True)
