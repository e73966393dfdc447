"""`token_stats` against dense float64, on shards, in every dtype and both backends."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing import assert_close

from parallel_rl import token_stats
from parallel_rl.testing.pool import run_world
from parallel_rl.validation import validation
from parallel_rl.vocab.backends.torch_backend import Backend
from tests.collectives import recorded

T, V = 24, 37
# in seconds, what is compiled is held by test_consumed_logits_hold_the_gradient_in_place
BACKENDS = ["eager", pytest.param("compiled", marks=pytest.mark.slow)]


def make(dtype: torch.dtype, shift: float = 0.0, seed: int = 0) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Rounded logits as float64, targets on every shard, and upstream gradients of the three outputs."""
    g = torch.Generator().manual_seed(seed)
    logits = torch.randn(T, V, generator=g, dtype=torch.float64) * 2 + shift * (torch.arange(T)[:, None] % 2 * 2 - 1)
    targets = torch.randint(0, V, (T,), generator=g)
    targets[:4] = torch.tensor([0, V // 2, V - 1, 5])
    upstream = [torch.randn(T, generator=g, dtype=torch.float64) for _ in range(3)]
    return logits.to(dtype).double(), targets, upstream


def dense(logits: Tensor, targets: Tensor, upstream: list[Tensor], temperature: float | Tensor = 1.0) -> list[Tensor]:
    """(log-prob, entropy, lse, gradient) in the dtype of `logits`."""
    z = logits.clone().requires_grad_()
    u = z / (temperature[:, None] if isinstance(temperature, Tensor) else temperature)
    log_p = torch.log_softmax(u, -1)
    out = [log_p.gather(1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(1), torch.logsumexp(u, 1)]
    sum((o * g.to(o.dtype)).sum() for o, g in zip(out, upstream, strict=True)).backward()
    return [*(o.detach() for o in out), z.grad]  # type: ignore[list-item]


def error(got: Tensor, want: Tensor) -> float:
    return ((got.double() - want.double()).norm() / want.double().norm()).item()


@pytest.mark.parametrize("shift", [0.0, 300.0])
@pytest.mark.parametrize(
    ("dtype", "tolerance", "backend"),
    [
        (torch.float64, 1e-12, "eager"),
        (torch.float32, 1e-6, "eager"),
        pytest.param(torch.float32, 1e-6, "compiled", marks=pytest.mark.slow),  # float64: test_temperature
    ],
)
def test_against_dense_float64(dtype: torch.dtype, tolerance: float, backend: Backend, shift: float) -> None:
    logits, targets, upstream = make(dtype, shift)
    z = logits.to(dtype, copy=True).requires_grad_()
    stats = token_stats(z, targets, backend=backend)
    assert stats.entropy is not None
    torch.autograd.backward(list(stats[:3]), [g.to(dtype) for g in upstream])
    got = [stats.logprobs, stats.entropy, stats.lse, z.grad]
    for value, want in zip(got, dense(logits, targets, upstream), strict=True):
        assert value is not None
        assert error(value, want) < tolerance


@pytest.mark.parametrize(
    ("dtype", "backend"),
    [
        (torch.bfloat16, "eager"),
        (torch.float16, "eager"),
        pytest.param(torch.bfloat16, "compiled", marks=pytest.mark.slow),
    ],
)
def test_low_precision_is_no_worse_than_dense_on_the_same_logits(dtype: torch.dtype, backend: Backend) -> None:
    logits, targets, upstream = make(dtype)
    z = logits.to(dtype, copy=True).requires_grad_()
    stats = token_stats(z, targets, backend=backend)
    assert stats.logprobs.dtype == torch.float32 and stats.entropy is not None
    torch.autograd.backward(list(stats[:3]), [g.float() for g in upstream])
    assert z.grad is not None and z.grad.dtype == dtype
    truth = dense(logits, targets, upstream)
    plain = dense(logits.float(), targets, upstream)
    plain[-1] = plain[-1].to(dtype)  # a dense loss rounds its gradient just so
    for value, base, want in zip([*stats[:3], z.grad], plain, truth, strict=True):
        assert error(value, want) <= 2 * error(base, want) + 1e-7


@pytest.mark.parametrize("options", [{}, {"temperature": 0.7}, {"vocab_size": 30}, {"entropy": False}])
def test_gradcheck(options: dict) -> None:
    logits, targets, _ = make(torch.float64)
    targets = targets.clamp(max=29)
    targets[7] = -100
    z = logits[:9].clone().requires_grad_()

    def outputs(z: Tensor) -> tuple[Tensor, ...]:
        return tuple(t for t in token_stats(z, targets[:9], **options) if t is not None)

    assert torch.autograd.gradcheck(outputs, z)


@pytest.mark.parametrize(
    ("per_token", "backend"),
    [(False, "eager"), (True, "eager"), pytest.param(True, "compiled", marks=pytest.mark.slow)],
)
def test_temperature(per_token: bool, backend: Backend) -> None:
    logits, targets, upstream = make(torch.float64)
    temperature = torch.linspace(0.5, 2, T, dtype=torch.float64) if per_token else 0.6
    z = logits.clone().requires_grad_()
    stats = token_stats(z, targets, temperature=temperature, backend=backend)
    torch.autograd.backward(list(stats[:3]), upstream)  # type: ignore[arg-type]
    for value, want in zip([*stats[:3], z.grad], dense(logits, targets, upstream, temperature), strict=True):
        assert_close(value, want, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize(
    ("dtype", "plain", "backend"),
    [
        (torch.float32, "eager", "eager"),
        (torch.bfloat16, "eager", "eager"),
        pytest.param(torch.float32, "eager", "compiled", marks=pytest.mark.slow),
        pytest.param(torch.bfloat16, "compiled", "compiled", marks=pytest.mark.slow),
    ],
)
def test_consumed_logits_hold_the_gradient_in_place(dtype: torch.dtype, plain: Backend, backend: Backend) -> None:
    """The bits that the same backend gives where it does not consume them; each variant takes seconds to compile."""
    logits, targets, upstream = make(dtype)
    gradients = []
    for consume in (False, True):
        leaf = logits.to(dtype, copy=True).requires_grad_()
        z = leaf * 1
        chosen = backend if consume else plain
        stats = token_stats(z, targets.clamp(max=V - 3), consume_logits=consume, vocab_size=V - 2, backend=chosen)
        where = z.data_ptr()
        grads: list[Tensor] = []
        z.register_hook(grads.append)
        torch.autograd.backward(
            [stats.logprobs, stats.lse], [upstream[0].to(torch.float32), upstream[1].to(torch.float32)]
        )
        assert (grads[0].data_ptr() == where) == consume
        gradients.append(leaf.grad)
    off = 0 if plain == backend else 1e-6
    assert_close(gradients[0], gradients[1], rtol=off, atol=off)


def test_a_second_backward_through_consumed_logits_is_refused() -> None:
    logits, targets, _ = make(torch.float32)
    z = logits.float().requires_grad_() * 1
    total = token_stats(z, targets, consume_logits=True).logprobs.sum()
    total.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="consume_logits=False"):
        total.backward()


def test_logits_changed_between_forward_and_backward_are_noticed() -> None:
    logits, targets, _ = make(torch.float32)
    z = logits.float().requires_grad_() * 1
    total = token_stats(z, targets).logprobs.sum()
    z.data.mul_(1)  # not seen by the version counter
    with torch.no_grad():
        z.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        total.backward()


def test_double_backward_is_refused() -> None:
    logits, targets, _ = make(torch.float64)
    z = logits.clone().requires_grad_()
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(token_stats(z, targets).logprobs.sum(), z, create_graph=True)


@pytest.mark.parametrize("backend", BACKENDS)
def test_ignored_tokens_are_zero_whatever_the_logits_hold(backend: Backend) -> None:
    logits, targets, upstream = make(torch.float64)
    want = dense(logits, targets, upstream)
    ignored = torch.arange(T) % 3 == 0
    logits[ignored] = torch.tensor([math.nan, math.inf, -math.inf]).double().repeat(V)[:V]
    targets[ignored] = -100
    z = logits.clone().requires_grad_()
    stats = token_stats(z, targets, backend=backend)
    torch.autograd.backward(list(stats[:3]), upstream)  # type: ignore[arg-type]
    for value, truth in zip([*stats[:3], z.grad], want, strict=True):
        assert value is not None
        assert bool((value[ignored] == 0).all())
        assert_close(value[~ignored], truth[~ignored], rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("backend", BACKENDS)
def test_minus_infinity_logits(backend: Backend) -> None:
    """Columns forbidden by −inf: as if they were not there; a forbidden target has log-prob −inf and a finite gradient."""
    logits, targets, upstream = make(torch.float64)
    targets = targets % 20
    want = dense(logits[:, :20], targets, upstream)
    z = logits.clone()
    z[:, 20:] = -math.inf
    z.requires_grad_()
    stats = token_stats(z, targets, backend=backend)
    torch.autograd.backward(list(stats[:3]), upstream)  # type: ignore[arg-type]
    assert z.grad is not None
    for value, truth in zip([*stats[:3], z.grad[:, :20]], want, strict=True):
        assert_close(value, truth, rtol=1e-11, atol=1e-12)
    assert bool((z.grad[:, 20:] == 0).all())
    z = z.detach().requires_grad_()
    logp = token_stats(z, torch.full((T,), 30), backend=backend).logprobs
    logp.sum().backward()
    assert bool((logp == -math.inf).all()) and z.grad is not None and bool(z.grad.isfinite().all())


# On shards: real ranks.

SPLITS = {  # (vocab_size given?, columns of each rank)
    "even": (False, [[*range(18)], [*range(18, 36)]]),
    "padded": (True, [[*range(20)], [*range(20, 37), None, None, None]]),
    "chunk": (True, [[*range(19)], [*range(19, 37)]]),
    "all padding": (True, [[*range(37), None], [None] * 38]),
}


def _columns(logits: Tensor, columns: list[int | None]) -> Tensor:
    out = torch.full((T, len(columns)), 1e4, dtype=logits.dtype)
    real = [c for c in columns if c is not None]
    out[:, : len(real)] = logits[:, real]
    return out


def shard_case(rank: int, split: str, dtype: torch.dtype, shift: float, backend: Backend) -> dict[str, Tensor]:
    sized, columns = SPLITS[split]
    size = 37 if sized else 36
    logits, targets, upstream = make(dtype, shift)
    targets = targets.clamp(max=size - 1)
    z = _columns(logits, columns[rank]).to(dtype).requires_grad_()
    stats = token_stats(z, targets, group=dist.group.WORLD, vocab_size=size if sized else None, backend=backend)
    kind = stats.logprobs.dtype
    torch.autograd.backward(list(stats[:3]), [g.to(kind) for g in upstream])  # type: ignore[arg-type]
    assert z.grad is not None
    whole = torch.zeros(T, size, dtype=dtype)
    real = [c for c in columns[rank] if c is not None]
    whole[:, real] = z.grad[:, : len(real)]
    padding = z.grad[:, len(real) :]
    return {"logprobs": stats.logprobs, "entropy": stats.entropy, "lse": stats.lse, "grad": whole, "padding": padding}  # type: ignore[dict-item]


def shard_cases(rank: int, backend: Backend) -> dict[tuple, dict[str, Tensor]]:
    splits, dtypes = [*SPLITS], [(torch.float64, 0.0), (torch.float32, 300.0), (torch.bfloat16, 0.0)]
    if backend == "compiled":  # both ranks build each width and dtype; one process above builds each dtype
        splits, dtypes = ["padded"], dtypes[1:2]
    return {
        (split, dtype, shift): {name: t.detach() for name, t in shard_case(rank, split, dtype, shift, backend).items()}
        for split in splits
        for dtype, shift in dtypes
    }


@pytest.mark.parametrize("backend", BACKENDS)
def test_two_ranks_give_what_one_gives(backend: Backend) -> None:
    """Compiled, it may take ten seconds where nothing is cached: two ranks build C++."""
    first, second = run_world(2, shard_cases, backend, timeout=300)
    for (split, dtype, shift), mine in first.items():
        other = second[split, dtype, shift]
        size = 37 if SPLITS[split][0] else 36
        logits, targets, upstream = make(dtype, shift)
        targets = targets.clamp(max=size - 1)
        truth = dense(logits[:, :size], targets, upstream)
        plain = dense(logits[:, :size].to(torch.promote_types(dtype, torch.float32)), targets, upstream)
        plain[-1] = plain[-1].to(dtype)
        for name, want, base in zip(("logprobs", "entropy", "lse"), truth, plain, strict=False):
            assert torch.equal(mine[name], other[name]), f"{split}: ranks hold different bits of {name}"
            assert error(mine[name], want) <= max(2 * error(base, want), 1e-6 if dtype != torch.float64 else 1e-12)
        grad = mine["grad"] + other["grad"]
        assert error(grad, truth[3]) <= max(2 * error(plain[3], truth[3]), 1e-6 if dtype != torch.float64 else 1e-12)
        assert not mine["padding"].any() and not other["padding"].any()


def count_case(rank: int) -> tuple[list[str], list[str]]:
    logits, targets, upstream = make(torch.float32)
    z = _columns(logits, SPLITS["padded"][1][rank]).float().requires_grad_()
    with validation("never"), recorded() as forward:
        stats = token_stats(z, targets, group=dist.group.WORLD, vocab_size=37)
    with recorded() as backward:
        torch.autograd.backward(list(stats[:3]), [g.float() for g in upstream])  # type: ignore[arg-type]
    return forward, backward


def test_one_collective_forward_and_none_backward() -> None:
    for forward, backward in run_world(2, count_case):
        assert forward == ["_allgather_base_"]
        assert backward == []


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("scale", [1.0, 2.0**32])
def test_a_forbidden_word_an_entropy_term_and_a_loss_scale(backend: Backend, scale: float) -> None:
    """p·(c0 + c1·log p) at p = 0: c1 carries the loss scale, and log p must not make their product infinite."""
    z = torch.tensor([[0.5, -math.inf, 1.0, -5000.0], [1.0, 2.0, -math.inf, -200.0]], requires_grad=True)
    stats = token_stats(z, torch.tensor([0, 1]), backend=backend)
    assert stats.entropy is not None
    (stats.entropy.sum() * scale).backward()
    x = z.detach().double().clamp(min=-1e4).requires_grad_()
    log_p = x.log_softmax(1)
    (-(log_p.exp() * log_p).sum() * scale).backward()
    assert z.grad is not None and x.grad is not None
    assert_close(z.grad.double(), x.grad, rtol=1e-5, atol=1e-7 * scale)


def test_errors_of_many_tokens_do_not_add_up() -> None:
    """Bound the mean error of log-probs: a rounded log2 e makes each e^u too small, by 6e-4 over 32 thousand tokens.

    Half of a row's mass lies c below its maximum, so the mean holds the exponential's error alone. A compiled backend
    takes the compiler's exponential, whose mean error is 2.5e-8 on CPUs without AVX-512.
    """
    c = torch.linspace(6, 9, 512)
    z = torch.zeros(512, 512)
    z[:, 0] = c
    stats = token_stats(z, torch.zeros(512, dtype=torch.int64), backend="eager")
    log_p = z.double().log_softmax(1)
    assert abs((stats.logprobs.double().cpu() - log_p[:, 0]).mean().item()) < 2e-8
    assert stats.entropy is not None
    assert abs((stats.entropy.double().cpu() + (log_p.exp() * log_p).sum(1)).mean().item()) < 1e-7
