"""The golden rows of the specification, through the whole call: logits whose softmax gives just these log-probs."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from parallel_rl import ClippedPGLossFn, DPOLossFn, NLLLoss, PreferenceLoss, count_valid

L = [[-0.5, -1.0, -2.0, -0.1], [-0.7, -0.2, -1.5, -0.3], [-0.4, -0.4, -0.9, -1.1]]
OLD = [[-0.7, -0.9, -2.5, -0.1], [-0.6, -0.5, -1.4, -0.3], [-2.2, -0.4, -1.3, -1.0]]
REF = [[-0.6, -1.2, -1.8, -0.3], [-0.9, -0.1, -1.9, -0.2], [-1.5, -0.6, -1.0, -1.4]]
BEH = [[-0.71, -0.95, -2.3, -0.12], [-0.6, -0.45, -1.6, -0.3], [-2.9, -0.38, -1.3, -0.9]]
MASK = [[1, 1, 1, 0], [1, 1, 1, 1], [1, 1, 0, 0]]
ADVANTAGES = [1.0, -0.5, -2.0]
PLACES = ((0, 0), (1, 1), (2, 0))

NO_KL = {"reference_policy_kl_penalty": 0.0}
SEQ = {"token_level_loss": False}
GSPO = {**NO_KL, **SEQ, "sequence_level_importance_ratios": True}
IS = {**NO_KL, "use_importance_sampling_correction": True}


def shifted(values: list) -> Tensor:
    """Token-aligned: a first column that must not matter."""
    rows = torch.tensor(values, dtype=torch.float64)
    return torch.cat([torch.full((len(rows), 1), 7.0, dtype=torch.float64), rows], 1)


def make() -> tuple[Tensor, dict[str, Tensor]]:
    """Two words; word 0 has the wanted log-prob at every place and is the target everywhere."""
    logp = torch.tensor(L, dtype=torch.float64)
    logits = torch.stack([logp, torch.log1p(-logp.exp())], -1)
    logits = torch.cat([logits, torch.zeros(3, 1, 2, dtype=torch.float64)], 1)
    mask = torch.cat([torch.ones(3, 1), torch.tensor(MASK)], 1)
    return logits.requires_grad_(), {
        "input_ids": torch.zeros(3, 5, dtype=torch.int64),
        "token_mask": mask,
        "sample_mask": torch.ones(3),
        "advantages": torch.tensor(ADVANTAGES, dtype=torch.float64)[:, None].expand(3, 5).contiguous(),
        "prev_logprobs": shifted(OLD),
        "generation_logprobs": shifted(BEH),
        "reference_policy_logprobs": shifted(REF),
    }


def coefficients(gradient: Tensor) -> list[float]:
    """dL/d log-prob at PLACES, from dL/dz: with two words, dl/dz_0 = 1 − p, dl/dz_1 = −(1 − p)."""
    p = torch.tensor(L, dtype=torch.float64).exp()
    return [(gradient[i, t, 0] / (1 - p[i, t])).item() for i, t in PLACES]


def check_row(loss: Tensor, logits: Tensor, value: float, gradient: tuple[float, ...] | None) -> None:
    """Hold a row of the table: the loss, unless it is NaN there, and the gradient's coefficients, if it has some."""
    loss.backward()
    if not math.isnan(value):
        assert loss.item() == pytest.approx(value, abs=1e-6)
    if gradient is not None:
        assert logits.grad is not None
        assert coefficients(logits.grad) == pytest.approx(gradient, abs=1e-6)


