"""The kernels beside float64 and beside the torch backend: dtypes, shapes, options."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from parallel_rl import token_stats
from tests.vocab.triton_cases.common import (
    DEVICE,
    check,
    error,
    logits_and_targets,
    run,
    same_bits,
    same_sums,
    upstream,
)

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# one lane row and less; one whole tile; several whole tiles and a rest, of rows that begin anywhere and at 16 bytes
SHAPES = [(6, 37), (3, 4096), (3, 9005), (3, 9008)]


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        *((shape, torch.float32) for shape in SHAPES),
        *((shape, torch.bfloat16) for shape in SHAPES[2:]),
        *((shape, torch.float16) for shape in SHAPES[:3:2]),
    ],
    ids=str,
)
def test_error_against_float64(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    check(*logits_and_targets(*shape, dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_accuracy_does_not_depend_on_the_size_of_the_logits(dtype: torch.dtype) -> None:
    check(*logits_and_targets(6, 300, dtype, shift=300.0))


@pytest.mark.parametrize("names", ["l--", "-e-", "--l", "le-", "l-l", "-el"])
def test_any_combination_of_gradients(names: str) -> None:
    check(*logits_and_targets(4, 70, torch.float32), upstream(4, names))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_without_entropy(dtype: torch.dtype) -> None:
    assert "entropy" not in check(*logits_and_targets(4, 70, dtype), upstream(4, "l-l"), entropy=False)


def test_gradients_that_a_sum_expands() -> None:
    logits, targets = logits_and_targets(4, 70, torch.float32)
    z = logits.clone().requires_grad_()
    token_stats(z, targets, backend="triton").logprobs.sum().backward()
    want = run(logits, targets, [torch.ones(4, device=DEVICE), None, None], "triton")["gradient"]
    assert z.grad is not None and torch.equal(z.grad, want)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", ["number", "scalar tensor", "per token"])
def test_temperature(kind: str, dtype: torch.dtype) -> None:
    """In float32, after the logits were raised: a bfloat16 z / T would be far outside the limit."""
    per_token = torch.linspace(0.5, 2, 5, device=DEVICE)
    temperature = {"number": 0.7, "scalar tensor": torch.tensor(0.7, device=DEVICE), "per token": per_token}[kind]
    check(*logits_and_targets(5, 300, dtype), temperature=temperature)


@pytest.mark.parametrize("tokens", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_few_rows_are_split_over_programs(dtype: torch.dtype, tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from parallel_rl.vocab.backends.triton import operators

    logits, targets = logits_and_targets(tokens, 20005, dtype)
    logits[0, :9000] = -torch.inf  # a part of the row with nothing in it
    targets[0] = 15000
    monkeypatch.setattr(operators, "processors", lambda device: 0)
    assert _splits(tokens, 20005, 0) == 1
    whole = run(logits, targets, upstream(tokens), "triton")
    monkeypatch.setattr(operators, "processors", lambda device: 2)
    assert _splits(tokens, 20005, 2) > 2
    split = check(logits, targets)
    for name, value in split.items():
        assert error(value, whole[name]) < 1e-6


def _splits(tokens: int, width: int, processors: int) -> int:
    from parallel_rl.vocab.backends.choice import CUTS, tiling

    return tiling(tokens, width, 2, processors, CUTS["stats", (9, 0)]).splits


def test_every_column_is_in_exactly_one_program() -> None:
    from parallel_rl.vocab.backends.choice import CUTS, tiling

    for cut in CUTS.values():
        for tokens in (0, 1, 5, 500, 9000):
            for width in (0, 1, 31, 4096, 4097, 16032, 151936):
                for itemsize in (2, 4):
                    for processors in (0, 1, 132):
                        tile = tiling(tokens, width, itemsize, processors, cut)
                        assert (tile.splits - 1) * tile.columns < max(width, 1) <= tile.splits * tile.columns
                        assert tile.columns % (tile.lanes * tile.per_lane) == 0
                        assert tile.per_lane * itemsize == 16  # what one thread loads at once
    assert _splits(8192, 128256, 132) == 1
    assert _splits(8, 128256, 132) == 32  # a tile each


@pytest.mark.parametrize("rows", [500, 700, 1100, 1400, 2048, 3000])
def test_few_rows_fill_the_last_wave(rows: int) -> None:
    """12 programs of a shard's pass fit a multiprocessor at once: with rows whole, 700 took as long as 1584 would."""
    at_once = 132 * 12
    programs = rows * _splits(rows, 128256, 132)
    assert programs / (-(-programs // at_once) * at_once) > 0.75


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_consumed_logits_hold_the_gradient_in_place(dtype: torch.dtype) -> None:
    logits, targets = logits_and_targets(5, 300, dtype)
    targets = targets.clamp(max=290)
    kept = run(logits, targets, upstream(5), "triton", vocab_size=291)
    consumed = run(logits, targets, upstream(5), "triton", vocab_size=291, consume_logits=True)
    assert same_bits(kept, consumed)
    leaf = logits.clone().requires_grad_()
    z, seen = leaf * 1, []
    z.register_hook(lambda gradient: seen.append(gradient.data_ptr()))
    token_stats(z, targets, backend="triton", consume_logits=True, vocab_size=291).lse.sum().backward()
    assert seen == [z.data_ptr()]


def test_rows_and_columns_at_any_stride() -> None:
    logits, targets = logits_and_targets(4, 300, torch.bfloat16)
    want = run(logits, targets, upstream(4), "triton")
    wide = torch.full((4, 700), torch.nan, dtype=logits.dtype, device=DEVICE)
    apart = wide[:, 100:400]
    apart.copy_(logits)
    across = logits.t().contiguous().t()
    assert apart.stride() == (700, 1) and across.stride() == (1, 4)
    for z in (apart, across):
        assert same_sums(want, run(z, targets, upstream(4), "triton"))
    expanded = logits[:1].expand(4, 300)
    repeated = logits[:1].repeat(4, 1)
    z, same = (x.detach().requires_grad_() for x in (expanded, repeated))
    for x in (z, same):
        token_stats(x, targets, backend="triton").logprobs.sum().backward()
    assert z.grad is not None and same.grad is not None and same_sums({"gradient": z.grad}, {"gradient": same.grad})


class Launches:
    """A kernel, and whether each of its launches took rows to begin at 16 bytes."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self.aligned: list[bool] = []

    def __getitem__(self, grid: Any) -> Any:
        def launch(*arguments: Any, **constants: Any) -> None:
            self.aligned.append(constants["ALIGNED_ROWS"])
            self.kernel[grid](*arguments, **constants)

        return launch


@pytest.mark.parametrize(
    ("first", "stride", "aligned", "dtype", "splits"),
    [
        (0, 9024, True, torch.float32, True),
        (8, 9024, True, torch.bfloat16, False),
        (3, 9024, False, torch.bfloat16, False),
        (0, 9025, False, torch.float32, True),
        (8, 9020, True, torch.float32, True),
        (8, 9020, False, torch.bfloat16, False),
        (4, 9024, True, torch.float32, True),
        (4, 9024, False, torch.bfloat16, False),
    ],
    ids=str,
)
def test_rows_begin_anywhere(
    first: int, stride: int, aligned: bool, dtype: torch.dtype, splits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By their stride and by where the first one lies; neighbours are never read, whole rows or parts of them."""
    from parallel_rl.vocab.backends.triton import operators

    monkeypatch.setattr(operators, "processors", lambda device: 2 if splits else 0)
    stats, gradient = Launches(operators.stats_kernel), Launches(operators.gradient_kernel)
    monkeypatch.setattr(operators, "stats_kernel", stats)
    monkeypatch.setattr(operators, "gradient_kernel", gradient)
    values, targets = logits_and_targets(3, 9008, dtype)
    wide = torch.full((3, stride), torch.nan, dtype=dtype, device=DEVICE)
    logits = wide[:, first : first + 9008]
    logits.copy_(values)
    for entropy in (True, False):
        got = check(logits, targets, upstream(3, "lel" if entropy else "l-l"), entropy=entropy)
        assert got["gradient"].isfinite().all()
    # the gradient, a new tensor of 9008 columns a row, begins at 16 bytes
    assert stats.aligned == gradient.aligned == [aligned] * 2


def test_targets_and_masks_at_any_stride_and_dtype() -> None:
    logits, targets = logits_and_targets(6, 50, torch.float32)
    targets[2] = -100
    want = run(logits, targets, upstream(6), "triton")
    apart = torch.stack([targets, targets], dim=1)[:, 0]
    assert apart.stride() == (2,)
    for other in (apart, targets.int()):
        assert same_bits(want, run(logits, other, upstream(6), "triton"))


@pytest.mark.parametrize("shape", [(0, 20), (4, 0)])
def test_nothing_to_do(shape: tuple[int, int]) -> None:
    logits = torch.zeros(shape, device=DEVICE, requires_grad=True)
    targets = torch.zeros(shape[0], dtype=torch.int64, device=DEVICE)
    options = {"vocab_size": 20, "vocab_start": 20} if shape[1] == 0 else {}
    if shape[1] == 0:  # this rank's shard of an uneven split
        from parallel_rl.vocab.backends.triton.operators import vocab_gradient, vocab_stats

        keep, inv_t = torch.ones(4, dtype=torch.bool, device=DEVICE), torch.ones(1, 1, device=DEVICE)
        parts = vocab_stats(logits.detach(), targets, keep, inv_t, 20, 0, True)
        assert parts.tolist() == [[-torch.inf, 0.0, -torch.inf, 0.0]] * 4
        rows, g = torch.zeros(4, 3, device=DEVICE), torch.zeros(4, device=DEVICE)
        assert vocab_gradient(logits.detach(), targets, keep, inv_t, rows, g, g, g, 20, 0).shape == shape
        return
    stats = token_stats(logits, targets, backend="triton", **options)
    assert stats.logprobs.shape == (0,)
    stats.lse.sum().backward()
    assert logits.grad is not None and logits.grad.shape == shape


def test_a_repeat_gives_the_same_bits() -> None:
    logits, targets = logits_and_targets(4, 9005, torch.bfloat16)
    assert same_bits(run(logits, targets, upstream(4), "triton"), run(logits, targets, upstream(4), "triton"))


def test_float64_stays_with_torch() -> None:
    logits, targets = logits_and_targets(4, 37, torch.float32)
    got = run(logits.double(), targets, upstream(4), "triton")
    assert got["log-prob"].dtype == torch.float64
    assert same_bits(got, run(logits.double(), targets, upstream(4), "eager"))


@pytest.mark.parametrize("name", ["nll", "clipped_pg"])
def test_a_loss_is_the_same_on_either_backend(name: str) -> None:
    from parallel_rl import ClippedPGLossFn, NLLLoss

    g = torch.Generator().manual_seed(3)
    ids = torch.randint(0, 50, (2, 5), generator=g)
    mask = torch.ones(2, 5)
    mask[1, 3:] = 0
    fields = {"prev_logprobs", "generation_logprobs", "reference_policy_logprobs", "advantages"}
    data = {"input_ids": ids, "token_mask": mask, "sample_mask": torch.ones(2)}
    data |= {field: torch.randn(2, 5, generator=g) / 10 - 4 * (field != "advantages") for field in sorted(fields)}
    data = {field: value.to(DEVICE) for field, value in data.items()}
    logits = torch.randn(2, 5, 50, generator=g).to(DEVICE)
    results = []
    for backend in ("eager", "triton"):
        config = {} if name == "nll" else {"reference_policy_kl_penalty": 0.1}
        loss_fn = NLLLoss(backend=backend) if name == "nll" else ClippedPGLossFn(config, backend=backend)
        z = logits.clone().requires_grad_()
        loss, _ = loss_fn(z, data, torch.tensor(2, device=DEVICE), torch.tensor(6, device=DEVICE))
        loss.backward()
        assert z.grad is not None
        results.append((loss.detach(), z.grad))
    torch.testing.assert_close(results[1], results[0], rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("mode", ["in_forward", "resident", "recompute"])
def test_from_hidden_states(mode: str) -> None:
    from parallel_rl import linear_token_stats

    g = torch.Generator().manual_seed(4)
    hidden, weight = (torch.randn(n, 8, generator=g).to(DEVICE) for n in (6, 40))
    targets = torch.randint(0, 40, (6,), generator=g).to(DEVICE)
    targets[1] = -100
    results = []
    for backend in ("eager", "triton"):
        h, w = (x.clone().requires_grad_() for x in (hidden, weight))
        stats = linear_token_stats(
            h, w, targets, temperature=0.7, mode=mode, rows=5, backend=backend,
            objective=(lambda stats: (stats.logprobs * stats.entropy).sum()) if mode == "in_forward" else None,
        )  # fmt: skip
        total = stats.loss if mode == "in_forward" else (stats.logprobs * stats.entropy).sum()
        total.backward()
        assert h.grad is not None and w.grad is not None
        results.append([stats.logprobs.detach(), stats.entropy.detach(), h.grad, w.grad])
    torch.testing.assert_close(results[1], results[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("budget", "softcap"), [(7000, None), (7000, 4.0), (1 << 22, None)])  # pieces, and all at once
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("mode", ["in_forward", "resident", "recompute"])
def test_low_precision_from_hidden_states(mode: str, dtype: torch.dtype, softcap: float | None, budget: int) -> None:
    """The gradient of the logits is rounded as the products take it, of kept logits over their own bytes."""
    from parallel_rl import linear_token_stats
    from tests.vocab.linear.cases import dense, make

    if (mode, dtype) == ("in_forward", torch.float16):
        return  # refused
    problem = make(dtype)
    truth = dense(problem, softcap=softcap, temperature=0.7)
    operands = [x.to(DEVICE, dtype).requires_grad_() for x in problem[:3]]
    masked = problem._replace(upstream=[torch.where(problem.keep, g, 0).to(DEVICE) for g in problem.upstream])
    stats = linear_token_stats(
        operands[0], operands[1], problem.targets.to(DEVICE), bias=operands[2], softcap=softcap, temperature=0.7, mode=mode,
        budget=budget, backend="triton", objective=masked.objective if mode == "in_forward" else None,
    )  # fmt: skip
    loss = masked.objective(stats) if stats.loss is None else stats.loss
    loss.backward()
    for got, want in zip(stats[:3], truth.stats[:3], strict=True):
        assert error(got.cpu(), want) < 2e-6
    for leaf, want in zip(operands, truth.gradients, strict=True):
        rounding = error(want.to(dtype), want)
        assert error(leaf.grad.cpu(), want) <= 2.5 * rounding + (5e-4 if mode == "resident" else 0)


def test_a_gradient_of_another_type_over_the_bytes_of_the_logits() -> None:
    from parallel_rl.vocab.backends.passes import RowSpec, combine_rows, row_gradient, row_parts

    logits, targets = logits_and_targets(5, 9005, torch.float16)
    keep = torch.arange(5, device=DEVICE) != 1
    spec = RowSpec(targets, keep, torch.full((1, 1), 0.7, device=DEVICE), 0, 9001)
    rows = combine_rows(row_parts(logits, spec, True, "triton")[None], spec, "triton")[-1]
    apart = torch.full_like(logits, torch.nan, dtype=torch.bfloat16)
    row_gradient(logits, spec, rows, upstream(5), apart, "triton")
    over = logits.clone()
    row_gradient(over, spec, rows, upstream(5), over.view(torch.bfloat16), "triton")
    assert torch.equal(over.view(torch.bfloat16), apart) and not apart[1].any() and not apart[:, 9001:].any()
    exact = row_gradient(logits.double(), spec, rows.double(), upstream(5), None, "eager")
    assert error(apart, exact) <= 1.01 * error(exact.to(torch.bfloat16), exact)


@pytest.mark.parametrize("entropy", [True, False])
def test_errors_of_many_tokens_do_not_add_up(entropy: bool) -> None:
    """log2 e rounded to float32 makes each e^u a little too small: 6e-4 over 32 thousand tokens, ten times what rounding makes.

    Half of a row's mass lies c below its maximum, so that nearly nothing but the exponential's error is left in the mean.
    """
    c = torch.linspace(6, 9, 256)
    z = torch.zeros(256, 512)
    z[:, 0] = c
    targets = torch.zeros(256, dtype=torch.int64, device=DEVICE)
    stats = token_stats(z.to(DEVICE), targets, entropy=entropy, backend="triton")
    log_p = z.double().log_softmax(1)
    assert abs((stats.logprobs.double().cpu() - log_p[:, 0]).mean().item()) < 2e-8
    if stats.entropy is not None:
        assert abs((stats.entropy.double().cpu() + (log_p.exp() * log_p).sum(1)).mean().item()) < 1e-7
