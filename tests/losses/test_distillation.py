"""Distillation against dense float64 re-expressions, and what is known of divergences."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from parallel_rl import DistillationLossFn, FullDistillationLossFn, LMHeadInput, count_valid
from parallel_rl.losses.core.base import LossFn
from tests import reference_distillation as reference
from tests.vocab.test_divergence import DIVERGENCES, ident, make_divergence

ROWS, WIDTH, VOCAB, K = 4, 6, 9, 3
# one without a mixture, one with two of them: each takes seconds to compile
COMPILED = [one for one in DIVERGENCES if one in ({"name": "reverse_kl"}, {"name": "jsd", "beta": 0.3})]


# A batch: ragged masks, the teacher's logits in the order of the student's.


def make(seed: int = 0) -> tuple[Tensor, dict[str, Tensor]]:
    g = torch.Generator().manual_seed(seed)
    data = {
        "input_ids": torch.randint(0, VOCAB, (ROWS, WIDTH), generator=g),
        "token_mask": (torch.rand(ROWS, WIDTH, generator=g) < 0.7).float(),
        "sample_mask": torch.tensor([1.0, 0.0, 1.0, 1.0]),
        "teacher_logits": torch.randn(ROWS, WIDTH, VOCAB, generator=g, dtype=torch.float64) * 2,
    }
    data["token_mask"][2] = 0
    return torch.randn(ROWS, WIDTH, VOCAB, generator=g, dtype=torch.float64) * 2, data


def with_topk(data: dict[str, Tensor], temperature: float = 1.0) -> dict[str, Tensor]:
    """What a teacher's forward pass stores of its logits, token-aligned."""
    teacher = data["teacher_logits"].roll(1, 1)
    logits, ids = teacher.topk(K, -1)
    lse = (teacher / temperature).logsumexp(-1)
    return {**data, "teacher_topk_logits": logits, "teacher_topk_indices": ids, "teacher_logsumexp": lse}


