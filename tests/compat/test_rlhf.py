"""LightRFT's and OpenRLHF's losses against their formulas: values, gradients, what else they return."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from parallel_rl.compat import lightrft, openrlhf, openrlhf_article
from tests.compat import reference
from tests.compat.cases import responses

BOTH = pytest.mark.parametrize("origin", [lightrft, openrlhf], ids=["lightrft", "openrlhf"])


def both(seed: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Two copies of one batch, with leaves of their own."""
    data = responses(seed)
    leaves = ("logprob", "values")
    return tuple({**data, **{key: data[key].clone().requires_grad_() for key in leaves}} for _ in range(2))  # type: ignore[return-value]


def assert_same(loss: Tensor, x: Tensor, expected: Tensor, y: Tensor, tolerance: float = 1e-12) -> None:
    torch.testing.assert_close(loss, expected, rtol=tolerance, atol=tolerance)
    grads = torch.autograd.grad(loss, x)[0], torch.autograd.grad(expected, y)[0]
    torch.testing.assert_close(*grads, rtol=tolerance, atol=tolerance)


def mean_of_rows(rows: list[Tensor]) -> Tensor:
    """All rows count; an empty one is 0."""
    return sum(row.sum() / max(len(row), 1) for row in rows) / len(rows)


@pytest.mark.parametrize("cpgd", [False, True])
@pytest.mark.parametrize("entropy", [False, True])
def test_lightrft_policy(cpgd: bool, entropy: bool) -> None:
    mine, theirs = both(0)
    masks = {"action_mask": mine["action_mask"].long()}
    mask = mine["action_mask"].clone()
    if entropy:
        mask &= torch.rand(6, 8) < 0.5
        masks["entropy_mask"] = mask.double()
    fn = lightrft.PolicyLoss(0.3, True, cpgd, 0.2)
    loss = fn(mine["logprob"], mine["old_logprob"], mine["advantages"], **masks)
    rows = []
    for i in range(6):
        logp, old, a = (theirs[key][i, mask[i]] for key in ("logprob", "old_logprob", "advantages"))
        up, down = torch.minimum(logp, old + math.log(1.3)), torch.maximum(logp, old + math.log(0.7))
        r = (logp - old).exp()
        rows.append(-a * torch.where(a > 0, up, down) if cpgd else -torch.minimum(r * a, r.clamp(0.7, 1.3) * a))
    assert_same(loss, mine["logprob"], mean_of_rows(rows), theirs["logprob"])


@pytest.mark.parametrize("clip", [None, 0.2, 0.0])
@pytest.mark.parametrize("token_level", [None, False, True])
def test_values(clip: float | None, token_level: bool | None) -> None:
    mine, theirs = both(1)
    call = [mine[key] for key in ("values", "old_values", "returns", "action_mask")]
    fn = lightrft.ValueLoss(clip) if token_level is None else openrlhf.ValueLoss(clip, token_level)
    loss = fn(*call)
    if token_level is None:
        torch.testing.assert_close(openrlhf_article.ValueLoss(clip)(*call), loss)
    if token_level:
        torch.testing.assert_close(openrlhf.ValueLoss(clip)(*call), loss)
    rows = []
    for i in range(6):
        v, old, r = (theirs[key][i, mine["action_mask"][i]] for key in ("values", "old_values", "returns"))
        x = (v - r) ** 2
        rows.append(x if clip is None else torch.maximum(x, (old + (v - old).clamp(-clip, clip) - r) ** 2))
    expected = mean_of_rows(rows) if token_level is None else reference.openrlhf_mean(rows, token_level)
    assert_same(loss, mine["values"], 0.5 * expected, theirs["values"])


OPENRLHF = [
    {"dual_clip": dual, "token_level_loss": level, "policy_loss_type": kind, "clip_eps_high": 0.28}
    for dual, level, kind in itertools.product((None, 1.5), (True, False), ("ppo", "gspo"))
]
BANDS = {"ratio": [0.9, 1.3], "binary_kl": [0, 0.05], "tv": [0, 0.08]}
CORRECTIONS = [
    {},
    {"is_correction_level": "token", "is_correction_mode": "clip", "is_correction_threshold": [0.9, 1.3]},
] + [
    {"is_correction_level": level, "is_correction_gating": gating, "is_correction_threshold": band}
    for level in ("token", "seq")
    for gating, band in BANDS.items()
]


