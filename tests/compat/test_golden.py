"""Published numbers of the field's losses on one small batch, through the classes of the origins."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from parallel_rl.compat import lightrft, openrlhf, openrlhf_article, trinity


def _t(rows: list) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64)


L = _t([[-0.5, -1.0, -2.0, -0.1], [-0.7, -0.2, -1.5, -0.3], [-0.4, -0.4, -0.9, -1.1]])
OLD = _t([[-0.7, -0.9, -2.5, -0.1], [-0.6, -0.5, -1.4, -0.3], [-2.2, -0.4, -1.3, -1.0]])
BEH = _t([[-0.71, -0.95, -2.3, -0.12], [-0.6, -0.45, -1.6, -0.3], [-2.9, -0.38, -1.3, -0.9]])
MASK = _t([[1, 1, 1, 0], [1, 1, 1, 1], [1, 1, 0, 0]])
A = _t([[1.0], [-0.5], [-2.0]]).expand(3, 4).contiguous()
VALUES = _t([[0.1, 0.2, 0.3, 0], [0.5, 0.4, 0.3, 0.2], [-0.1, 0, 0, 0]])
OLD_VALUES = VALUES + _t([[0.5, -0.5, 0.1, 0], [0, 0.3, -0.3, 0.05], [0.2, -0.2, 0, 0]])
RETURNS = _t([[1, 1, 1, 0], [0, 0, 0, 0], [1, 1, 0, 0]])
PC, PR, RC, RR = _t([-10, -12]), _t([-11, -9]), _t([-10.5, -11]), _t([-10, -10])
KL = _t([-8, -9]), _t([-8.4, -9.2])


def of_trinity(name: str, **options: object) -> object:
    def loss(logprob: Tensor) -> Tensor:
        found, _ = getattr(trinity, name)(**options)(logprob, old_logprob=OLD, action_mask=MASK, advantages=A)
        return found

    return loss


def of_openrlhf(**options: object) -> object:
    return lambda x: openrlhf.PolicyLoss(**options)(x, OLD, A, MASK, BEH)[0]


def of_lightrft(**options: object) -> object:
    return lambda x: lightrft.PolicyLoss(**options)(x, OLD, A, MASK)


def corrected(level: str, mode: str, low: float, high: float) -> object:
    return of_openrlhf(is_correction_level=level, is_correction_mode=mode, is_correction_threshold=[low, high])


PPO, REC, PHI = "PPOPolicyLossFn", "RECPolicyLossFn", "SFTPhiLossFn"
ROWS = [
    ("ppo", of_openrlhf(), 1.430469),
    ("ppo dual c3", of_openrlhf(dual_clip=3.0), 0.75277),
    ("ppo dual c3", of_trinity(PPO, clip_range=0.2), 0.75277),
    ("ppo smtm", of_lightrft(), 2.155992),
    ("ppo smtm", of_openrlhf(token_level_loss=False), 2.155992),
    ("ppo smtm, of the article", lambda x: openrlhf_article.PolicyLoss(clip_eps=0.2)(x, OLD, A, MASK), 2.155992),
    ("ppo dual c3 smtm", of_trinity(PPO, clip_range=0.2, loss_agg_mode="seq-mean-token-mean"), 1.139443),
    ("ppo dual c3 smts", of_trinity(PPO, clip_range=0.2, loss_agg_mode="seq-mean-token-sum"), 2.25831),
    ("ppo dual c3 smts-norm", of_trinity(PPO, clip_range=0.2, loss_agg_mode="seq-mean-token-sum-norm"), 1.693732),
    ("ppo .2/.28 dual c3", of_trinity(PPO, clip_range=0.2, clip_range_high=0.28), 0.741503),
    (
        "ppo dual c3, sequence mask",
        of_trinity(PPO, clip_range=0.2, enable_sequence_masking=True, delta_sequence_masking=-1.0),
        -0.367204,
    ),
    ("cpgd smtm", of_lightrft(use_cpg_loss=True), 0.046984),
    ("gspo smtm", of_trinity("GSPOLossFn", clip_range_low=3e-4, clip_range_high=4e-4), 1.477155),
    ("gspo smtm", of_openrlhf(clip_eps_low=3e-4, clip_eps_high=4e-4, policy_loss_type="gspo"), 1.477155),
    (
        "gspo token-mean",
        of_trinity("GSPOLossFn", clip_range_low=3e-4, clip_range_high=4e-4, loss_agg_mode="token-mean"),
        0.987538,
    ),
    ("cispo", of_trinity("CISPOPolicyLossFn"), 0.108691),
    ("cispo+mask", of_trinity("CISPOPolicyLossFn", enable_mask_clip=True), -0.175754),
    ("topr", of_trinity("TOPRPolicyLossFn"), 0.072742),
    ("sppo", of_trinity("sPPOPolicyLossFn"), -0.022222),
    ("sapo (Trinity)", of_trinity("SAPOPolicyLossFn"), 0.134576),
    ("opmd", of_trinity("OPMDPolicyLossFn"), 0.030556),
    ("sft", of_trinity("SFTLossFn"), 0.777778),
    ("sft", lambda x: openrlhf.SFTLoss()(x, MASK), 0.777778),
    ("sft_is", of_trinity("SFTISLossFn"), 0.28293),
    ("sft_phi", of_trinity(PHI), 0.142777),
    ("sft_phi cutoff .5", of_trinity(PHI, cutoff_prob=0.5), 0.178814),
    ("importance sampling", of_trinity("ImportanceSamplingLossFn"), 1.378233),
    ("rec one-side + IS", of_trinity(REC, clip_mode="one-side", weight="importance_sampling"), -0.668354),
    ("rec two-side", of_trinity(REC, clip_mode="two-side"), -0.116667),
    ("rec ring", of_trinity(REC, clip_mode="ring", epsilon_low_prime=0.6, epsilon_high_prime=2), -0.205556),
    ("rec gspo", of_trinity(REC, clip_mode="gspo-one-side", weight="gspo_importance_sampling"), -0.771242),
    ("rec k2", of_trinity(REC, regularizer="k2", regularizer_coef=0.1), 0.101667),
    ("rec forward-kl", of_trinity(REC, regularizer="forward-kl", regularizer_coef=0.1), 0.138889),
    ("rec advantage", of_trinity(REC, weight="advantage"), 0.94207),
    ("ppo+TIS", corrected("token", "clip", 0.0, 2.0), 2.795582),
    ("ppo+icepop", corrected("token", "mask", 0.5, 5.0), 2.814071),
    ("ppo+seq-mask-tis", corrected("seq", "mask", 0.98, 1.2), 0.238557),
]


@pytest.mark.parametrize(("name", "loss", "value"), ROWS, ids=lambda x: x if isinstance(x, str) else "")
def test_values(name: str, loss: object, value: float) -> None:
    assert loss(L).item() == pytest.approx(value, abs=5.1e-7)


GRADIENTS = [
    ("ppo", of_openrlhf(), (0, 0.074992, 1.344366)),
    ("ppo dual c3", of_trinity(PPO, clip_range=0.2), (0, 0.074992, 0)),
    ("cpgd smtm", of_lightrft(use_cpg_loss=True), (0, 0.041667, 0.333333)),
    ("gspo-token .2 smtm", of_trinity("GSPOLossFn", clip_range=0.2), (0, 0.042721, 0.819868)),
    ("gspo .2 smtm", of_openrlhf(policy_loss_type="gspo"), (0, 0.042721, 0.819868)),
    ("cispo", of_trinity("CISPOPolicyLossFn"), (-0.135711, 0.071111, 0.284444)),
    ("sapo (Trinity)", of_trinity("SAPOPolicyLossFn"), (-0.246723, 0.125041, 0.842365)),
    ("topr", of_trinity("TOPRPolicyLossFn"), (-0.111111, 0.055556, 0.222222)),
    ("sft_phi", of_trinity(PHI), (-0.026517, -0.016490, -0.024555)),
]


@pytest.mark.parametrize(("name", "loss", "gradient"), GRADIENTS, ids=lambda x: x if isinstance(x, str) else "")
def test_gradients(name: str, loss: object, gradient: tuple[float, ...]) -> None:
    x = L.clone().requires_grad_()
    (grad,) = torch.autograd.grad(loss(x), x)
    assert [grad[0, 0].item(), grad[1, 1].item(), grad[2, 0].item()] == pytest.approx(gradient, abs=5.1e-7)


TOKEN, ROW = {"is_correction_level": "token"}, {"is_correction_level": "seq"}
BINARY_KL, TV = {"is_correction_gating": "binary_kl"}, {"is_correction_gating": "tv"}
#: OpenRLHF 0.11.2's own: options, (loss, clip_ratio, ppo_kl, vllm_kl, is_filter_ratio), dL/dl at (0, 0), (1, 1), (2, 0)
PRESENT: list[tuple[dict, tuple[float | None, ...], tuple[float, ...]]] = [
    ({}, (1.430469, 0.222222, -0.277778, None, None), (0.0, 0.074992, 1.344366)),
    (
        {"dual_clip": 1.5, "token_level_loss": False},
        (0.639443, 0.222222, -0.277778, None, None),
        (0.0, 0.056244, 0.0),
    ),
    (
        {"policy_loss_type": "gspo", **ROW},
        (2.092587, 0.0, -0.277778, None, None),
        (-0.129524, 0.044354, 1.151871),
    ),
    (
        {**TOKEN, "is_correction_mode": "clip", "is_correction_threshold": [0.9, 1.1]},
        (1.568714, 0.222222, -0.277778, -0.076667, 0.333333),
        (0.0, 0.071335, 1.478803),
    ),
    (
        {**TOKEN, "is_correction_threshold": [0.9, 1.1]},
        (0.154615, 0.222222, -0.277778, -0.076667, 0.333333),
        (0.0, 0.071335, 0.0),
    ),
    (
        {**ROW, "is_correction_threshold": [0.98, 1.2]},
        (0.238557, 0.222222, -0.277778, -0.076667, 0.666667),
        (0.0, 0.071335, 0.0),
    ),
    (
        {**TOKEN, **BINARY_KL, "is_correction_threshold": [0, 0.001]},
        (0.083281, 0.222222, -0.277778, -0.076667, 0.444444),
        (0.0, 0.0, 0.0),
    ),
    (
        {**ROW, **BINARY_KL, "is_correction_threshold": [0, 0.002], "token_level_loss": False},
        (-0.170612, 0.222222, -0.277778, -0.076667, 0.333333),
        (0.0, 0.053501, 0.0),
    ),
    (
        {**TOKEN, **TV, "is_correction_threshold": [0, 0.015]},
        (0.188973, 0.222222, -0.277778, -0.076667, 0.555556),
        (0.0, 0.0, 0.0),
    ),
    (
        {**ROW, **TV, "is_correction_threshold": [0, 0.02]},
        (-0.110972, 0.222222, -0.277778, -0.076667, 0.333333),
        (0.0, 0.071335, 0.0),
    ),
]


@pytest.mark.parametrize(
    ("options", "values", "gradient"), PRESENT, ids=lambda x: str(x) if isinstance(x, dict) else ""
)
def test_openrlhf_gives_what_its_release_gives(options: dict, values: tuple, gradient: tuple) -> None:
    """All five returned values under every gate: the package itself is not there to compare with."""
    x = L.clone().requires_grad_()
    found = openrlhf.PolicyLoss(**options)(x, OLD, A, MASK, BEH)
    (grad,) = torch.autograd.grad(found[0], x)
    near = [None if value is None else pytest.approx(value, abs=5.1e-7) for value in values]
    assert [None if each is None else each.item() for each in found] == near
    assert [grad[0, 0].item(), grad[1, 1].item(), grad[2, 0].item()] == pytest.approx(gradient, abs=5.1e-7)


@pytest.mark.parametrize("origin", [lightrft, openrlhf])
def test_preferences(origin: object) -> None:
    for options, value in (({}, 0.709548), ({"label_smoothing": 0.1}, 0.707048), ({"ipo": True}, 30.625)):
        loss, chosen, rejected = origin.DPOLoss(0.1, **options)(PC, PR, RC, RR)
        assert loss.item() == pytest.approx(value, abs=5.1e-7)
        assert chosen.tolist() == pytest.approx([0.05, -0.1]) and rejected.tolist() == pytest.approx([-0.1, 0.1])
    loss, *_, kl = origin.KTOLoss(0.1, 1.0, 1.0, 1, torch.device("cpu"))(PC, PR, KL[0], RC, RR, KL[1])
    assert (loss.item(), kl.item()) == pytest.approx((0.503123, 0.3), abs=5.1e-7)
    assert origin.VanillaKTOLoss(0.1)(PC, PR, RC, RR)[0].item() == pytest.approx(0.50312, abs=5.1e-6)


def test_values_of_critics() -> None:
    clipped = openrlhf.ValueLoss(0.2)(VALUES, OLD_VALUES, RETURNS, MASK)
    plain = lightrft.ValueLoss()(VALUES, OLD_VALUES, RETURNS, MASK)
    assert (clipped.item(), plain.item()) == pytest.approx((0.297222, 0.314444), abs=5.1e-7)
    article = openrlhf_article.ValueLoss()(VALUES, OLD_VALUES, RETURNS, MASK)
    assert article.item() == pytest.approx(0.314444, abs=5.1e-7)


def test_distillation_is_the_cross_entropy() -> None:
    student, teacher = _t([[1, 2, 0.5, -1]]), _t([[0.5, 2.5, 0, -2]])
    for origin in (lightrft, openrlhf):
        assert origin.KDLoss()(student, teacher, torch.tensor([1])).item() == pytest.approx(0.732693, abs=5.1e-7)


def test_reward_kl_estimates() -> None:
    reference = _t([[-0.6, -1.2, -1.8, -0.3], [-0.9, -0.1, -1.9, -0.2], [-1.5, -0.6, -1.0, -1.4]])
    for kind, value in (("k1", 0.2), ("k2", 0.086667), ("k3", 0.066218)):
        estimate = lightrft.compute_approx_kl(L, reference, MASK, kind)
        assert lightrft.masked_mean(estimate, MASK).item() == pytest.approx(value, abs=1e-6)
