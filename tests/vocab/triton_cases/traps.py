"""What implementations of these sums are known to get wrong, one test each."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from parallel_rl import token_stats
from tests.vocab.triton_cases.common import DEVICE, check, logits_and_targets, run, same_bits, same_sums, upstream


def test_logits_changed_between_forward_and_backward_are_noticed() -> None:
    logits, targets = logits_and_targets(4, 37, torch.float32)
    z = logits.requires_grad_() * 1
    total = token_stats(z, targets, backend="triton").logprobs.sum()
    with torch.no_grad():
        z.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        total.backward()


def test_a_second_backward_through_consumed_logits_is_refused() -> None:
    logits, targets = logits_and_targets(4, 37, torch.float32)
    z = logits.requires_grad_() * 1
    total = token_stats(z, targets, backend="triton", consume_logits=True).logprobs.sum()
    total.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="consume_logits=False"):
        total.backward()


def test_another_reader_of_consumed_logits_is_noticed() -> None:
    """Whoever saved the logits for a backward of its own learns that they are gone."""
    logits, targets = logits_and_targets(4, 37, torch.float32)
    z = logits.requires_grad_() * 1
    other = z.square().sum()
    token_stats(z, targets, backend="triton", consume_logits=True).logprobs.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        other.backward()


def test_logits_that_cannot_be_overwritten_are_refused() -> None:
    logits, targets = logits_and_targets(4, 37, torch.float32)
    for z in (logits[:1].expand(4, 37), logits.t().contiguous().t()):
        with pytest.raises(ValueError, match="must be contiguous"):
            token_stats(z, targets, backend="triton", consume_logits=True)


def test_double_backward_is_refused() -> None:
    logits, targets = logits_and_targets(4, 37, torch.float32)
    z = logits.requires_grad_()
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(token_stats(z, targets, backend="triton").lse.sum(), z, create_graph=True)


@pytest.mark.parametrize("poison", [1e4, math.inf, math.nan])
def test_padding_does_not_count_whatever_it_holds(poison: float) -> None:
    logits, targets = logits_and_targets(4, 300, torch.float32)
    targets = targets.clamp(max=256)
    want = run(logits[:, :257].contiguous(), targets, upstream(4), "triton")
    logits[:, 257:] = poison
    got = run(logits, targets, upstream(4), "triton", vocab_size=257)
    assert not got["gradient"][:, 257:].any()
    got["gradient"] = got["gradient"][:, :257]
    for name, value in want.items():
        assert_close(got[name], value, rtol=1e-6, atol=1e-7)


def test_forbidden_columns_are_as_if_not_there() -> None:
    """−inf: p·log p is 0 there; a forbidden target has log-prob −inf and a finite gradient."""
    logits, targets = logits_and_targets(4, 300, torch.float32)
    targets = targets % 20
    want = run(logits[:, :20].contiguous(), targets, upstream(4), "triton")
    logits[:, 20:] = -math.inf
    got = check(logits, targets)
    assert not got["gradient"][:, 20:].any()
    got["gradient"] = got["gradient"][:, :20]
    for name, value in want.items():
        assert_close(got[name], value, rtol=1e-6, atol=1e-7)
    z = logits.clone().requires_grad_()
    logprobs = token_stats(z, torch.full_like(targets, 30), backend="triton").logprobs
    logprobs.sum().backward()
    assert bool((logprobs == -math.inf).all()) and z.grad is not None and bool(z.grad.isfinite().all())


@pytest.mark.parametrize("temperature", [0.8, 1.0, 30.0])
def test_forbidden_columns_without_entropy(temperature: float) -> None:
    """No bound keeps −inf from the two parts of log2 e / temperature: it is NaN if one is below 0, as the rest of 0.8's is."""
    logits, targets = logits_and_targets(4, 4200, torch.float32)
    logits[:, 20:4150] = -math.inf  # whole lanes, and columns of one
    logits[:, 4150:4190] = torch.finfo(torch.float32).min
    check(logits, targets % 20, upstream(4, "l-l"), entropy=False, temperature=temperature)


@pytest.mark.parametrize("top", [-1000.0, -100.0, 1000.0])
def test_a_row_far_from_zero(top: float) -> None:
    """A running maximum that starts at 0, or a tail read as 0, shows here: the rest of a tile must not enter."""
    logits, targets = logits_and_targets(3, 41, torch.float32)
    check(logits / 100 + top, targets)