@pytest.mark.parametrize("options", OPENRLHF, ids=str)
@pytest.mark.parametrize("correction", CORRECTIONS, ids=str)
@pytest.mark.parametrize("totals", [{}, {"dp_size": 4, "batch_num_tokens": 50.0, "global_batch_size": 9}], ids=str)
def test_openrlhf_policy(options: dict, correction: dict, totals: dict) -> None:
    mine, theirs = both(2)
    options = options | correction
    fn = openrlhf.PolicyLoss(**options)
    keys = ("logprob", "old_logprob", "advantages", "action_mask", "rollout")
    loss, clip_ratio, ppo_kl, vllm_kl, filter_ratio = fn(*(mine[key] for key in keys), **totals)
    rows, clips, filtered = reference.openrlhf_rows(theirs, options)
    by_token = options["token_level_loss"] and options["policy_loss_type"] == "ppo"
    count = totals.get("batch_num_tokens" if by_token else "global_batch_size")
    expected = reference.openrlhf_mean(rows, by_token, count) * totals.get("dp_size", 1)
    assert_same(loss, mine["logprob"], expected, theirs["logprob"])
    mask = mine["action_mask"]
    torch.testing.assert_close(clip_ratio, torch.cat(clips).mean())
    torch.testing.assert_close(ppo_kl, (mine["old_logprob"] - mine["logprob"])[mask].mean().detach())
    if correction and options["policy_loss_type"] == "ppo":
        torch.testing.assert_close(vllm_kl, (mine["rollout"] - mine["old_logprob"])[mask].mean())
        assert filter_ratio.item() == pytest.approx(sum(filtered) / len(filtered)) and 0 < filter_ratio.item() < 1
    else:
        assert vllm_kl is None and filter_ratio is None


def test_openrlhf_policy_of_its_article() -> None:
    mine, theirs = both(3)
    keys = ("logprob", "old_logprob", "advantages", "action_mask")
    loss = openrlhf_article.PolicyLoss(0.1)(*(mine[key] for key in keys))
    rows, *_ = reference.openrlhf_rows(theirs, {"clip_eps_low": 0.1, "clip_eps_high": 0.1})
    assert_same(loss, mine["logprob"], mean_of_rows(rows), theirs["logprob"])


def test_openrlhf_values_are_a_token_mean_by_default() -> None:
    values, returns = torch.tensor([[0.5, 0.0], [1.0, 2.0]]), torch.zeros(2, 2)
    mask = torch.tensor([[1, 0], [1, 1]])
    assert openrlhf.ValueLoss()(values, values, returns, mask).item() == pytest.approx((0.25 + 1 + 4) / 6)
    assert openrlhf_article.ValueLoss()(values, values, returns, mask).item() == pytest.approx((0.25 + 2.5) / 4)


def test_openrlhf_clamps_the_log_ratio_and_filters_no_empty_row() -> None:
    old, mask = torch.zeros(2, 2, dtype=torch.float64), torch.tensor([[1, 1], [0, 0]])
    loss, *_ = openrlhf.PolicyLoss()(old + 100, old, -torch.ones_like(old), mask)
    assert loss.item() == pytest.approx(math.exp(20))
    options = {
        "is_correction_level": "seq",
        "is_correction_threshold": [1.5, 5.0],
    }  # an empty row's mean ratio would be 1
    *_, filtered = openrlhf.PolicyLoss(**options)(old, old, torch.ones_like(old), mask, old - math.log(2))
    assert filtered.item() == 0


def test_openrlhf_clamps_a_weight_that_overflows() -> None:
    old, rollout = torch.zeros(1, 2), torch.tensor([[0.0, -100.0]])
    options = {"is_correction_level": "token", "is_correction_threshold": [0.5, 5.0]}
    loss, _, _, vllm_kl, filtered = openrlhf.PolicyLoss(**options, is_correction_mode="clip")(
        old, old, torch.ones(1, 2), None, rollout
    )
    assert (loss.item(), vllm_kl.item(), filtered.item()) == (-(1 + 5) / 2, -50, 0.5)
    loss, *_ = openrlhf.PolicyLoss(**options)(old, old, torch.ones(1, 2), None, rollout)
    assert loss.item() == -1 / 2