@pytest.mark.parametrize(
    ("config", "value"),
    [
        (NO_KL, 1.430469),
        ({**NO_KL, "ratio_clip_c": 3.0}, 0.75277),
        ({**NO_KL, **SEQ}, 2.155992),
        ({**NO_KL, **SEQ, "ratio_clip_c": 3.0}, 1.139443),
        ({**NO_KL, "ratio_clip_max": 0.28, "ratio_clip_c": 3.0}, 0.741503),
        ({**GSPO, "ratio_clip_min": 3e-4, "ratio_clip_max": 4e-4}, 1.477155),
        ({**NO_KL, "use_cispo": True, "ratio_clip_min": 1.0, "ratio_clip_max": 0.28}, 0.108691),
        (IS, 2.814071),
        ({**IS, "truncated_importance_sampling_type": "tis", "truncated_importance_sampling_ratio": 2.0}, 2.795582),
        (
            {
                **IS,
                "truncated_importance_sampling_type": "icepop",
                "truncated_importance_sampling_ratio": 5.0,
                "truncated_importance_sampling_ratio_min": 0.5,
            },
            2.814071,
        ),
        (
            {
                **IS,
                "truncated_importance_sampling_type": "seq-mask-tis",
                "truncated_importance_sampling_ratio": 1.2,
                "truncated_importance_sampling_ratio_min": 0.98,
            },
            0.238557,
        ),
    ],
)
def test_policy_loss_values(config: dict, value: float) -> None:
    logits, data = make()
    loss, _ = ClippedPGLossFn(config)(logits, data, *count_valid(data))
    assert loss.item() == pytest.approx(value, abs=1e-6)


@pytest.mark.parametrize(("kind", "value"), [("k1", 0.2), ("k2", 0.086667), ("k3", 0.066218)])
def test_kl_values(kind: str, value: float) -> None:
    logits, data = make()
    _, metrics = ClippedPGLossFn({"reference_policy_kl_type": kind})(logits, data, *count_valid(data))
    assert metrics["kl_penalty"].item() == pytest.approx(value, abs=1e-6)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (NO_KL, (0.0, 0.074992, 1.344366)),
        ({**NO_KL, "ratio_clip_c": 3.0}, (0.0, 0.074992, 0.0)),
        (GSPO, (0.0, 0.042721, 0.819868)),
        ({**NO_KL, "use_cispo": True, "ratio_clip_min": 1.0, "ratio_clip_max": 0.28}, (-0.135711, 0.071111, 0.284444)),
    ],
)
def test_policy_gradients(config: dict, expected: tuple[float, ...]) -> None:
    logits, data = make()
    loss, _ = ClippedPGLossFn(config)(logits, data, *count_valid(data))
    loss.backward()
    assert logits.grad is not None
    assert coefficients(logits.grad) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("kind", ["k2", "k3"])
def test_kl_gradients_are_the_true_ones(kind: str) -> None:
    """k3 with its score-function weight: log π − log π_ref; the same as k2 without any. k2's weight adds its value."""
    logits, data = make()
    data["advantages"] = torch.zeros(3, 5, dtype=torch.float64)
    config = {"reference_policy_kl_type": kind, "reference_policy_kl_penalty": 1.0}
    loss, _ = ClippedPGLossFn(config)(logits, data, *count_valid(data))
    loss.backward()
    r = [L[i][t] - REF[i][t] for i, t in PLACES]
    expected = [x / 9 for x in r] if kind == "k3" else [(x + x * x / 2) / 9 for x in r]
    assert logits.grad is not None
    assert coefficients(logits.grad) == pytest.approx(expected, abs=1e-12)
    if kind == "k3":
        assert expected == pytest.approx((0.011111, -0.011111, 0.122222), abs=1e-6)


def test_sft() -> None:
    logits, data = make()
    loss, metrics = NLLLoss()(logits, data, *count_valid(data))
    assert loss.item() == pytest.approx(0.777778, abs=1e-6)
    assert metrics["num_unmasked_tokens"].item() == 9


def test_dpo() -> None:
    """pc = [-10, -12], pr = [-11, -9], rc = [-10.5, -11], rr = [-10, -10]: one token a response."""
    policy = torch.tensor([-10.0, -11.0, -12.0, -9.0], dtype=torch.float64)
    reference = torch.tensor([-10.5, -10.0, -11.0, -10.0], dtype=torch.float64)
    logits = torch.zeros(4, 2, 2, dtype=torch.float64)
    logits[:, 0] = torch.stack([policy, torch.log1p(-policy.exp())], -1)
    data = {
        "input_ids": torch.zeros(4, 2, dtype=torch.int64),
        "token_mask": torch.ones(4, 2),
        "sample_mask": torch.ones(4),
        "reference_policy_logprobs": torch.stack([torch.full_like(reference, 7), reference], 1),
    }
    loss, metrics = DPOLossFn({"reference_policy_kl_penalty": 0.1})(logits, data, *count_valid(data))
    assert loss.item() == pytest.approx(0.709548, abs=1e-6)
    assert metrics["accuracy"].item() == 0.5 and metrics["num_valid_samples"].item() == 2
    # the same numbers, stored as NeMo-RL stores them
    data["reference_policy_logprobs"] = torch.stack([reference, torch.full_like(reference, 7)], 1)
    config = {"reference_policy_kl_penalty": 0.1, "reference_logprobs_alignment": "predictor"}
    assert DPOLossFn(config)(logits, data, *count_valid(data))[0].item() == pytest.approx(0.709548, abs=1e-6)