def test_a_flat_row() -> None:
    logits = torch.zeros(2, 4099, device=DEVICE)
    got = run(logits, torch.tensor([0, 4098], device=DEVICE), upstream(2), "triton")
    assert_close(got["entropy"], torch.full((2,), math.log(4099), device=DEVICE), rtol=1e-6, atol=0)
    assert_close(got["log-prob"], torch.full((2,), -math.log(4099), device=DEVICE), rtol=1e-6, atol=0)


def test_rows_that_do_not_count_are_exact_zeros_and_not_read() -> None:
    logits, targets = logits_and_targets(6, 300, torch.bfloat16)
    want = run(logits, targets, upstream(6), "triton")
    ignored = torch.arange(6, device=DEVICE) % 2 == 0
    poison = torch.tensor([math.nan, math.inf, -math.inf], device=DEVICE).repeat(100)
    logits[ignored] = poison.to(logits.dtype)
    targets[ignored] = -100
    gradients = [g.masked_fill(ignored, math.nan) for g in upstream(6) if g is not None]
    temperature = torch.ones(6, device=DEVICE).masked_fill(ignored, math.nan)
    got = run(logits, targets, list(gradients), "triton", temperature=temperature)
    for name, value in got.items():
        assert bool((value[ignored] == 0).all())
        assert torch.equal(value[~ignored], want[name][~ignored])
    inv_t = torch.ones(1, 1, device=DEVICE)
    parts = torch.ops.parallel_rl.vocab_stats(logits, targets, ~ignored, inv_t, 0, 300, True)
    assert parts[ignored].tolist() == [[-math.inf, 0.0, -math.inf, 0.0]] * 3  # as of a shard without a column: not read


def test_nan_and_infinity_in_a_row_that_counts_are_not_hidden() -> None:
    logits, targets = logits_and_targets(5, 300, torch.float32)
    logits[0, 7], logits[1, 200], logits[2] = math.nan, math.inf, -math.inf
    got = run(logits, targets, upstream(5), "triton")
    for name, value in got.items():
        bad = value.isnan() if value.dim() == 1 else value.isnan().any(1)
        assert bool(bad[:2].all()) and not bool(bad[3:].any()), name
    assert bool(got["log-prob"][2].isnan())


def test_a_target_elsewhere_has_no_log_prob_here() -> None:
    """Off the shard, in the padding or negative: t is −inf, and no column of the gradient is its."""
    from parallel_rl.vocab.backends.triton.operators import vocab_gradient, vocab_stats

    logits, _ = logits_and_targets(5, 40, torch.float32)
    targets = torch.tensor([99, 100, 130, 139, -1], device=DEVICE)  # the shard holds 100 to 129 and padding
    keep, inv_t = torch.ones(5, dtype=torch.bool, device=DEVICE), torch.ones(1, 1, device=DEVICE)
    parts = vocab_stats(logits, targets, keep, inv_t, 100, 30, True)
    assert parts[:, 2].isfinite().tolist() == [False, True, False, False, False]
    rows = torch.stack([parts[:, 0], parts[:, 1].log(), parts[:, 3]], dim=1)
    one = torch.ones(5, device=DEVICE)
    dz = vocab_gradient(logits, targets, keep, inv_t, rows, one, None, None, 100, 30)
    p = torch.softmax(logits[:, :30], 1)
    hit = torch.zeros_like(p)
    hit[1, 0] = 1
    assert_close(dz[:, :30], hit - p, rtol=1e-5, atol=1e-6)
    assert not dz[:, 30:].any()


def test_log_probs_are_not_rounded_to_the_logits_dtype() -> None:
    got = check(*logits_and_targets(6, 300, torch.bfloat16))
    assert got["log-prob"].dtype == torch.float32
    assert not torch.equal(got["log-prob"], got["log-prob"].bfloat16().float())