@pytest.mark.parametrize("token_level", [False, True])
@pytest.mark.parametrize("totals", [{}, {"dp_size": 2, "batch_num_tokens": 31, "global_batch_size": 7}], ids=str)
def test_openrlhf_sft_and_its_aggregation(token_level: bool, totals: dict) -> None:
    mine, theirs = both(4)
    count = totals.get("batch_num_tokens" if token_level else "global_batch_size")
    rows = [-theirs["logprob"][i, mine["action_mask"][i]] for i in range(6)]
    expected = reference.openrlhf_mean(rows, token_level, count) * totals.get("dp_size", 1)
    loss = openrlhf.SFTLoss(token_level)(mine["logprob"], mine["action_mask"], **totals)
    assert_same(loss, mine["logprob"], expected, theirs["logprob"])
    again = openrlhf.aggregate_loss(-mine["logprob"], mine["action_mask"], token_level, **totals)
    torch.testing.assert_close(again, loss)


@BOTH
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("ipo", [False, True])
def test_dpo(origin: object, smoothing: float, ipo: bool) -> None:
    torch.manual_seed(0)
    pc, pr, rc, rr = (-30 * torch.rand(5, dtype=torch.float64) for _ in range(4))
    x, y = pc.clone().requires_grad_(), pc.clone().requires_grad_()
    loss, chosen, rejected = origin.DPOLoss(0.2, smoothing, ipo)(x, pr, rc, rr)
    h = (y - rc) - (pr - rr)
    cdpo = (1 - smoothing) * torch.log1p((-0.2 * h).exp()) + smoothing * torch.log1p((0.2 * h).exp())
    assert_same(loss, x, ((h - 2.5) ** 2 if ipo else cdpo).mean(), y)
    torch.testing.assert_close((chosen, rejected), (0.2 * (pc - rc), 0.2 * (pr - rr)))
    assert not chosen.requires_grad


@BOTH
@pytest.mark.parametrize(("good", "bad", "kl"), [(3, 2, 4), (0, 2, 1), (3, 0, 2)])
def test_kto(origin: object, good: int, bad: int, kl: int) -> None:
    torch.manual_seed(good)
    pc, pr, pk, rc, rr, rk = (-torch.rand(n, dtype=torch.float64) for n in (good, bad, kl) * 2)
    pk = pk + 1.0  # a KL above 0
    x, y = torch.cat([pc, pr]).requires_grad_(), torch.cat([pc, pr]).requires_grad_()
    fn = origin.KTOLoss(0.5, 1.3, 0.7, 1, torch.device("cpu"))
    loss, chosen, rejected, z0 = fn(x[:good], x[good:], pk, rc, rr, rk)
    baseline = max((pk - rk).mean().item(), 0.0)
    terms = [1.3 * (1 - torch.sigmoid(0.5 * (y[i] - rc[i] - baseline))) for i in range(good)]
    terms += [0.7 * (1 - torch.sigmoid(0.5 * (baseline - y[good + i] + rr[i]))) for i in range(bad)]
    assert_same(loss, x, sum(terms) / len(terms), y)
    assert z0.item() == pytest.approx(baseline) and not z0.requires_grad
    torch.testing.assert_close((chosen, rejected), (0.5 * (pc - rc), 0.5 * (pr - rr)))


@BOTH
@pytest.mark.parametrize("shift", [-1.0, 1.0])
def test_vanilla_kto_has_a_gradient_through_its_baselines(origin: object, shift: float) -> None:
    torch.manual_seed(1)
    pc, pr, rc, rr = (-torch.rand(n, dtype=torch.float64) for n in (3, 2) * 2)
    x, y = (torch.cat([pc, pr]).add(shift).requires_grad_() for _ in range(2))
    loss, *_ = origin.VanillaKTOLoss(0.5)(x[:3], x[3:], rc, rr)
    chosen, rejected = y[:3] - rc, y[3:] - rr
    kc, kr = torch.relu(chosen.mean()), torch.relu(rejected.mean())
    terms = torch.cat([1 - torch.sigmoid(0.5 * (chosen - kr)), 1 - torch.sigmoid(0.5 * (kc - rejected))])
    assert_same(loss, x, terms.mean(), y)


@pytest.mark.parametrize("margin", [None, 0.1, torch.tensor([0.3, 0.0, 0.5], dtype=torch.float64)], ids=str)
def test_reward_models(margin: Tensor | float | None) -> None:
    r, s = torch.randn(2, 3, dtype=torch.float64).requires_grad_().unbind()
    plain, with_margin = (
        torch.log1p((s - r).exp()).mean(),
        torch.log1p((s - r + (0 if margin is None else margin)).exp()).mean(),
    )
    for origin, name, expected in (
        (lightrft, "PairWiseLoss", with_margin),
        (openrlhf, "PairWiseLoss", with_margin),
        (lightrft, "LogSigmoidLoss", with_margin),
        (lightrft, "LogExpLoss", plain),
        (openrlhf, "LogExpLoss", plain),
        (lightrft, "HPSLoss", plain),
    ):
        torch.testing.assert_close(getattr(origin, name)()(r, s, margin), expected)
    torch.testing.assert_close(lightrft.HPSLoss()(r[:, None], s[:, None]), plain)


