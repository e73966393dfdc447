"""A loss on an `LMHeadInput` under the sampler's truncation: the numbers of whole logits, whatever it weighs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from parallel_rl import (
    LMHeadInput,
    LossFn,
    PolicyLossFn,
    TokenBatch,
    count_valid,
    reduce_metrics,
    register_objective,
    token_logprobs,
)
from parallel_rl.validation import validation
from parallel_rl.vocab.linear.plan import LinearMode
from tests.losses.test_no_sync import make
from tests.vocab.linear.cases import error

D, V = 8, 24
FEW_ROWS = 4000  # bytes: chunks of a few rows

RULES: dict[str, dict] = {"top-k": {"top_k": 7}, "top-p": {"top_p": 0.8, "top_k": 15}, "recorded": {"kept_sets": True}}


def truncated_batch(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Rounded hidden states and weight in float64, and data of which some tokens are not kept."""
    g = torch.Generator().manual_seed(0)
    _, data = make(4, 8, V, "cpu")
    hidden, weight = (torch.randn(*shape, D, generator=g).to(dtype).double() for shape in ((4, 8), (V,)))
    likely = (hidden @ weight.T)[:, :-1].argmax(-1)
    data["input_ids"][:, 1:] = torch.where(torch.rand(4, 7, generator=g) < 0.7, likely, 3)
    data["advantages"] = torch.randn(4, 8, generator=g)
    data["kept_ids"] = torch.stack([torch.randperm(V, generator=g)[:5] for _ in range(32)]).view(4, 8, 5)
    data["kept_ids"][..., 3:] = -1
    return hidden, weight, data


@pytest.mark.parametrize(("dtype", "softcap"), [(torch.float64, 3.0), (torch.bfloat16, None)], ids=str)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("mode", ["in_forward", "resident", "recompute"])
def test_a_truncated_policy(mode: LinearMode, rule: str, dtype: torch.dtype, softcap: float | None) -> None:
    """Loss, gradients, metrics and log-probs of the same logits, whole."""
    *operands, data = truncated_batch(dtype)
    counts, options = count_valid(data), {**RULES[rule], "temperature": 0.8}
    loss_fn = PolicyLossFn({"entropy_bonus": 0.1}, **options)
    whole, given = ([x.clone().to(kind).requires_grad_() for x in operands] for kind in (torch.float64, dtype))
    z = whole[0] @ whole[1].T
    z = z if softcap is None else softcap * torch.tanh(z / softcap)
    head = LMHeadInput(*given, softcap=softcap, mode=mode, budget=FEW_ROWS)
    want, got = (loss_fn(output, data, *counts) for output in (z, head))
    want[0].backward()
    got[0].backward()
    exact = 1e-12 if dtype == torch.float64 else 1e-5
    rounding = 1e-12 if dtype == torch.float64 else 6e-3
    torch.testing.assert_close(got[0].double(), want[0], rtol=exact, atol=exact)
    for mine, theirs in zip(given, whole, strict=True):
        assert mine.grad is not None and theirs.grad is not None
        assert error(mine.grad, theirs.grad) < rounding
    numbers = [{name: x.item() for name, x in reduce_metrics([metrics]).items()} for _, metrics in (got, want)]
    assert numbers[0] == pytest.approx(numbers[1], rel=10 * exact, abs=10 * exact)
    assert (numbers[0]["dropped_tokens"] > 0) == (rule != "recorded")
    torch.testing.assert_close(
        token_logprobs(head, data, **options).double(), token_logprobs(z, data, **options), rtol=exact, atol=exact
    )


@register_objective("doc_truncated_mean", token_fields=("advantages",), token_separable=True)
def ClaimsToSeparate(logprobs: Tensor, batch: TokenBatch) -> Tensor:
    """True of whole distributions, false where tokens leave the mask by their log-probs: n_i changes."""
    return -batch["advantages"] * logprobs.exp()


_TIS = {"mode": "tis", "high": 1.2}
_RULE = {"statistic": "k1", "low": 0.5, "high": 1.5, "level": "sequence-mean"}
BY_SEQUENCE: dict[str, LossFn] = {
    "mean of means": PolicyLossFn({"aggregation": "seq-mean-token-mean"}, top_k=7),
    "importance of sequences": PolicyLossFn({"importance": {**_TIS, "level": "sequence-mean"}}, top_p=0.8),
    "product of a sequence": PolicyLossFn({"importance": {**_TIS, "level": "sequence-sum"}}, kept_sets=True),
    "masked sequences": PolicyLossFn({"importance": {"mode": "seq-mask-tis", "low": 0.7, "high": 1.2}}, top_k=5),
    "rejected sequences": PolicyLossFn({"rejection": {"rules": [_RULE]}}, top_k=7),
    "ratio of sequences": PolicyLossFn({"ratio_level": "sequence-mean"}, top_k=7, top_p=0.9),
    "a user's claim": ClaimsToSeparate({"aggregation": "seq-mean-token-mean"}, top_k=7),
}


@pytest.mark.parametrize("budget", [FEW_ROWS, 1 << 20], ids=["recomputed", "kept"])
@pytest.mark.parametrize("name", BY_SEQUENCE)
def test_what_weighs_by_sequence(name: str, budget: int) -> None:
    """A dropped token takes its share of n_i and of a sequence's sums along, wherever the chunks end.

    Where values are not looked at, as on a GPU, nothing else would notice a gradient that was taken too early.
    """
    hidden, weight, data = truncated_batch(torch.float64)
    g = torch.Generator().manual_seed(1)
    for field in ("prev_logprobs", "generation_logprobs"):
        data[field] = -torch.rand(4, 8, generator=g, dtype=torch.float64) * 2
    counts, loss_fn = count_valid(data), BY_SEQUENCE[name]
    whole, given = ([x.clone().requires_grad_() for x in (hidden, weight)] for _ in range(2))
    want = loss_fn(whole[0] @ whole[1].T, data, *counts)[0]
    with validation("never"):
        got = loss_fn(LMHeadInput(given[0], given[1], budget=budget), data, *counts)[0]
        got.backward()
    want.backward()
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    for mine, theirs in zip(given, whole, strict=True):
        assert error(mine.grad, theirs.grad) < 1e-12
    with pytest.raises(ValueError, match="mode = 'in_forward' needs a loss that is a sum over tokens"):
        loss_fn(LMHeadInput(hidden, weight, mode="in_forward"), data, *counts)


@pytest.mark.parametrize("config", [{}, {"aggregation": "seq-mean-token-sum"}, {"importance": _TIS}], ids=str)
def test_what_weighs_by_token_is_still_differentiated_in_forward(config: dict) -> None:
    """The claim is not given up for the losses that keep it: they need one chunk of logits and no second projection."""
    hidden, weight, data = truncated_batch(torch.float64)
    head = LMHeadInput(hidden.requires_grad_(), weight, mode="in_forward", budget=FEW_ROWS)
    PolicyLossFn(config, top_k=7)(head, data, *count_valid(data))[0].backward()
    assert hidden.grad is not None


def test_two_distributions_are_refused() -> None:
    hidden, weight, data = truncated_batch(torch.float64)
    with pytest.raises(ValueError, match="reads two distributions of a token"):
        PolicyLossFn({"kl": {"coefficient": 0.1}}, top_k=3)(LMHeadInput(hidden, weight), data, *count_valid(data))
