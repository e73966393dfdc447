"""Whole logits of an `LMHeadInput`, as losses on whole distributions read them."""

from __future__ import annotations

import math

import pytest
import torch

from parallel_rl import LMHeadInput, count_valid, get_loss
from parallel_rl.vocab.backends.torch_backend import math_dtype
from parallel_rl.vocab.linear.lm_head import whole_logits
from tests.vocab.linear.cases import error

B, S, D, V, PADDED = 2, 9, 64, 50, 53


def operands(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    hidden, weight, bias = torch.randn(B, S, D, generator=g), torch.randn(PADDED, D, generator=g), torch.randn(PADDED)
    return hidden.to(dtype).double(), (weight * 3).to(dtype).double(), bias.to(dtype).double()


@pytest.mark.parametrize("softcap", [None, 20.0])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_nothing_is_rounded_before_the_gradient(dtype: torch.dtype, softcap: float | None) -> None:
    """Logits of low-precision operands are exact to float32: rounding them would cost log-probs three digits."""
    keep = torch.arange(B * S) % 3 != 1
    truth = [x.clone().requires_grad_() for x in operands(dtype)]
    given = [x.detach().to(dtype).requires_grad_() for x in truth]
    z = torch.where(keep.view(B, S, 1), truth[0], 0) @ truth[1][:V].T + truth[2][:V]
    z = z if softcap is None else softcap * torch.tanh(z / softcap)
    got = whole_logits(LMHeadInput(*given, softcap=softcap), keep, V, None)  # type: ignore[arg-type]
    assert got.dtype == torch.float32 and got.shape == (B, S, PADDED)
    assert error(got[..., :V].flatten(0, 1)[keep], z.flatten(0, 1)[keep]) < 1e-6
    upstream = torch.randn(B, S, V, generator=torch.Generator().manual_seed(1)).double()
    upstream = torch.where(keep.view(B, S, 1), upstream, 0)
    (z * upstream).sum().backward()
    (got[..., :V] * upstream.float()).sum().backward()
    for x, want in zip(given, truth, strict=True):
        assert error(x.grad, want.grad) <= 1.1 * error(want.grad.to(dtype), want.grad) + 1e-6  # type: ignore[union-attr]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("factor", [1.0, 0.25])
def test_the_gradient_goes_into_main_grad(factor: float, dtype: torch.dtype) -> None:
    """Megatron's data parallelism drops what autograd brings once another loss of the step has added there."""
    hidden, weight, _ = (x.to(dtype) for x in operands(torch.bfloat16))
    keep, upstream = torch.arange(B * S) % 3 != 1, torch.randn(B, S, V, generator=torch.Generator().manual_seed(1))
    whole = weight.double().clone().requires_grad_()
    (torch.where(keep.view(B, S, 1), hidden.double() @ whole[:V].T, 0) * upstream).sum().backward()
    weight.requires_grad_().main_grad = torch.ones(PADDED, D, dtype=math_dtype(dtype))  # type: ignore[attr-defined]
    for _ in range(2):
        weight.grad = None
        head = LMHeadInput(hidden, weight, main_grad_factor=factor)
        (whole_logits(head, keep, V, None)[..., :V] * upstream).sum().backward()
        assert weight.grad is not None and weight.grad_added_to_main_grad and not weight.grad.any()  # type: ignore[attr-defined]
        weight.grad += 1  # the zeros are not made anew each time, so somebody may write to them
    assert whole.grad is not None
    added = weight.main_grad - 1  # type: ignore[attr-defined]
    assert error(added, 2 * factor * whole.grad) < (1e-6 if dtype == torch.bfloat16 else 1e-14)


@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_padding_rows_of_the_weight_may_hold_anything(poison: float) -> None:
    """0 · NaN: as a factor of the hidden states' gradient a padding row would spoil all of it."""
    hidden, weight, bias = operands(torch.float32)
    hidden, g = hidden.float(), torch.Generator().manual_seed(2)
    data = {
        "input_ids": torch.randint(V, (B, S), generator=g),
        "token_mask": torch.ones(B, S),
        "sample_mask": torch.ones(B),
    }
    data["teacher_logits"] = torch.randn(B, S, PADDED, generator=g)
    loss_fn, found = get_loss("full_distillation")(vocab_size=V), []
    for dirt in (0.0, poison):
        leaves = [x.float().clone() for x in (hidden, weight, bias)]
        leaves[1][V:], leaves[2][V:] = dirt, dirt
        for x in leaves:
            x.requires_grad_()
        loss, _ = loss_fn(LMHeadInput(*leaves), data, *count_valid(data))
        loss.backward()
        found.append([loss.detach(), *(x.grad for x in leaves)])
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=0)
    assert not found[1][2][V:].any()