def language(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(seed)
    logits, teacher = torch.randn(2, 2, 6, 9, dtype=torch.float64).unbind()
    labels = torch.randint(0, 9, (2, 6))
    labels[0, 2], labels[1, 3:] = -100, -100
    return logits, teacher, labels


@BOTH
def test_next_token(origin: object) -> None:
    logits, _, labels = language(0)
    x, y = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    places = [(b, t) for b in range(2) for t in range(5) if labels[b, t + 1] != -100]
    expected = sum(y[b, t].logsumexp(0) - y[b, t, labels[b, t + 1]] for b, t in places) / len(places)
    assert_same(origin.GPTLMLoss()(x, labels), x, expected, y)
    torch.testing.assert_close(origin.GPTLMLoss()(x[0], labels[0]), origin.GPTLMLoss()(x[:1], labels[:1]))


@BOTH
@pytest.mark.parametrize("excluded", [False, True])
def test_distillation(origin: object, excluded: bool) -> None:
    logits, teacher, labels = language(1)
    if excluded:
        logits[:, :, 3] = -torch.inf
    x, y = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    places = [(b, t) for b in range(2) for t in range(6) if labels[b, t] != -100]
    words = [v for v in range(9) if not (excluded and v == 3)]
    total = sum(-(teacher[b, t].softmax(0)[words] * y[b, t][words].log_softmax(0)).sum() for b, t in places)
    assert_same(origin.KDLoss()(x, teacher, labels), x, total / len(places), y)


def cross_entropy(scores: Tensor, target: int) -> Tensor:
    return scores.logsumexp(0) - scores[target]


@BOTH
@pytest.mark.parametrize("ids", [[5, 2], [7, 8, 3], None], ids=str)
def test_process_rewards_hard(origin: object, ids: list[int] | None) -> None:
    logits, _, _ = language(2)
    x, y = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    inputs = torch.tensor([[4, 1, 4, 4, 1, 4], [1, 1, 4, 1, 1, 4]])
    names = ids or list(range(9))
    labels = torch.tensor(names)[torch.arange(12).view(2, 6) % len(names)]
    labels[0, 2] = -100
    places = (inputs == 4).nonzero().tolist()
    scored = [(b, t) for b, t in places if labels[b, t] != -100]
    expected = sum(cross_entropy(y[b, t][names], names.index(labels[b, t])) for b, t in scored) / len(scored)
    right = sum(names[y[b, t][names].argmax()] == labels[b, t] for b, t in places) / len(places)
    loss, accuracy = origin.PRMLoss(4, ids)(inputs, x, labels, return_acc=True)
    assert_same(loss, x, expected, y)
    assert accuracy.item() == pytest.approx(float(right))  # the ignored place counts as wrong
    torch.testing.assert_close(origin.PRMLoss(4, ids)(inputs, x, labels), loss)


@BOTH
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_process_rewards_soft_train_on_ignored_labels_too(origin: object, dtype: torch.dtype) -> None:
    logits, _, _ = language(3)
    x, y = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    inputs = torch.full((2, 6), 4)
    labels = (torch.arange(12).view(2, 6) / 16).to(dtype)
    labels[1, 1] = -100
    p = labels.double()
    pairs = y[..., [6, 0]].log_softmax(-1)
    expected = -(p * pairs[..., 0] + (1 - p) * pairs[..., 1]).mean()
    assert_same(origin.PRMLoss(4, [6, 0])(inputs, x, labels), x, expected, y)


@BOTH
def test_process_rewards_map_labels_one_after_the_other(origin: object) -> None:
    logits, _, _ = language(4)
    inputs, labels = torch.full((1, 2), 4), torch.tensor([[1, 0]])
    # 1 becomes class 0, then every 0 becomes class 1: both end as class 1, token 0.
    expected = sum(cross_entropy(logits[0, t][[1, 0]], 1) for t in range(2)) / 2
    torch.testing.assert_close(origin.PRMLoss(4, [1, 0])(inputs, logits[:1, :2], labels), expected)
