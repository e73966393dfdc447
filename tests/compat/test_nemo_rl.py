"""NeMo-RL's losses against their formulas, by the documented call and by that of the present release."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from parallel_rl import LMHeadInput
from parallel_rl.compat import nemo_rl
from tests.compat import nemo_reference as reference
from tests.compat.nemo_reference import Data

OFF = {"reference_policy_kl_penalty": 0.0}
IS = {"use_importance_sampling_correction": True}
GSPO = {"token_level_loss": False, "sequence_level_importance_ratios": True}


def truncated(kind: str, high: float, low: float | None) -> dict:
    """Options of a truncation."""
    prefix = "truncated_importance_sampling_"
    return {**IS, f"{prefix}type": kind, f"{prefix}ratio": high, f"{prefix}ratio_min": low}


CLIPPED_PG: list[dict] = [
    {},
    {"reference_policy_kl_type": "k2", "token_level_loss": False, "ratio_clip_max": 0.28},
    {"reference_policy_kl_penalty": 0.3, "reference_policy_kl_type": "k1", "kl_input_clamp_value": None},
    {"reference_policy_kl_penalty": 0.3, "kl_input_clamp_value": 0.4, "kl_output_clamp_value": 0.05},
    {"use_on_policy_kl_approximation": True, "reference_policy_kl_penalty": 0.5, "kl_output_clamp_value": None},
    {"use_kl_in_reward": True, "use_on_policy_kl_approximation": True},
    {**OFF, **IS},
    {**OFF, **truncated("tis", 1.2, None)},
    {**OFF, **truncated("tis", 1.2, 0.8), "token_level_loss": False},
    {**OFF, **truncated("icepop", 1.3, 0.7)},
    {**OFF, **truncated("seq-mask-tis", 1.1, 0.9)},
    {**GSPO, **IS, "ratio_clip_c": 3.0},
    {**GSPO, **truncated("tis", 1.5, 0.5)},
    {**GSPO, **IS, "disable_ppo_ratio": True},
    {**OFF, "use_cispo": True, "ratio_clip_min": 1.0},
    {"disable_ppo_ratio": True, "ratio_clip_c": 3.0, "ratio_clip_max": 0.5},
    {"force_on_policy_ratio": True, "ratio_clip_c": 3.0, **IS},
    {"force_on_policy_ratio": True, "disable_ppo_ratio": True, "token_level_loss": False},
    {**OFF, "ratio_clip_c": 1.1},
    {**OFF, "positive_example_nll_weight": 0.5, "token_level_loss": False},
]
DPO: list[dict] = [
    {},
    {"reference_policy_kl_penalty": 0.5, "sft_loss_weight": 0.3},
    {"preference_average_log_probs": True, "sft_average_log_probs": True, "sft_loss_weight": 1.0},
    {"reference_policy_kl_penalty": 0.0, "preference_loss_weight": 0.0, "sft_loss_weight": 1.0},
    {"sft_average_log_probs": True, "preference_loss_weight": 2.0},
]
DISTILLATION: list[dict] = [
    {"kl_type": kind, "zero_outside_topk": whole, "mixed_kl_weight": 0.3}
    for kind in ("forward", "reverse", "mixed")
    for whole in (False, True)
]
SEQS, TOKS = torch.tensor(7.0), torch.tensor(31.0)


def assert_same(found: tuple, x: Tensor, expected: tuple, y: Tensor, tolerance: float = 1e-12) -> None:
    (loss, metrics), (wanted, means) = found, expected
    torch.testing.assert_close(loss, wanted, rtol=tolerance, atol=tolerance)
    grads = torch.autograd.grad(loss, x)[0], torch.autograd.grad(wanted, y)[0]
    torch.testing.assert_close(*grads, rtol=tolerance, atol=tolerance)
    assert type(metrics) is dict and all(type(value) in (float, int) for value in metrics.values())
    assert metrics == pytest.approx(means, rel=1e-9, abs=1e-12)


def by_logits(fn: Callable, data: Data) -> tuple[tuple, Tensor]:
    x = data["logits"].clone().requires_grad_()
    return fn(x, data, SEQS, TOKS), x


def by_logprobs(fn: Callable, data: Data) -> tuple[tuple, Tensor]:
    x = data["logits"].clone().requires_grad_()
    inputs, same = nemo_rl.prepare_loss_input(x, data, fn)
    assert same is data
    return fn(data=data, global_valid_seqs=SEQS, global_valid_toks=TOKS, **inputs), x


CALLS = pytest.mark.parametrize("call", [by_logits, by_logprobs])


@CALLS
@pytest.mark.parametrize("options", CLIPPED_PG, ids=str)
def test_clipped_pg(options: dict, call: Callable) -> None:
    data = reference.batch(0)
    found, x = call(nemo_rl.ClippedPGLossFn(options), data)
    y = data["logits"].clone().requires_grad_()
    expected = reference.clipped_pg(reference.logprobs_of(y, data), data, options, SEQS.item(), TOKS.item())
    assert_same(found, x, expected, y)


@CALLS
@pytest.mark.parametrize("options", DPO, ids=str)
@pytest.mark.parametrize("odd", [False, True])
def test_dpo(options: dict, odd: bool, call: Callable) -> None:
    data = reference.pairs(1)
    if odd:  # a pair counts where its chosen row does, the mean of rejected rewards where its rejected one
        data["sample_mask"] = torch.tensor([1.0, 0.0, 1.0, 1.0, 0.0, 0.0])
    found, x = call(nemo_rl.DPOLossFn(options), data)
    y = data["logits"].clone().requires_grad_()
    expected = reference.dpo(reference.logprobs_of(y, data), data, options, SEQS.item())
    if odd:
        assert found[1].pop("rewards_rejected_mean") != pytest.approx(expected[1].pop("rewards_rejected_mean"))
    assert_same(found, x, expected, y)
    if call is by_logits and not odd:  # the tokens of the step are not read
        assert nemo_rl.DPOLossFn(options)(x, data, SEQS)[0].item() == found[0].item()


@CALLS
@pytest.mark.parametrize("options", DISTILLATION, ids=str)
def test_distillation(options: dict, call: Callable) -> None:
    data = reference.batch(2)
    found, x = call(nemo_rl.DistillationLossFn(options), data)
    y = data["logits"].clone().requires_grad_()
    assert_same(found, x, reference.distillation(y, data, options, TOKS.item()), y, 1e-11)


def test_likelihoods() -> None:
    data = reference.batch(3)
    x = data["logits"].clone().requires_grad_()
    rows = [reference.logprobs_of(x, data)[i, reference.places(data, i)] * data["sample_mask"][i] for i in range(6)]
    sums, lengths = torch.stack([-row.sum() for row in rows]), [max(len(row), 1) for row in rows]
    counts = {"num_unmasked_tokens": sum(len(row) for row in rows[:4]), "num_valid_samples": 4}
    loss, metrics = nemo_rl.NLLLoss()(x, data, None, TOKS)
    torch.testing.assert_close(loss, sums.sum() / TOKS)
    assert metrics == pytest.approx({"loss": sums.sum().item() / TOKS.item(), **counts})
    given = reference.logprobs_of(data["logits"], data)
    for fn, first in ((nemo_rl.NLLLoss(), x), (nemo_rl.NLLLossFn(), given)):
        loss, metrics = fn(first, data, None, TOKS, dpo_loss=True)
        torch.testing.assert_close(loss, sums)
        torch.testing.assert_close(metrics.pop("loss"), sums.detach())
        assert metrics == counts
        averaged, _ = fn(first, data, None, TOKS, dpo_loss=True, dpo_average_log_probs=True)
        torch.testing.assert_close(averaged, sums / torch.tensor(lengths))


def test_rewards_of_pairs() -> None:
    rewards = torch.tensor([1.0, 0.0, 0.5, 2.0, 9.0, torch.nan], dtype=torch.float64).requires_grad_()
    data = {"sample_mask": torch.tensor([1, 1, 1, 1, 0, 0])}
    loss, metrics = nemo_rl.PreferenceLoss()(rewards, data, SEQS, None)
    expected = (math.log1p(math.exp(-1)) + math.log1p(math.exp(1.5))) / 3.5
    assert loss.item() == pytest.approx(expected)
    means = {"accuracy": 1 / 3.5, "rewards_chosen_mean": 1.5 / 3.5, "rewards_rejected_mean": 2 / 3.5}
    assert metrics == pytest.approx({"loss": expected, **means, "num_valid_samples": 2})
    assert torch.autograd.grad(loss, rewards)[0][4:].tolist() == [0, 0]
    again, _ = nemo_rl.PreferenceLossFn()(logits=rewards[:, None], data=data, global_valid_seqs=SEQS)
    assert again.item() == loss.item()
    data["sample_mask"] = torch.tensor([1, 1, 0, 1, 0, 0])  # the rejected row of a pair that does not count
    assert nemo_rl.PreferenceLoss()(rewards, data, SEQS)[1]["rewards_rejected_mean"] == pytest.approx(2 / 3.5)
    chosen, rejected = nemo_rl.PreferenceLoss().split_output_tensor(torch.arange(4))
    assert (chosen.tolist(), rejected.tolist()) == ([0, 2], [1, 3])


@pytest.mark.parametrize("clip", [None, 0.0, 0.2])
def test_values(clip: float | None) -> None:
    data = reference.batch(4)
    x = data["logits"][..., 0].clone().requires_grad_()
    loss, metrics = nemo_rl.MseValueLossFn({"scale": 0.4, "cliprange": clip})(x[..., None], data, None, TOKS)
    valid = data["token_mask"].bool() & data["sample_mask"].bool()[:, None]  # column 0 too
    v, old, r = x[valid], data["values"][valid], data["returns"][valid]
    plain = (v - r) ** 2
    clipped = (old + (v - old).clamp(-clip, clip) - r) ** 2 if clip else plain
    expected = 0.2 * torch.maximum(plain, clipped).sum() / TOKS
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(torch.autograd.grad(loss, x)[0], torch.autograd.grad(expected, x)[0])
    means = {"vf_clipfrac": clipped > plain, "returns_mean": r, "values_mean": v, "returns_sq_mean": r**2}
    wanted = {key: value.double().sum().item() / TOKS.item() for key, value in means.items()}
    wanted |= {"residual_sq_mean": plain.sum().item() / TOKS.item(), "loss": expected.item(), "num_valid_samples": 6}
    assert metrics == pytest.approx(wanted | {"values_min": v.min().item(), "values_max": v.max().item()})
    nothing = {**data, "sample_mask": torch.zeros(6)}
    assert nemo_rl.MseValueLossFn({})(x, nothing, None, TOKS)[1]["values_min"] == 0


def test_draft_heads() -> None:
    data = reference.batch(5)
    draft, policy = data["logits"].clone().requires_grad_(), data["logits"].roll(1, 0)
    loss = nemo_rl.DraftCrossEntropyLossFn()(policy, draft, data["token_mask"], data, None, TOKS)
    valid = data["token_mask"].bool() & data["sample_mask"].bool()[:, None]
    expected = -(policy.softmax(-1) * draft.log_softmax(-1)).sum(-1)[valid].sum() / TOKS
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(torch.autograd.grad(loss, draft)[0], torch.autograd.grad(expected, draft)[0])


def test_logits_of_masked_tokens_do_not_matter() -> None:
    """Q1: NaN there is neither in the loss nor in the gradient, of rows that sample_mask leaves out too."""
    for fn, data in (
        (nemo_rl.ClippedPGLossFn({}), reference.batch(10)),
        (nemo_rl.NLLLoss(), reference.batch(10)),
        (nemo_rl.DPOLossFn({}), reference.pairs(10)),
        (nemo_rl.DistillationLossFn({"zero_outside_topk": True}), reference.batch(10)),
    ):
        clean = data["logits"].clone().requires_grad_()
        valid = (data["token_mask"] * data["sample_mask"][:, None])[:, 1:].bool()
        used = torch.nn.functional.pad(valid, (0, 1))[..., None]
        dirty = torch.where(used, clean.detach(), torch.nan).requires_grad_()
        answers = [fn(x, data, SEQS, TOKS) for x in (clean, dirty)]
        torch.testing.assert_close(answers[1][0], answers[0][0], rtol=0, atol=0)
        grads = [torch.autograd.grad(loss, x)[0] for (loss, _), x in zip(answers, (clean, dirty), strict=True)]
        torch.testing.assert_close(grads[1], grads[0], rtol=0, atol=0)


def test_hidden_states_stand_for_logits() -> None:
    data = reference.batch(8)
    hidden = torch.randn(6, 8, 4, dtype=torch.float64).requires_grad_()
    weight = torch.randn(8, 4, dtype=torch.float64).requires_grad_()
    fn = nemo_rl.ClippedPGLossFn({**GSPO, **IS})
    answers = [fn(first, data, SEQS, TOKS) for first in (hidden @ weight.T, LMHeadInput(hidden, weight))]
    torch.testing.assert_close(answers[1][0], answers[0][0])
    assert answers[1][1] == pytest.approx(answers[0][1])
    grads = [torch.autograd.grad(loss, (hidden, weight)) for loss, _ in answers]
    torch.testing.assert_close(grads[1], grads[0])


def test_a_truncated_sampler_leaves_the_kl_to_the_whole_policy() -> None:
    """Q7: what top-k excludes comes in as log-prob 0, and stays in the loss."""

    class Sampling:
        top_k, top_p = 3, 1.0

    data = reference.batch(9)
    fn = nemo_rl.ClippedPGLossFn({"reference_policy_kl_penalty": 0.2})
    inputs, data = nemo_rl.prepare_loss_input(data["logits"], data, fn, sampling_params=Sampling())
    plain = reference.logprobs_of(data["logits"], data)
    torch.testing.assert_close(data["curr_logprobs_unfiltered"], plain)
    z = data["logits"][:, :-1]
    kept = z >= z.sort(-1, descending=True).values[..., 2:3]
    truncated_logprobs = torch.where(kept, z, -torch.inf).log_softmax(-1)
    picked = truncated_logprobs.gather(-1, data["input_ids"][:, 1:, None])[..., 0]
    valid = (data["token_mask"][:, 1:] * data["sample_mask"][:, None]).bool()
    torch.testing.assert_close(inputs["next_token_logprobs"], torch.where(valid & picked.isfinite(), picked, 0))
    loss, metrics = fn(data=data, global_valid_seqs=SEQS, global_valid_toks=TOKS, **inputs)
    without = nemo_rl.ClippedPGLossFn(OFF)(inputs["next_token_logprobs"], data, SEQS, TOKS)[0]
    kl = reference.estimate((data["reference_policy_logprobs"][:, 1:] - plain)[valid], "k3").clamp(max=10)
    assert metrics["kl_penalty"] == pytest.approx(kl.sum().item() / TOKS.item())
    assert loss.item() == pytest.approx(without.item() + 0.2 * metrics["kl_penalty"])
    assert "curr_logprobs_unfiltered" not in nemo_rl.prepare_loss_input(data["logits"], reference.batch(9), fn)[1]


def test_nothing_valid_is_an_exact_zero() -> None:
    data = reference.batch(0)
    data["token_mask"] = torch.zeros_like(data["token_mask"])
    zero = torch.tensor(0.0)
    for fn in (nemo_rl.ClippedPGLossFn({}), nemo_rl.NLLLoss(), nemo_rl.DistillationLossFn({})):
        x = data["logits"].clone().requires_grad_()
        loss, _ = fn(x, data, zero, zero)
        assert loss.item() == 0 and torch.autograd.grad(loss, x)[0].eq(0).all()


def test_counts_of_one_give_raw_sums_that_the_trainer_divides() -> None:
    """The split step calls with placeholders; metric_normalizations says what divides each metric at its end."""
    data = copy.deepcopy(reference.batch(3))
    for options in (truncated("seq-mask-tis", 1.5, 0.7), {**GSPO, **truncated("tis", 2.0, None)}):
        fn, one = nemo_rl.ClippedPGLossFn(options), torch.tensor(1.0)
        whole, raw = (fn(data["logits"], data, *counts)[1] for counts in ((SEQS, TOKS), (one, one)))
        divisors = {"tokens": TOKS.item(), "sequences": SEQS.item(), "none": 1.0}
        assert set(fn.metric_normalizations) == set(whole)
        found = {key: raw[key] / divisors[kind.value] for key, kind in fn.metric_normalizations.items()}
        assert found == pytest.approx(whole)
