"""Trinity-RFT's classes against their formulas: values, gradients, metrics, names."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from parallel_rl.compat import trinity
from tests.compat import reference
from tests.compat.cases import responses

OPTIONS: dict[str, list[dict]] = {
    "PPOPolicyLossFn": [
        {"clip_range": 0.2},
        {"clip_range": 0.2, "clip_range_high": 0.28, "clip_ratio_c": 1.5},
        {"clip_range_low": 0.1, "clip_range_high": 0.3, "enable_sequence_masking": True},
        {"clip_range": 0.2, "enable_sequence_masking": True, "delta_sequence_masking": -1.0},
        {"clip_range": 0.2, "fallback_to_policy_gradient": True},
        {
            "clip_range": 0.2,
            "fallback_to_policy_gradient": True,
            "enable_sequence_masking": True,
            "delta_sequence_masking": -0.1,
        },
    ],
    "GSPOLossFn": [{"clip_range_low": 3e-4, "clip_range_high": 4e-4}, {"clip_range": 0.2}],
    "CISPOPolicyLossFn": [
        {},
        {"enable_mask_clip": True, "mask_clip_range_low": 0.2, "mask_clip_range_high": 0.1, "clip_range_low": 0.3},
    ],
    "TOPRPolicyLossFn": [{}, {"advantage_threshold": 0.5}],
    "SAPOPolicyLossFn": [{}, {"tau_pos": 0.5, "tau_neg": 2.0}],
    "sPPOPolicyLossFn": [{}, {"epsilon": 0.1}],
    "ImportanceSamplingLossFn": [{}],
    "OPMDPolicyLossFn": [{}, {"tau": 0.0}],
    "SFTLossFn": [{}],
    "SFTISLossFn": [{}],
    "SFTPhiLossFn": [{}, {"cutoff_prob": 0.3}],
    "RECPolicyLossFn": [
        {"clip_mode": mode, "weight": weight, "regularizer": regularizer, "regularizer_coef": 0.1, "temp": 0.7}
        for mode, weight, regularizer in itertools.product(
            ("none", "one-side", "gspo-one-side", "two-side", "ring"),
            ("none", "importance_sampling", "gspo_importance_sampling", "advantage"),
            ("none", "k2", "forward-kl"),
        )
    ],
}
MODES = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
CASES = [
    (name, {**options, **({} if name == "RECPolicyLossFn" else {"loss_agg_mode": mode})})
    for name, choices in OPTIONS.items()
    for options in choices
    for mode in (MODES[:1] if name == "RECPolicyLossFn" else MODES)
]


@pytest.mark.parametrize(("name", "options"), CASES, ids=lambda value: str(value))
def test_value_gradient_and_metrics_are_those_of_the_formula(name: str, options: dict) -> None:
    for seed in range(2):
        data = responses(seed)
        mine, theirs = ({**data, "logprob": data["logprob"].clone().requires_grad_()} for _ in range(2))
        loss, metrics = getattr(trinity, name)(**options)(**mine)
        expected, means = reference.trinity(name, theirs, options)
        torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-12)
        grads = torch.autograd.grad(loss, mine["logprob"])[0], torch.autograd.grad(expected, theirs["logprob"])[0]
        torch.testing.assert_close(*grads, rtol=1e-12, atol=1e-12)
        assert metrics == pytest.approx(means, rel=1e-9, abs=1e-12)
        assert all(isinstance(value, float) for value in metrics.values())


def test_extreme_log_ratios_meet_the_clamp() -> None:
    data = responses(0)
    data["old_logprob"] = data["logprob"] + 40 * torch.randn(6, 8, dtype=torch.float64)
    options = {"clip_range": 0.2, "enable_sequence_masking": True, "delta_sequence_masking": 0.0}
    mine, theirs = ({**data, "logprob": data["logprob"].clone().requires_grad_()} for _ in range(2))
    loss, metrics = trinity.PPOPolicyLossFn(**options)(**mine)
    expected, means = reference.trinity("PPOPolicyLossFn", theirs, options)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(
        torch.autograd.grad(loss, mine["logprob"]), torch.autograd.grad(expected, theirs["logprob"])
    )
    assert metrics == pytest.approx(means)


@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
def test_dpo_sums_all_pairs_into_one_logit(label_smoothing: float) -> None:
    data = responses(1)
    x = data["logprob"].clone().requires_grad_()
    loss, metrics = trinity.DPOLossFn(beta=0.3, label_smoothing=label_smoothing)(
        x, data["ref_logprob"], data["action_mask"]
    )
    y = data["logprob"].clone().requires_grad_()
    ratio = [(y[i] - data["ref_logprob"][i])[data["action_mask"][i]].sum() for i in range(6)]
    chosen, rejected = sum(ratio[::2]), sum(ratio[1::2])
    h = 0.3 * (chosen - rejected)
    expected = (1 - label_smoothing) * torch.log1p((-h).exp()) + label_smoothing * torch.log1p(h.exp())
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(torch.autograd.grad(loss, x), torch.autograd.grad(expected, y))
    assert metrics == pytest.approx(
        {
            "chosen_reward": 0.3 * chosen.item(),
            "rejected_reward": 0.3 * rejected.item(),
            "accuracy_mean": float(chosen > rejected),
            "dpo_loss": expected.item(),
        }
    )


BATCHING = {
    "ppo_mini_batch_size": 16,
    "ppo_micro_batch_size_per_gpu": 4,
    "ngpus_trainer": 2,
    "train_batch_size_usual": 12,
    "train_batch_size_expert": 4,
}


def mixture(data: dict, mu: float, options: dict, supervised: str, dynamic: bool) -> tuple[torch.Tensor, dict]:
    """(1 − μ)·n_u·w_u·PPO + μ·n_x·w_x·SFT of BATCHING."""
    total, metrics = torch.zeros((), dtype=torch.float64), {}
    for side, part, name, size in (("usual", 1 - mu, "PPOPolicyLossFn", 6), ("expert", mu, supervised, 2)):
        rows = [i for i in range(len(data["logprob"])) if bool(data["expert_mask"][i]) == (side == "expert")]
        weight = len(rows) * (8 / (len(data["logprob"]) * size) if dynamic else 4 / size)
        if rows:
            loss, means = reference.trinity(name, data, options, rows)
            total = total + part * weight * loss
            metrics |= {f"{side}/{key}": value * weight for key, value in means.items()}
    return total, metrics | {"loss": total.item()}


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("experts", [[1, 4], [], list(range(6))])
def test_mixtures_weigh_both_sides_and_do_without_one(dynamic: bool, mode: str, experts: list[int]) -> None:
    data = responses(2)
    data["expert_mask"] = torch.tensor([i in experts for i in range(6)])
    options = {"clip_range": 0.2, "loss_agg_mode": mode}
    for name, mu, supervised in (("MIXPolicyLossFn", 0.3, "SFTLossFn"), ("MIXCHORDPolicyLossFn", 0.0, "SFTPhiLossFn")):
        extra = (
            {"mu": mu} if name == "MIXPolicyLossFn" else {"mu_warmup_steps": 10, "mu_decay_steps": 10, "mu_peak": 0.9}
        )
        if name == "MIXCHORDPolicyLossFn":
            extra, mu = extra | {"mu_valley": 0.05}, 0.05 + 0.85 * 0.5 * (1 + math.cos(math.pi * 0.3))
        fn = getattr(trinity, name)(use_dynamic_bsz=dynamic, **BATCHING, **options, **extra)
        mine, theirs = ({**data, "logprob": data["logprob"].clone().requires_grad_()} for _ in range(2))
        loss, metrics = fn(**mine)
        expected, means = mixture(theirs, mu, options, supervised, dynamic)
        torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-12)
        grads = torch.autograd.grad(loss, mine["logprob"])[0], torch.autograd.grad(expected, theirs["logprob"])[0]
        torch.testing.assert_close(*grads, rtol=1e-12, atol=1e-12)
        if name == "MIXPolicyLossFn":
            assert set(metrics) == set(means)
        else:
            assert metrics["mu"] == pytest.approx(mu)
        assert {key: metrics[key] for key in means} == pytest.approx(means)


def test_chord_keeps_to_its_schedule() -> None:
    data = responses(0)
    fn = trinity.MIXCHORDPolicyLossFn(
        clip_range=0.2, mu_warmup_steps=10, mu_decay_steps=10, mu_peak=0.9, mu_valley=0.05
    )
    expected = {5: 0.45, 9: 0.81, 10: 0.9, 11: 0.8792, 15: 0.475, 20: 0.05, 100: 0.05}
    for step, mu in expected.items():
        assert fn(**data | {"step": torch.full((6,), step)})[1]["mu"] == pytest.approx(mu, abs=5e-5)
    with pytest.raises(ValueError, match="one number in all 6 rows"):
        fn(**data | {"step": torch.arange(6)})


@pytest.mark.parametrize("name", [*OPTIONS, "DPOLossFn", "MIXPolicyLossFn", "MIXCHORDPolicyLossFn"])
def test_backend_names_are_taken_and_unknown_ones_dropped(name: str) -> None:
    data = responses(3)
    to_verl = {"old_logprob": "old_log_probs", "ref_logprob": "ref_log_prob", "action_mask": "response_mask"}
    clip = {"clip_range": 0.2} if name[:3] in ("PPO", "GSP", "MIX") else {}
    fn, other = (getattr(trinity, name)(backend=backend, **clip) for backend in ("verl", "tinker"))
    renamed = {to_verl.get(key, key): value for key, value in data.items()}
    logprob = renamed.pop("logprob")
    torch.testing.assert_close(fn(logprob, **renamed, nothing=1)[0], other(**data)[0])
    assert [to_verl.get(key, key) for key in other.select_keys] == fn.select_keys
    assert set(other.select_keys) <= set(data)
    with pytest.raises(TypeError):
        other(**{key: value for key, value in data.items() if key != other.select_keys[0]})
    with pytest.raises(ValueError, match="backend = 'deepspeed' is not valid"):
        getattr(trinity, name)(backend="deepspeed", **clip)
