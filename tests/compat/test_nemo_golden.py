"""What NeMo-RL's own code gives on small batches, which is not there to compare with: its present source, and 0.5 by logits."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from parallel_rl.compat import nemo_rl
from tests.compat.test_golden import BEH, MASK, OLD, OLD_VALUES, RETURNS, VALUES, A, L, _t

REF = _t([[-0.6, -1.2, -1.8, -0.3], [-0.9, -0.1, -1.9, -0.2], [-1.5, -0.6, -1.0, -1.4]])
OFF = {"reference_policy_kl_penalty": 0.0}
IS = {"use_importance_sampling_correction": True}
TYPE, HIGH, LOW = (f"truncated_importance_sampling_{name}" for name in ("type", "ratio", "ratio_min"))


def aligned(x: Tensor) -> Tensor:
    """[B, S] from [B, S − 1]: column 0 is never scored."""
    return torch.cat([torch.zeros(len(x), 1, dtype=x.dtype), x], 1)


def data() -> dict[str, Tensor]:
    fields = {"advantages": A, "prev_logprobs": OLD, "generation_logprobs": BEH, "reference_policy_logprobs": REF}
    found = {name: aligned(x) for name, x in fields.items()} | {"token_mask": aligned(MASK)}
    return found | {
        "input_ids": torch.zeros(3, 5, dtype=torch.int64),
        "sample_mask": torch.ones(3),
        "rewards": _t([1, 0, 2]),
    }


#: options, loss, (kl_penalty, probs_ratio, js_divergence_error, sampling_importance_ratio), dL/dl at (0, 0), (1, 1), (2, 0)
PRESENT: list[tuple[dict, float, tuple[float, ...], tuple[float, ...]]] = [
    ({}, 1.431132, (0.066218, 1.664905, 0.007857, 1.116293), (0.000111, 0.074881, 1.345588)),
    (
        {"reference_policy_kl_type": "k2", "token_level_loss": False},
        2.157176,
        (0.118333, 1.664905, 0.007857, 1.116293),
        (0.000117, 0.056165, 2.019391),
    ),
    (
        {"use_on_policy_kl_approximation": True, "reference_policy_kl_penalty": 0.3, "kl_output_clamp_value": 0.1},
        1.43972,
        (0.030834, 1.664905, 0.007857, 1.116293),
        (0.004112, 0.070712, 1.344366),
    ),
    (
        {**OFF, **IS, TYPE: "tis", HIGH: 1.1, LOW: 0.9},
        1.568714,
        (0.0, 1.664905, 0.007857, 1.010305),
        (0.0, 0.071335, 1.478803),
    ),
    (
        {**OFF, **IS, TYPE: "icepop", HIGH: 1.1, LOW: 0.9},
        0.154615,
        (0.0, 1.664905, 0.007857, 0.665861),
        (0.0, 0.071335, 0.0),
    ),
    (
        {**OFF, **IS, TYPE: "seq-mask-tis", HIGH: 1.2, LOW: 0.98},
        0.238557,
        (0.0, 1.664905, 0.007857, 0.463626),
        (0.0, 0.071335, 0.0),
    ),
    (
        {**OFF, **IS, "token_level_loss": False, "sequence_level_importance_ratios": True},
        3.087435,
        (0.0, 1.409408, 0.007857, 4.00507),  # Q2: three times 1.335
        (0.0, 0.049635, 1.618319),
    ),
    (
        {**OFF, "use_cispo": True, "ratio_clip_min": 1.0, "ratio_clip_max": 0.28},
        0.108691,
        (0.0, 1.664905, 0.007857, 1.116293),
        (-0.135711, 0.071111, 0.284444),
    ),
    (
        {**OFF, "disable_ppo_ratio": True},
        0.061111,
        (0.0, -0.777778, 0.007857, 1.116293),
        (-0.111111, 0.055556, 0.222222),
    ),
    ({**OFF, "ratio_clip_c": 3.0}, 0.75277, (0.0, 1.664905, 0.007857, 1.116293), (0.0, 0.074992, 0.0)),
    (
        {**OFF, **IS, "force_on_policy_ratio": True, "ratio_clip_c": 3.0},
        2.770848,
        (0.0, 1.0, 0.073679, 2.332388),
        (-0.137075, 0.071335, 2.707221),
    ),
    (
        {**OFF, "positive_example_nll_weight": 0.5},
        1.860469,
        (0.0, 1.664905, 0.007857, 1.116293),
        (-0.1, 0.074992, 1.244366),
    ),
]


@pytest.mark.parametrize(
    ("options", "loss", "means", "gradient"), PRESENT, ids=lambda x: str(x) if isinstance(x, dict) else ""
)
def test_clipped_pg(options: dict, loss: float, means: tuple, gradient: tuple) -> None:
    x = L.clone().requires_grad_()
    found, metrics = nemo_rl.ClippedPGLossFn(options)(x, data(), torch.tensor(3), torch.tensor(9))
    (grad,) = torch.autograd.grad(found, x)
    names = ("kl_penalty", "probs_ratio", "js_divergence_error", "sampling_importance_ratio")
    assert (found.item(), *(metrics[name] for name in names)) == pytest.approx((loss, *means), abs=5.1e-7)
    assert [grad[0, 0].item(), grad[1, 1].item(), grad[2, 0].item()] == pytest.approx(gradient, abs=5.1e-7)


def test_metrics_of_clipped_pg() -> None:
    _, metrics = nemo_rl.ClippedPGLossFn({})(L, data(), torch.tensor(3), torch.tensor(9))
    expected = {
        "loss": 1.431132, "probs_ratio": 1.664905, "probs_ratio_clamped": 1.057168, "probs_ratio_min": 0.904837,
        "probs_ratio_max": 6.049647, "probs_ratio_clamped_min": 0.904837, "probs_ratio_clamped_max": 1.2,
        "kl_penalty": 0.066218, "token_mult_prob_error": 1.176595, "gen_kl_error": 0.039626,
        "policy_kl_error": 0.026608, "js_divergence_error": 0.007857, "sampling_importance_ratio": 1.116293,
        "num_valid_samples": 3.0, "approx_entropy": 1.375646, "positive_nll_loss": 0.0,
    }  # fmt: skip
    assert metrics == pytest.approx(expected, abs=5.1e-7)


def test_values() -> None:
    fields = {"token_mask": MASK, "sample_mask": torch.ones(3), "returns": RETURNS, "values": OLD_VALUES}
    _, metrics = nemo_rl.MseValueLossFn({"scale": 0.4, "cliprange": 0.2})(VALUES, fields, None, torch.tensor(9))
    means = {"vf_clipfrac": 0.222222, "returns_mean": 0.555556, "values_mean": 0.211111, "residual_sq_mean": 0.521111}
    ends = {"values_min": -0.1, "values_max": 0.5, "num_valid_samples": 3, "returns_sq_mean": 0.555556}
    assert metrics == pytest.approx({"loss": 0.118889} | means | ends, abs=5.1e-7)


IDS = torch.tensor([[0, 1, 2, 3, 4], [5, 4, 3, 2, 1], [1, 1, 0, 5, 0], [2, 3, 4, 5, 0]])
TOKENS = torch.tensor([[0, 1, 1, 1, 0], [0, 0, 1, 1, 1], [0, 1, 1, 0, 0], [0, 1, 1, 1, 1]])
WAVE = torch.cos(torch.arange(20.0)).view(4, 5)
TOP_K = {
    "teacher_topk_logits": torch.cos(torch.arange(40.0)).view(4, 5, 2),
    "teacher_topk_indices": torch.tensor([1, 4]).expand(4, 5, 2),
}
PG = {
    "reference_policy_kl_penalty": 0.0, "reference_policy_kl_type": "k3", "kl_input_clamp_value": 20.0,
    "kl_output_clamp_value": 10.0, "ratio_clip_min": 0.2, "ratio_clip_max": 0.28, "ratio_clip_c": 3.0,
    "use_on_policy_kl_approximation": False, "use_importance_sampling_correction": True,
    "truncated_importance_sampling_ratio": 1.2, "token_level_loss": True,
}  # fmt: skip
DPO = {
    "reference_policy_kl_penalty": 0.1, "preference_loss_weight": 1.0, "sft_loss_weight": 0.5,
    "preference_average_log_probs": False, "sft_average_log_probs": True,
}  # fmt: skip
GSPO = {
    "token_level_loss": False,
    "sequence_level_importance_ratios": True,
    "truncated_importance_sampling_ratio": None,
}
FIELDS = {
    "input_ids": IDS,
    "token_mask": TOKENS,
    "sample_mask": torch.ones(4),
    "advantages": WAVE,
    "prev_logprobs": WAVE - 2,
    "generation_logprobs": WAVE.roll(1, 1) - 2,
    "reference_policy_logprobs": WAVE - 2,
    **TOP_K,
}
SINE = torch.sin(torch.arange(120.0)).view(4, 5, 6)
#: loss, call, the loss's value(s), dL/dz at (0, 1, 2), (2, 0, 1), (3, 2, 5), and some metrics
DOCUMENTED: dict[str, tuple[object, dict, list[float], tuple[float, ...], dict[str, float]]] = {
    "nll": (nemo_rl.NLLLoss(), {}, [1.929025], (-0.05472, -0.079146, -0.069711), {"num_unmasked_tokens": 12}),
    "nll of rows": (
        nemo_rl.NLLLoss(),
        {"dpo_loss": True},
        [3.692446, 6.128726, 5.026059, 8.301075],
        (-0.656644, -0.949748, -0.836529),
        {"num_valid_samples": 4},
    ),
    "nll of rows, averaged": (
        nemo_rl.NLLLoss(),
        {"dpo_loss": True, "dpo_average_log_probs": True},
        [1.230815, 2.042908, 2.513029, 2.075269],
        (-0.218881, -0.474874, -0.209132),
        {},
    ),
    "dpo": (
        nemo_rl.DPOLossFn(DPO),
        {},
        [1.593756],
        (-0.068788, -0.143912, 0.02219),
        {"sft_loss": 1.871922, "preference_loss": 0.657795, "accuracy": 0.5, "rewards_chosen_mean": 0.495993}
        | {"rewards_rejected_mean": -0.33309, "num_valid_samples": 2},
    ),
    "dpo, averaged": (
        nemo_rl.DPOLossFn({**DPO, "preference_average_log_probs": True, "sft_loss_weight": 0.0}),
        {},
        [0.678633],
        (-0.00521, -0.012082, 0.005321),
        {"rewards_chosen_mean": 0.14938, "rewards_rejected_mean": -0.153993},
    ),
    "clipped_pg": (
        nemo_rl.ClippedPGLossFn(PG),
        {},
        [0.043573],
        (0.0, -0.000155, -0.034474),
        {"probs_ratio": 1.447043, "probs_ratio_clamped": 1.017847, "token_mult_prob_error": 1.964426}
        | {"sampling_importance_ratio": 0.840412, "approx_entropy": 2.077912, "js_divergence_error": 0.058739},
    ),
    "distillation": (
        nemo_rl.DistillationLossFn({"kl_type": "mixed", "mixed_kl_weight": 0.3, "zero_outside_topk": False}),
        {},
        [0.288952],
        (0.0, -0.033721, 0.0),
        {"num_valid_samples": 4},
    ),
    "distillation, whole": (
        nemo_rl.DistillationLossFn({"kl_type": "mixed", "mixed_kl_weight": 0.3, "zero_outside_topk": True}),
        {},
        [46.009243],
        (0.656985, -0.202581, 0.303975),
        {},
    ),
}


@pytest.mark.parametrize("name", DOCUMENTED)
def test_documented_call(name: str) -> None:
    fn, call, values, gradient, means = DOCUMENTED[name]
    x = SINE.clone().requires_grad_()
    loss, metrics = fn(x, FIELDS, torch.tensor(4.0), torch.tensor(12.0), None, None, None, **call)
    (grad,) = torch.autograd.grad(loss.sum(), x)
    assert loss.flatten().tolist() == pytest.approx(values, rel=2e-6, abs=1e-6)
    assert [grad[0, 1, 2].item(), grad[2, 0, 1].item(), grad[3, 2, 5].item()] == pytest.approx(gradient, abs=2e-6)
    assert {key: metrics[key] for key in means} == pytest.approx(means, abs=2e-6)
    assert loss.dtype == torch.float32 and "is_oob_ratio" not in metrics


def test_documented_wrapper() -> None:
    row = torch.sin(torch.arange(120.0)).view(1, 20, 6).requires_grad_()
    bounds, padded = torch.tensor([0, 4, 9, 12, 17]), torch.tensor([0, 4, 10, 14, 20])
    fn = nemo_rl.SequencePackingLossWrapper(nemo_rl.ClippedPGLossFn({**PG, **GSPO}), bounds, padded)
    loss, metrics = fn(row, FIELDS, torch.tensor(4.0), torch.tensor(12.0))
    (grad,) = torch.autograd.grad(loss, row)
    assert loss.item() == pytest.approx(-0.331883, abs=2e-6)
    assert [grad[0, 1, 2].item(), grad[0, 6, 3].item(), grad[0, 16, 5].item()] == pytest.approx(
        (0.010097, -0.000529, -0.029627), abs=2e-6
    )
    expected = {"probs_ratio": 1.427981, "probs_ratio_min": 0.391735, "sampling_importance_ratio": 2.854314}
    assert {key: metrics[key] for key in expected} == pytest.approx(expected, abs=2e-6)


def test_rewards() -> None:
    rewards = torch.tensor([[1.0], [0.0], [0.5], [2.0]])
    loss, metrics = nemo_rl.PreferenceLoss()(rewards, FIELDS, torch.tensor(6.0), None)
    expected = {"loss": 0.671558, "accuracy": 0.333333, "rewards_chosen_mean": 0.5, "rewards_rejected_mean": 0.666667}
    assert metrics == pytest.approx(expected | {"num_valid_samples": 2}, abs=5.1e-7) and loss.item() == metrics["loss"]