def run(loss_fn: LossFn, logits: Tensor, data: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    leaf = logits.clone().requires_grad_()
    loss, _ = loss_fn(leaf * 1.0, data, *count_valid(data))
    loss.backward()
    assert leaf.grad is not None
    return loss.detach(), leaf.grad


def weights_by_hand(data: dict[str, Tensor], aggregation: str) -> Tensor:
    """[ROWS, WIDTH] weight of the position that predicts a token."""
    valid = (data["token_mask"] * data["sample_mask"][:, None])[:, 1:].double()
    n_seq, n_tok = data["sample_mask"].sum(), valid.sum()
    weight = {
        "token-mean": valid / n_tok,
        "seq-mean-token-mean": valid / valid.sum(1, keepdim=True).clamp(min=1) / n_seq,
    }[aggregation]
    return torch.cat([weight, torch.zeros(ROWS, 1).double()], 1)


@pytest.mark.parametrize(
    ("divergence", "backend"),
    [
        *((divergence, "eager") for divergence in DIVERGENCES),
        *(pytest.param(divergence, "compiled", marks=pytest.mark.slow) for divergence in COMPILED),
    ],
    ids=ident,
)
def test_against_dense(divergence: dict, backend: str) -> None:
    """With two temperatures, τ² and a padded vocabulary, written over the logits."""
    logits, data = make()
    leaf = logits.clone().requires_grad_()
    value = reference.divergence(divergence, data["teacher_logits"] / 2.0, leaf / 1.5) * 1.5**2
    want = (value * weights_by_hand(data, "seq-mean-token-mean")).sum()
    want.backward()
    config = {
        "divergence": divergence,
        "teacher_temperature": 2.0,
        "squared_temperature": True,
        "aggregation": "seq-mean-token-mean",
    }
    loss_fn = FullDistillationLossFn(
        config,
        vocab_size=VOCAB,
        temperature=1.5,
        consume_logits=True,
        backend=backend,  # type: ignore[arg-type]
    )
    padding = torch.full((ROWS, WIDTH, 2), 1e4, dtype=torch.float64)
    data["teacher_logits"] = torch.cat([data["teacher_logits"], padding * math.nan], -1)
    data["teacher_logits"][1] = math.inf  # no sample_mask
    logits = torch.cat([logits, padding], -1)
    logits[1] = math.nan
    loss, gradient = run(loss_fn, logits, data)
    assert_close(loss, want.detach(), rtol=1e-12, atol=0)
    assert_close(gradient[..., :VOCAB], leaf.grad, rtol=1e-10, atol=1e-14)
    assert not gradient[..., VOCAB:].any() and not gradient[1].any() and not gradient[:, -1].any()


@pytest.mark.parametrize("direction", ["forward", "reverse"])
def test_the_bucket_against_dense(direction: str) -> None:
    logits, data = make()
    data = with_topk(data, temperature=0.8)
    leaf = logits.clone().requires_grad_()
    p, q = ((z / t).softmax(-1) for z, t in ((data["teacher_logits"], 0.8), (leaf, 1.3)))
    ids = data["teacher_logits"].topk(K, -1).indices
    p, q = (torch.cat([x.gather(-1, ids), 1 - x.gather(-1, ids).sum(-1, keepdim=True)], -1) for x in (p, q))
    a, b = (p, q) if direction == "forward" else (q, p)
    want = ((a * (a / b).log()).sum(-1) * weights_by_hand(data, "token-mean")).sum()
    want.backward()
    config = {"kl_type": direction, "bucket_tail": True, "teacher_temperature": 0.8}
    loss, gradient = run(DistillationLossFn(config, temperature=1.3), logits, data)
    assert_close(loss, want.detach(), rtol=1e-11, atol=0)
    assert_close(gradient, leaf.grad, rtol=1e-9, atol=1e-13)


@pytest.mark.parametrize("direction", ["forward", "reverse"])
@pytest.mark.parametrize("tail", [7e-7, 2e-9])
def test_the_bucket_of_a_small_tail_in_float32(direction: str, tail: float) -> None:
    """1 − Σ q of float32 is off by 1e-7: a tail of 7e-7 had its gradient wrong by 41 %, one of 2e-9 had none."""
    g = torch.Generator().manual_seed(3)
    words = torch.randn(2, 40, generator=g, dtype=torch.float64)
    high = [6.0, 4.0, 3.0]
    ids = torch.tensor([5, 0, 17])
    student, teacher = (
        row.index_add(0, ids, torch.tensor(high).double() - math.log(tail / 3)) for row in words.float().double()
    )
    student = student.float().double()
    lse = teacher.logsumexp(0)
    config = {"kl_type": direction, "bucket_tail": True}
    leaf = student.clone().requires_grad_()
    q = leaf.softmax(0)
    p = teacher.softmax(0)
    others = torch.ones(40).scatter(0, ids, 0).bool()
    p, q = (torch.cat([x[ids], x[others].sum()[None]]) for x in (p, q))
    want = reference.kl(*((p, q) if direction == "forward" else (q, p)))
    want.backward()
    data = {
        "input_ids": torch.tensor([[0, 1]]), "token_mask": torch.ones(1, 2), "sample_mask": torch.ones(1),
        "teacher_topk_logits": teacher[ids].expand(1, 2, 3), "teacher_topk_indices": ids.expand(1, 2, 3),
        "teacher_logsumexp": lse.expand(1, 2),
    }  # fmt: skip
    loss, gradient = run(DistillationLossFn(config), student.float().expand(1, 2, 40), data)
    assert loss.dtype == torch.float32 and leaf.grad is not None
    assert_close(gradient[0, 0].double(), leaf.grad, rtol=1e-4, atol=0)
    assert loss.item() == pytest.approx(want.item(), rel=2e-5)


def test_the_gradient_of_the_renormalised_top_k_cannot_see_the_tail_and_that_of_the_bucket_can() -> None:
    logits, data = make()
    data = with_topk(data)
    outside = torch.ones(ROWS, WIDTH, VOCAB).scatter(-1, data["teacher_logits"].topk(K, -1).indices, 0).bool()
    assert not run(DistillationLossFn({"kl_type": "forward"}), logits, data)[1][outside].any()
    assert run(DistillationLossFn({"kl_type": "forward", "bucket_tail": True}), logits, data)[1][outside].any()


@pytest.mark.parametrize("config", [{}, {"zero_outside_topk": True}, {"bucket_tail": True}], ids=ident)
def test_gradcheck_of_the_top_k(config: dict) -> None:
    logits, data = make()
    logits, data = logits[:2], {name: field[:2] for name, field in with_topk(data).items()}
    loss_fn, counts = DistillationLossFn(config), count_valid(data)
    assert torch.autograd.gradcheck(lambda z: loss_fn(z, data, *counts)[0], logits.requires_grad_())


@pytest.mark.parametrize("divergence", DIVERGENCES, ids=ident)
def test_excluded_words(divergence: dict) -> None:
    """−inf on both sides is as if the word were not there; on one side it gives a finite loss and gradient."""
    logits, data = make()
    teacher = data["teacher_logits"]
    clean = run(FullDistillationLossFn({"divergence": divergence}), logits[..., 1:], {
        **data, "teacher_logits": teacher[..., 1:], "input_ids": data["input_ids"].clamp(max=VOCAB - 2),
    })  # fmt: skip
    excluded = [z.clone() for z in (logits, teacher)]
    for z in excluded:
        z[..., 0] = -math.inf
    loss, gradient = run(
        FullDistillationLossFn({"divergence": divergence}), excluded[0], {**data, "teacher_logits": excluded[1]}
    )
    assert_close(loss, clean[0], rtol=1e-12, atol=0)
    assert_close(gradient[..., 1:], clean[1], rtol=1e-11, atol=1e-15)
    chosen = make_divergence(divergence)
    for student_side, teacher_side in ((excluded[0], teacher), (logits, excluded[1])):
        data["teacher_logits"] = teacher_side
        loss, gradient = run(FullDistillationLossFn({"divergence": divergence}), student_side, data)
        leaf = student_side.clone().requires_grad_()
        value, _ = chosen.terms(teacher_side.log_softmax(-1), leaf.log_softmax(-1))
        want = (value.sum(-1) * weights_by_hand(data, "token-mean")).sum()
        want.backward()
        assert loss.isfinite() and leaf.grad is not None
        assert_close(loss, want.detach(), rtol=1e-12, atol=0)
        assert_close(gradient, leaf.grad, rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("config", [{}, {"kl_type": "reverse"}, {"zero_outside_topk": True}], ids=str)
def test_a_student_that_excludes_all_of_the_teachers_top_k(config: dict) -> None:
    """NaN in one token's loss was one in every gradient."""
    logits, data = make()
    data = with_topk(data)
    logits[0, 0, data["teacher_topk_indices"][0, 1]] = -math.inf
    data["token_mask"][0, 1] = 1
    loss, gradient = run(DistillationLossFn(config), logits, data)
    assert bool(loss.isfinite()) and bool(gradient.isfinite().all())


def test_low_precision_logits_are_read_as_float32() -> None:
    logits, data = make()
    low = {**data, "teacher_logits": data["teacher_logits"].to(torch.bfloat16)}
    z = logits.to(torch.bfloat16)
    loss, gradient = run(FullDistillationLossFn({"divergence": "reverse_kl"}), z, low)
    high = {**data, "teacher_logits": low["teacher_logits"].double()}
    want, want_gradient = run(FullDistillationLossFn({"divergence": "reverse_kl"}), z.double(), high)
    assert loss.dtype == torch.float32 and gradient.dtype == torch.bfloat16
    assert loss.item() == pytest.approx(want.item(), rel=1e-5)
    assert_close(gradient.double(), want_gradient, rtol=2**-8, atol=1e-6)


@pytest.mark.parametrize(
    ("loss", "config", "message"),
    [
        (FullDistillationLossFn, {"divergence": "jds"}, r"divergence.name = 'jds' is not valid; did you mean 'jsd'\?"),
        (FullDistillationLossFn, {"divergence": {"name": "jsd", "beta": 1.5}}, r"beta = 1.5 must lie in \[0, 1\]"),
        (
            FullDistillationLossFn,
            {"divergence": {"name": "skew_forward_kl", "alpha": 0.0}},
            r"alpha = 0.0 must lie in \(0, 1\); without a mixture choose 'forward_kl'",
        ),
        (FullDistillationLossFn, {"teacher_temperature": 0.0}, "teacher_temperature = 0.0 must be positive, or None"),
        (FullDistillationLossFn, {"max_length": 5}, "max_length = 5 goes with aggregation 'constant-length' only"),
        (DistillationLossFn, {"teacher_temperature": -1.0}, "teacher_temperature = -1.0 must be positive, or None"),
        (DistillationLossFn, {"mixed_kl_weight": 1.2}, r"mixed_kl_weight = 1.2 must lie in \[0, 1\]"),
        (
            DistillationLossFn,
            {"kl_type": "forward", "mixed_kl_weight": 0.3},
            "mixed_kl_weight = 0.3 has no effect with kl_type = 'forward'",
        ),
        (
            DistillationLossFn,
            {"zero_outside_topk": True, "bucket_tail": True},
            "two treatments of the tail; choose one",
        ),
    ],
)
def test_configs_that_do_not_do(loss: type[LossFn], config: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        loss(config)


def test_a_second_backward_of_consumed_logits_is_refused() -> None:
    logits, data = make()
    leaf = logits.requires_grad_()
    loss, _ = FullDistillationLossFn(consume_logits=True)(leaf * 1.0, data, *count_valid(data))
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="the first backward wrote its gradient over the logits"):
        loss.backward()


def test_a_token_named_twice_is_refused() -> None:
    data = {
        "input_ids": torch.zeros(2, 3, dtype=torch.int64),
        "token_mask": torch.ones(2, 3),
        "sample_mask": torch.tensor([0, 1]),
        "teacher_topk_logits": torch.zeros(2, 3, 2),
        "teacher_topk_indices": torch.tensor([[[1, 1]] * 3, [[4, 2], [2, 4], [3, 3]]]),
    }
    with pytest.raises(ValueError, match=r"teacher_topk_indices = \[3, 3\] at \[1, 2\] names a token twice"):
        DistillationLossFn()(torch.zeros(2, 3, 5), data, *count_valid(data))


@pytest.mark.parametrize("config", [{}, {"bucket_tail": True}, {"zero_outside_topk": True}], ids=ident)
@pytest.mark.parametrize("hidden", [False, True])
def test_how_student_and_teacher_agree(config: dict, hidden: bool) -> None:
    """Masses and overlap token by token with sets of words; the loss and its gradient are those without them."""
    logits, data = make()
    data = with_topk(data, temperature=0.8)
    carries = weights_by_hand(data, "token-mean") > 0
    logits[~carries] = math.nan
    options = {**config, "teacher_temperature": 0.8}
    plain, with_metrics = (DistillationLossFn({**options, "overlap": on}, temperature=1.3) for on in (False, True))
    want = run(plain, logits, data)
    if not hidden:
        found = run(with_metrics, logits, data)
        _, metrics = with_metrics(logits, data, *count_valid(data))
    else:
        leaf, weight = logits.clone().requires_grad_(), torch.eye(VOCAB, dtype=torch.float64)
        loss, metrics = with_metrics(LMHeadInput(leaf, weight, budget=2000), data, *count_valid(data))
        loss.backward()
        assert leaf.grad is not None
        found = loss.detach(), leaf.grad
    assert_close(found[0], want[0], rtol=1e-12, atol=0)
    assert_close(found[1], want[1], rtol=1e-10, atol=1e-14)
    sums = {"teacher_mass": 0.0, "student_mass": 0.0, "overlap": 0.0}
    for i, t in carries.nonzero().tolist():
        p, q = (data["teacher_logits"][i, t] / 0.8).softmax(-1), (logits[i, t] / 1.3).softmax(-1)
        ids, own = p.topk(K).indices.tolist(), q.topk(K).indices.tolist()
        sums["teacher_mass"] += p[ids].sum().item()
        sums["student_mass"] += q[ids].sum().item()
        sums["overlap"] += len(set(ids) & set(own)) / K
    for name, total in sums.items():
        assert metrics[name].item() == pytest.approx(total / int(carries.sum()), rel=1e-9), name
