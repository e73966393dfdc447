"""A temperature for each sample: as if its logits had been divided before, in every loss that reads them."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from parallel_rl import LMHeadInput, NLLLoss, SequencePackingLossWrapper, count_valid, get_loss, token_logprobs
from parallel_rl.losses.core.base import LossFn
from parallel_rl.testing.batches import VOCAB, make_batch, poisoned
from parallel_rl.testing.cases import Batch, Case, has_scalar_head, reduced_numbers, step_statistics
from parallel_rl.validation import validation
from parallel_rl.vocab.linear.plan import LinearMode
from tests.distributed.law import CORE, TRUNCATED
from tests.vocab.linear.cases import error

CASES = [case for case in [*CORE, *TRUNCATED] if not has_scalar_head(case.loss)]
MODES: tuple[LinearMode, ...] = ("in_forward", "resident", "recompute")


def run(loss_fn: LossFn, output: Tensor | LMHeadInput, data: dict[str, Tensor]) -> tuple[float, dict[str, float]]:
    call = (output, data, *count_valid(data))
    loss, metrics = loss_fn(
        *call, **({"statistics": step_statistics([(loss_fn, call)])} if loss_fn.needs_statistics else {})
    )
    loss.backward()
    return loss.item(), reduced_numbers([metrics])


def built(case: Case, temperature: float | str, **more: object) -> LossFn:
    return case.loss_class(case.config, **{**case.options, "temperature": temperature, **more})  # type: ignore[arg-type]


def batch_of(case: Case, temperature: Tensor | None = None) -> Batch:
    batch = make_batch(5, False, case.loss, torch.float64, truncated=case.truncated)
    if temperature is not None:
        batch.data["temperature"] = temperature
    return batch


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_one_for_all_is_the_option(case: Case) -> None:
    """What looks at the temperature by itself (a teacher's, a square of it) reads the sample's, too."""
    batch = batch_of(case, torch.full((12,), 0.7, dtype=torch.float64))
    found = []
    for temperature in (0.7, "per-sample"):
        leaf = batch.logits.clone().requires_grad_()
        loss, metrics = run(built(case, temperature), leaf, batch.data)
        found.append((loss, metrics, leaf.grad))
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-12) and found[1][1] == pytest.approx(found[0][1], rel=1e-12)
    torch.testing.assert_close(found[1][2], found[0][2], rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_as_if_the_logits_were_divided(case: Case) -> None:
    """Loss, metrics and gradient at mixed temperatures, against logits that carry them already."""
    batch = batch_of(case)
    t = batch.data["temperature"][:, None, None]
    clean = dict(batch.data)
    if "full_distillation" in case.name or ("distillation" in case.name and "teacher_temperature" not in case.config):
        pytest.skip("the teacher is divided as well; the test above and the law hold it")
    leaf, divided = (batch.logits.clone().requires_grad_() for _ in range(2))
    got = run(built(case, "per-sample"), leaf, poisoned(clean, built(case, 1.0)))
    want = run(built(case, 1.0), divided / t, clean)
    assert got[0] == pytest.approx(want[0], rel=1e-12, abs=1e-14) and got[1] == pytest.approx(
        want[1], rel=1e-11, abs=1e-12
    )
    torch.testing.assert_close(leaf.grad, divided.grad, rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("squared", [False, True])
@pytest.mark.parametrize("name", ["distillation", "full_distillation"])
def test_a_teacher_without_its_own_follows_the_sample(name: str, squared: bool) -> None:
    """p and q of each row from logits over its temperature, in float64, by hand."""
    if squared and name == "distillation":
        pytest.skip("has no such option")
    batch = batch_of(Case(name))
    t, data = batch.data["temperature"], batch.data
    config = {"squared_temperature": True} if squared else {}
    leaf = batch.logits.clone().requires_grad_()
    loss, _ = run(built(Case(name, config), "per-sample"), leaf, data)
    mask = data["token_mask"][:, 1:] * data["sample_mask"][:, None]
    q = batch.logits[:, :-1] / t[:, None, None]
    if name == "distillation":
        ids, teacher = (data[f"teacher_topk_{x}"][:, 1:] for x in ("indices", "logits"))
        q, p = q.gather(-1, ids).log_softmax(-1), (teacher / t[:, None, None]).log_softmax(-1)
    else:
        q, p = q.log_softmax(-1), (data["teacher_logits"][:, :-1] / t[:, None, None]).log_softmax(-1)
    config_of = built(Case(name, config), 1.0).config
    forward = getattr(config_of, "forward_weight", 1.0) if name == "distillation" else 1.0
    kl = forward * (p.exp() * (p - q)).sum(-1) + (1 - forward) * (q.exp() * (q - p)).sum(-1)
    kl = kl * (t[:, None] ** 2 if squared else 1)
    want = (torch.where(mask.bool(), kl, 0).sum() / mask.sum()).item()
    assert loss == pytest.approx(want, rel=1e-10)


@pytest.mark.parametrize("sequence_first", [False, True])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("options", [{}, {"top_k": 9}, {"top_p": 0.9}, {"kept_sets": True}], ids=str)
def test_from_hidden_states(options: dict, mode: LinearMode, sequence_first: bool) -> None:
    """Packed or not, chunk by chunk, in the order of the head: a row's threshold and its softmax have the row's temperature."""
    case = Case("policy", {"entropy_bonus": 0.1}, options)
    batch = batch_of(case)
    g = torch.Generator().manual_seed(0)
    weight = torch.linalg.qr(torch.randn(VOCAB, VOCAB, generator=g, dtype=torch.float64)).Q
    whole = batch.logits.clone().requires_grad_()
    hidden = (batch.logits @ weight).requires_grad_()
    given = hidden.transpose(0, 1).contiguous() if sequence_first else hidden * 1
    head = LMHeadInput(given, weight, sequence_first=sequence_first, mode=mode, budget=20_000)
    loss_fn = built(case, "per-sample")
    got, want = run(loss_fn, head, batch.data), run(loss_fn, whole, batch.data)
    assert got[0] == pytest.approx(want[0], rel=1e-12) and got[1] == pytest.approx(want[1], rel=1e-11)
    assert error(hidden.grad, whole.grad @ weight) < 1e-12  # type: ignore[operator]
    scores = token_logprobs(head, batch.data, temperature=batch.data["temperature"], **options)
    divided = whole.detach() / batch.data["temperature"][:, None, None]
    torch.testing.assert_close(scores, token_logprobs(divided, batch.data, **options), rtol=1e-12, atol=1e-12)


def test_packed_rows_keep_their_temperatures() -> None:
    batch = batch_of(Case("nll"))
    loss_fn, lengths = NLLLoss(temperature="per-sample"), torch.tensor(batch.lengths)
    packed = torch.cat([row[:n] for row, n in zip(batch.logits, batch.lengths, strict=True)])[None]
    bounds = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    counts = count_valid(batch.data)
    want = loss_fn(batch.logits, batch.data, *counts)[0]
    got = SequencePackingLossWrapper(loss_fn, bounds)(packed, batch.data, *counts)[0]
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("value", [0.0, -1.0, math.inf, math.nan])
def test_a_valid_sample_must_have_one(value: float) -> None:
    batch = batch_of(Case("nll"))
    batch.data["temperature"][4] = value  # a masked sample may hold anything
    loss_fn, counts = NLLLoss(temperature="per-sample"), count_valid(batch.data)
    loss_fn(batch.logits, batch.data, *counts)
    token_logprobs(batch.logits, batch.data, temperature=batch.data["temperature"])
    batch.data["temperature"][2] = value
    message = (
        "temperature is NaN at \\[2\\]" if math.isnan(value) else f"temperature = {value} of sample 2 must be positive"
    )
    with pytest.raises(ValueError, match=message):
        loss_fn(batch.logits, batch.data, *counts)
    with pytest.raises(ValueError, match=message):
        token_logprobs(batch.logits, batch.data, temperature=batch.data["temperature"])


def test_what_is_no_temperature() -> None:
    batch = batch_of(Case("nll"))
    counts, loss_fn = count_valid(batch.data), get_loss("policy")(temperature="per-sample")
    with pytest.raises(ValueError, match="temperature = 'each' must be a positive number or 'per-sample'"):
        NLLLoss(temperature="each")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="got a Tensor; 'per-sample' reads data"):
        NLLLoss(temperature=batch.data["temperature"])(batch.logits, batch.data, *counts)  # type: ignore[arg-type]
    for wrong, message in (
        (None, "data lacks the field 'temperature'"),
        (torch.ones(12, 16), r"temperature has shape \[12, 16\]"),
        (torch.ones(12).long(), "temperature must be floating point"),
    ):
        data = {name: x for name, x in batch.data.items() if name != "temperature"}
        with pytest.raises(ValueError, match=message):
            loss_fn(batch.logits, data if wrong is None else {**data, "temperature": wrong}, *counts)
    with pytest.raises(ValueError, match=r"temperature has shape \[3\]; .* calls for \[12\]"):
        token_logprobs(batch.logits, batch.data, temperature=torch.ones(3))
    with validation("never"):
        NLLLoss(temperature="per-sample")(batch.logits, batch.data, *counts)