@pytest.mark.parametrize("across", [0, 256, 257], ids=["rows", "columns of a whole tile", "columns of a tail"])
def test_offsets_beyond_32_bits(across: int) -> None:
    """The last row or columns lie beyond 2^31 elements, at a stride that fits 32 bits.

    Of the 4 GB only the pages that hold a logit are touched.
    """
    shape, strides = ((3, across), (1, (1 << 23) + (1 << 16))) if across else ((3, 300), ((1 << 30) + 8, 1))
    size = sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True)) + 1
    memory = torch.empty(size, dtype=torch.bfloat16, device=DEVICE)
    logits, targets = logits_and_targets(*shape, torch.bfloat16)
    far = memory.as_strided(shape, strides)
    far.copy_(logits)
    want = run(logits, targets, upstream(3), "triton")
    from parallel_rl.vocab.backends.triton.operators import vocab_combine, vocab_gradient_, vocab_stats

    keep, inv_t = torch.ones(3, dtype=torch.bool, device=DEVICE), torch.ones(1, 1, device=DEVICE)
    parts = vocab_stats(far, targets, keep, inv_t, 0, shape[1], True)
    logprobs, _, _, rows, _ = vocab_combine(parts[None], keep, inv_t)
    vocab_gradient_(far, targets, keep, inv_t, rows, *upstream(3), 0, shape[1])
    assert same_sums({"log-prob": logprobs, "gradient": far}, want)


@pytest.mark.parametrize("entropy", [False, True])
def test_nothing_of_the_logits_size_is_saved(entropy: bool) -> None:
    logits, targets = logits_and_targets(4, 3000, torch.float32)
    z = logits.requires_grad_()
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        token_stats(z, targets, backend="triton", entropy=entropy)
    beyond = [x for x in saved if x.data_ptr() != z.data_ptr()]
    assert len(beyond) == len(saved) - 1
    assert sum(x.numel() for x in beyond) <= 6 * 4 + 1


def test_the_two_backends_agree_on_what_a_shard_says() -> None:
    """The parts are the same numbers, so that one rank may run without Triton."""
    from parallel_rl.vocab.backends.passes import RowSpec, row_parts

    logits, targets = logits_and_targets(5, 300, torch.float32)
    spec = RowSpec(targets, targets >= 0, torch.full((1, 1), 1.4, device=DEVICE), 0, 290)
    assert_close(row_parts(logits, spec, True, "triton"), row_parts(logits, spec, True, "eager"), rtol=1e-5, atol=1e-5)


def test_a_repeated_backward_without_consuming_is_the_same() -> None:
    logits, targets = logits_and_targets(4, 70, torch.bfloat16)
    z = logits.requires_grad_()
    total = token_stats(z, targets, backend="triton").logprobs.sum()
    (first,) = torch.autograd.grad(total, z, retain_graph=True)
    (second,) = torch.autograd.grad(total, z)
    assert same_bits({"gradient": first}, {"gradient": second})


@pytest.mark.parametrize("scale", [1.0, 2.0**32])
def test_a_forbidden_word_an_entropy_term_and_a_loss_scale(scale: float) -> None:
    """p·(c0 + c1·log p) at p = 0: c1 carries the loss scale, and log p must not make their product infinite."""
    z = torch.tensor([[0.5, -math.inf, 1.0, -5000.0], [1.0, 2.0, -math.inf, -200.0]], device=DEVICE, requires_grad=True)
    stats = token_stats(z, torch.tensor([0, 1], device=DEVICE), backend="triton")
    assert stats.entropy is not None
    (stats.entropy.sum() * scale).backward()
    x = z.detach().double().clamp(min=-1e4).requires_grad_()
    log_p = x.log_softmax(1)
    (-(log_p.exp() * log_p).sum() * scale).backward()
    assert z.grad is not None and x.grad is not None
    assert_close(z.grad.double(), x.grad, rtol=1e-5, atol=1e-7 * scale)


@pytest.mark.parametrize("scale", [1e-3, 1.0, 30.0])
@pytest.mark.parametrize("shape", [(5, 37), (2, 9000)], ids=str)
def test_sum_of_squared_probabilities(shape: tuple[int, int], scale: float) -> None:
    """One more column of the same pass, over lanes, splits of a row and shards; the others keep their bits."""
    logits, targets = logits_and_targets(*shape, torch.float32)
    z = (logits * scale).to(DEVICE)
    stats = token_stats(z, targets, sum_pi_squared=True, backend="triton")
    assert_close(stats.sum_pi_squared.double(), z.double().softmax(1).square().sum(1), rtol=2e-5, atol=1e-9)  # type: ignore[union-attr]
    plain = token_stats(z, targets, backend="triton")
    for mine, other in zip(stats[:3], plain[:3], strict=True):
        assert torch.equal(mine, other)  # type: ignore[arg-type]
