"""`linear_token_stats` against dense float64, in every mode and dtype, on one process."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from parallel_rl import LinearTokenStats, linear_token_stats, token_stats
from parallel_rl.vocab.linear.gemm import scaled_to_
from parallel_rl.vocab.linear.params import LossRows
from parallel_rl.vocab.linear.plan import LinearMode
from tests.vocab.linear.cases import N, Problem, V, dense, error, make

SMALL = 4 * V * 8 * 3  # a few rows a chunk
MODES: list[LinearMode] = ["in_forward", "resident", "recompute", "auto"]


def run(
    problem: Problem, dtype: torch.dtype, mode: LinearMode, scale: float = 1.0, objective: bool | None = None, **options
) -> tuple[LinearTokenStats, list[Tensor], Tensor]:  # type: ignore[no-untyped-def]
    """The statistics, the three gradients, and the loss; the backward is scaled as a loss scale would."""
    operands = [x.to(dtype).clone().requires_grad_() for x in problem[:3]]
    budget = options.pop("budget", SMALL * torch.promote_types(dtype, torch.float32).itemsize // 4)
    early = mode == "in_forward" if objective is None else objective
    masked = problem._replace(upstream=[torch.where(problem.keep, g, 0) for g in problem.upstream])
    stats = linear_token_stats(
        operands[0], operands[1], problem.targets, bias=operands[2], mode=mode, budget=budget,
        objective=masked.objective if early else None, **options,
    )  # fmt: skip
    loss = masked.objective(stats) if stats.loss is None else stats.loss  # type: ignore[arg-type]
    (loss * scale).backward()
    assert all(x.grad is not None and x.grad.dtype == dtype for x in operands)
    return stats, [x.grad / scale for x in operands], loss.detach()  # type: ignore[operator]


OPTIONS = [
    {},
    {"softcap": 4.0},
    {"temperature": 0.7},
    {"vocab_size": V - 4},
    {"softcap": 3.0, "temperature": 1.6, "vocab_size": V - 4, "logit_scale": 0.6},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 2e-6)])
def test_against_dense_float64(dtype: torch.dtype, tolerance: float, mode: LinearMode, options: dict) -> None:
    problem = make(dtype)
    given = dict(options)
    truth = dense(problem, size=given.pop("vocab_size", V), **given)
    stats, gradients, loss = run(problem, dtype, mode, scale=1024.0, **options)
    for got, want in zip(stats[:3], truth.stats[:3], strict=True):
        assert error(got, want) < tolerance
    assert_close(loss.double(), truth.loss, rtol=20 * tolerance, atol=20 * tolerance)
    for got, want in zip(gradients, truth.gradients, strict=True):
        assert error(got, want) < tolerance
    if "vocab_size" in options:  # padding columns
        assert not gradients[1][V - 4 :].any() and not gradients[2][V - 4 :].any()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_operands_keep_exact_products(dtype: torch.dtype, mode: LinearMode) -> None:
    """Logits are never rounded: statistics as good as float32's, gradients rounded once, at the end."""
    if (mode, dtype) == ("in_forward", torch.float16):
        pytest.skip("refused, see the test of bad input")
    problem = make(dtype)
    truth = dense(problem, temperature=0.7)
    stats, gradients, _ = run(problem, dtype, mode, temperature=0.7)
    assert stats.logprobs.dtype == torch.float32
    for got, want in zip(stats[:3], truth.stats[:3], strict=True):
        assert error(got, want) < 2e-6
    for got, want in zip(gradients, truth.gradients, strict=True):
        rounding = error(want.to(dtype), want)
        assert error(got, want) <= 1.5 * rounding + (5e-4 if mode == "resident" else 0)


@pytest.mark.parametrize("mode", ["recompute", "in_forward"])
def test_logits_far_from_zero(mode: LinearMode) -> None:
    problem = make(torch.float32, shift=300.0)
    truth = dense(problem)
    stats, gradients, _ = run(problem, torch.float32, mode)
    assert error(stats.logprobs, truth.stats.logprobs) < 3e-5  # of float32 logits around 300
    for got, want in zip(gradients, truth.gradients, strict=True):
        assert error(got, want) < 1e-4