@pytest.mark.parametrize("shape", [(4,), (4, 1)])
def test_preference_on_pooled_rewards(shape: tuple[int, ...]) -> None:
    rewards = torch.tensor([1.0, 0.5, -0.2, 0.3], dtype=torch.float64)
    loss, metrics = PreferenceLoss()(
        rewards.view(shape), {"sample_mask": torch.ones(4)}, torch.tensor(4), torch.tensor(4)
    )
    expected = (torch.log1p(torch.tensor(-0.5).double().exp()) + torch.log1p(torch.tensor(0.5).double().exp())) / 2
    assert loss.item() == pytest.approx(expected.item(), abs=1e-12)
    assert metrics["accuracy"].item() == 0.5


# Faults of the origin that are fixed here (Q numbers of the register of the field's bugs).


def test_importance_ratio_of_sequences_is_a_mean_over_sequences() -> None:
    """Q2: the origin multiplies [B, 1] by [B] and reports B times too much."""
    logits, data = make()
    _, metrics = ClippedPGLossFn(GSPO)(logits, data, *count_valid(data))
    rows = [sum((o - b) * m for o, b, m in zip(OLD[i], BEH[i], MASK[i], strict=True)) for i in range(3)]
    assert metrics["sampling_importance_ratio"].item() == pytest.approx(
        torch.tensor(rows).double().exp().mean().item(), rel=1e-6
    )


def test_js_divergence_is_the_named_one() -> None:
    """Q3: ½·k3(p‖m) + ½·k3(q‖m), with m in the reference's place."""
    logits, data = make()
    _, metrics = ClippedPGLossFn(NO_KL)(logits, data, *count_valid(data))
    old, beh = torch.tensor(OLD).double(), torch.tensor(BEH).double()
    mix = ((old.exp() + beh.exp()) / 2).log()
    value = sum(0.5 * ((mix - p).exp() - (mix - p) - 1) for p in (old, beh))
    want = (value * torch.tensor(MASK)).sum() / 9
    assert metrics["js_divergence_error"].item() == pytest.approx(want.item(), rel=1e-6)


def test_positive_nll_divides_by_the_global_count() -> None:
    """Q4: in two micro-batches the term is what it is in one."""
    logits, data = make()
    data["rewards"] = torch.tensor([1.0, -1.0, 2.0], dtype=torch.float64)
    loss_fn = ClippedPGLossFn({**NO_KL, "positive_example_nll_weight": 0.1})
    counts = count_valid(data)
    parts = [
        (logits[rows], {name: value[rows] for name, value in data.items()}, *counts)
        for rows in (slice(0, 1), slice(1, 3))
    ]
    statistics = loss_fn.count([data for _, data, *_ in parts])
    total = sum(loss_fn(*part, statistics=statistics)[1]["positive_nll_loss"].item() for part in parts)
    assert total == pytest.approx(-(-0.5 - 1.0 - 2.0 - 0.4 - 0.4) / 5, abs=1e-12)


def test_full_and_token_gspo_differ_only_where_advantages_vary() -> None:
    """The gradient runs through the sequence mean: every token's coefficient is −ρ·ΣA/n², not −ρ·A_t/n."""
    logits, data = make()
    data["advantages"] = torch.tensor([[0, 3.0, 0, 0, 0]] * 3, dtype=torch.float64)
    loss, _ = ClippedPGLossFn({**GSPO, "ratio_clip_min": 0.9, "ratio_clip_max": 9.0})(logits, data, *count_valid(data))
    loss.backward()
    ratio = torch.tensor([0.2, -0.1, 0.5]).double().mean().exp()
    assert logits.grad is not None
    coefficient = logits.grad[0, :3, 0] / (1 - torch.tensor(L[0][:3]).double().exp())
    assert coefficient.tolist() == pytest.approx([(-ratio * 3.0 / 9 / 3).item()] * 3, abs=1e-9)