def test_gradcheck() -> None:
    problem = make()
    operands = [x.clone()[:8].requires_grad_() for x in problem[:1]] + [
        x.clone().requires_grad_() for x in problem[1:3]
    ]

    def outputs(hidden: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
        options = {"softcap": 4.0, "temperature": 0.8, "vocab_size": V - 2, "budget": SMALL}
        return linear_token_stats(hidden, weight, problem.targets[:8], bias=bias, mode="recompute", **options)[:3]  # type: ignore[arg-type, return-value]

    assert torch.autograd.gradcheck(outputs, operands)


def test_modes_agree_to_the_bit_and_repeat() -> None:
    """Same chunks, same arithmetic: only when it happens differs; float32 and up keeps logits as they are."""
    problem = make(torch.float32)
    first = run(problem, torch.float32, "recompute")
    for mode in MODES:
        stats, gradients, _ = run(problem, torch.float32, mode, objective=True, budget=1 << 22)
        for got, want in zip([*stats[:3], *gradients], [*first[0][:3], *first[1]], strict=True):
            assert error(got, want) < 1e-6
    again = run(problem, torch.float32, "recompute")
    for got, want in zip([*again[0][:3], *again[1]], [*first[0][:3], *first[1]], strict=True):
        assert torch.equal(got, want)  # type: ignore[arg-type]


def test_the_same_as_token_stats_of_the_logits() -> None:
    problem = make()
    z = (problem.hidden @ problem.weight.T + problem.bias).requires_grad_()
    want = token_stats(z, problem.targets, temperature=0.6)
    got = linear_token_stats(problem.hidden, problem.weight, problem.targets, bias=problem.bias, temperature=0.6)
    for x, y in zip(got, want, strict=False):
        assert_close(x, y, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("mode", MODES)
def test_a_temperature_a_token(mode: LinearMode) -> None:
    problem, temperature = make(), torch.linspace(0.5, 2, N, dtype=torch.float64)
    truth = dense(problem, temperature=temperature)
    stats, gradients, _ = run(problem, torch.float64, mode, temperature=temperature)
    for got, want in zip([*stats[:3], *gradients], [*truth.stats[:3], *truth.gradients], strict=True):
        assert error(got, want) < 1e-12


@pytest.mark.parametrize("softcap", [None, 4.0])
@pytest.mark.parametrize("bound", [None, 20, "not counted"])
@pytest.mark.parametrize("mode", MODES)
def test_rows_without_loss_may_hold_anything(
    mode: LinearMode, bound: int | str | None, softcap: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where they are projected: on a card, where the host does not count the others."""
    if bound == "not counted":
        everything = lambda keep, parts, bound, group: LossRows(None, parts, N, N, 0, None, keep.device)  # noqa: E731
        monkeypatch.setattr(LossRows, "of", everything)
        bound = None
    problem = make()
    truth = dense(problem, softcap=softcap)
    dirty = problem.hidden.clone()
    ignored = ~problem.keep
    dirty[ignored] = torch.tensor([math.nan, math.inf, -math.inf, 1e300]).double().repeat(3)[: dirty.shape[1]]
    stats, gradients, _ = run(problem._replace(hidden=dirty), torch.float64, mode, rows=bound, softcap=softcap)
    for got, want in zip([*stats[:3], *gradients], [*truth.stats[:3], *truth.gradients], strict=True):
        assert error(got, want) < 1e-12
    assert not gradients[0][ignored].any() and not stats.logprobs[ignored].any()


@pytest.mark.parametrize("mode", MODES)
def test_a_call_without_gradient_has_the_same_bits(mode: LinearMode) -> None:
    """A ratio of a policy to itself is 1. Of rows that start at odd places a copy gave other bits than the rows themselves."""
    g = torch.Generator().manual_seed(3)
    for rows, size, width in ((23, 37, 41), (39, 11, 59), (7, 29, 8), (31, 3, 17), (37, 39, 55), (12, 21, 33)):
        hidden, weight = (torch.randn(n, size, generator=g).requires_grad_() for n in (rows, width))
        targets = torch.randint(0, width, (rows,), generator=g)
        objective = (lambda s: s.logprobs.sum()) if mode == "in_forward" else None
        for chunk in (1, 3, 5):
            found = []
            for grad in (True, False):
                with torch.set_grad_enabled(grad):
                    found.append(
                        linear_token_stats(
                            hidden,
                            weight,
                            targets,
                            mode=mode,
                            objective=objective,
                            budget=chunk * 4 * (width + 4 * size),
                        ).logprobs
                    )
            assert torch.equal(*found), (rows, size, width, chunk)


@pytest.mark.parametrize("mode", MODES)
def test_no_row_carries_loss(mode: LinearMode) -> None:
    problem = make()._replace(targets=torch.full((N,), -100))
    stats, gradients, loss = run(problem, torch.float64, mode)
    assert loss == 0 and not stats.logprobs.any()
    assert not any(bool(g.any()) for g in gradients)


@pytest.mark.parametrize("mode", MODES)
def test_forbidden_columns(mode: LinearMode) -> None:
    """A bias of −inf: as if the column were not there."""
    problem = make()
    problem.bias[V - 4 :] = -math.inf
    truth = dense(problem, size=V - 4)
    stats, gradients, _ = run(problem, torch.float64, mode)
    for got, want in zip([*stats[:3], *gradients], [*truth.stats[:3], *truth.gradients], strict=True):
        assert error(got, want) < 1e-12


@pytest.mark.parametrize("mode", MODES)
def test_tied_embeddings(mode: LinearMode) -> None:
    """The weight is an embedding as well: both gradients add up."""
    problem = make()
    weight = problem.weight.clone().requires_grad_()
    ids = torch.arange(N) % V
    masked = problem._replace(upstream=[torch.where(problem.keep, g, 0) for g in problem.upstream])

    def loss(fused: bool) -> Tensor:
        hidden = torch.nn.functional.embedding(ids, weight).tanh()
        if not fused:
            return masked.objective(token_stats(hidden @ weight.T, problem.targets))
        stats = linear_token_stats(
            hidden, weight, problem.targets, mode=mode, budget=SMALL * 2,
            objective=masked.objective if mode == "in_forward" else None,
        )  # fmt: skip
        return masked.objective(stats) if stats.loss is None else stats.loss  # type: ignore[arg-type]

    (want,) = torch.autograd.grad(loss(False), weight)
    (got,) = torch.autograd.grad(loss(True), weight)
    assert error(got, want) < 1e-12


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("factor", [1.0, 0.25])
def test_the_weight_gradient_goes_straight_to_main_grad(mode: LinearMode, factor: float) -> None:
    problem = make(torch.bfloat16)
    truth = dense(problem)
    hidden, weight = (x.to(torch.bfloat16).requires_grad_() for x in problem[:2])
    before = torch.full(weight.shape, 2.0)
    weight.main_grad = before.clone()  # type: ignore[attr-defined]
    masked = problem._replace(upstream=[torch.where(problem.keep, g, 0) for g in problem.upstream])
    stats = linear_token_stats(
        hidden, weight, problem.targets, bias=problem.bias.float(), mode=mode, budget=SMALL, main_grad_factor=factor,
        objective=masked.objective if mode == "in_forward" else None,
    )  # fmt: skip
    loss = masked.objective(stats) if stats.loss is None else stats.loss  # type: ignore[arg-type]
    places: list[int] = []
    weight.register_hook(lambda stand_in: places.append(stand_in.data_ptr()))
    (loss * 8).backward()
    linear_token_stats(hidden, weight, problem.targets, mode="resident", main_grad_factor=0.0).logprobs.sum().backward()
    assert places[0] == places[1], "zeros as large as the weight are made once, not in each micro-batch"
    got = (weight.main_grad - before) / (8 * factor)  # type: ignore[attr-defined]
    assert error(got, truth.gradients[1]) < (1e-3 if mode in ("resident", "auto") else 1e-5)  # kept logits are float16
    assert weight.grad is not None and not weight.grad.any()
    assert weight.grad_added_to_main_grad  # type: ignore[attr-defined]


@pytest.mark.parametrize("mode", MODES)
def test_only_what_is_asked_for_is_computed(mode: LinearMode) -> None:
    problem = make()
    truth = dense(problem)
    masked = problem._replace(upstream=[torch.where(problem.keep, g, 0) for g in problem.upstream])
    for chosen in range(3):
        operands = [x.clone().requires_grad_(i == chosen) for i, x in enumerate(problem[:3])]
        out = linear_token_stats(
            operands[0], operands[1], problem.targets, bias=operands[2], mode=mode, budget=SMALL * 2,
            objective=masked.objective,
        )  # fmt: skip
        assert out.loss is not None
        out.loss.backward()
        assert [x.grad is not None for x in operands] == [i == chosen for i in range(3)]
        assert error(operands[chosen].grad, truth.gradients[chosen]) < 1e-12


def test_without_gradient_nothing_is_kept() -> None:
    problem = make()
    with torch.no_grad():
        stats = linear_token_stats(*(x.requires_grad_() for x in problem[:2]), problem.targets, budget=SMALL * 2)
    assert not stats.logprobs.requires_grad
    assert error(stats.logprobs, dense(problem._replace(bias=torch.zeros(V).double())).stats.logprobs) < 1e-12


def test_entropy_left_out() -> None:
    problem = make()
    stats = linear_token_stats(problem.hidden, problem.weight, problem.targets, entropy=False)
    assert stats.entropy is None and error(stats.logprobs, dense(
        problem._replace(bias=torch.zeros(V).double())).stats.logprobs) < 1e-12  # fmt: skip


def test_activation_recomputation() -> None:
    """Under a checkpoint the forward runs twice; the gradient is there once."""
    problem = make()
    truth = dense(problem)
    masked = problem._replace(upstream=[torch.where(problem.keep, g, 0) for g in problem.upstream])
    for mode in MODES:
        for reentrant in (False, True):
            operands = [x.clone().requires_grad_() for x in problem[:3]]

            def head(hidden: Tensor, weight: Tensor, bias: Tensor, mode: LinearMode = mode) -> Tensor:
                loss = linear_token_stats(
                    hidden, weight, problem.targets, bias=bias, mode=mode, budget=SMALL * 2, objective=masked.objective
                ).loss
                assert loss is not None
                return loss

            torch.utils.checkpoint.checkpoint(head, *operands, use_reentrant=reentrant).backward()
            for x, want in zip(operands, truth.gradients, strict=True):
                assert error(x.grad, want) < 1e-12


@pytest.mark.parametrize("scale", [None, 0.3])
@pytest.mark.parametrize("size", [1, 40_000, 1 << 16, 300_001])
def test_a_gradient_is_rounded_over_its_own_bytes(size: int, scale: float | None) -> None:
    values, factor = torch.randn(size, 1), None if scale is None else torch.tensor(scale)
    want = (values * (1.0 if scale is None else scale)).bfloat16()
    assert torch.equal(scaled_to_(values, factor, torch.bfloat16), want)
