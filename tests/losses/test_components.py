"""A sum of named losses: what each component sees, and what it is divided by."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from parallel_rl import ComponentsLossFn, MixLossFn, NLLLoss, PolicyLossFn, count_valid, get_loss
from parallel_rl.losses import CoefficientScheduleConfig
from parallel_rl.testing.batches import make_batch
from tests.losses.steps import step

POLICY = {"loss": {"name": "policy", "options": {"surrogate": {"name": "ppo", "clip_low": 0.1, "clip_high": 0.3}}}}
NLL = {"loss": {"name": "nll"}}
OBSERVED = {**NLL, "mask": "observation_mask"}


def of(**components: dict[str, Any]) -> ComponentsLossFn:
    return ComponentsLossFn({"components": components})


def batch() -> tuple[Tensor, dict[str, Tensor]]:
    logits, data, _ = make_batch(7, False, "components", torch.float64)
    return logits, data


def test_masks_of_components_may_be_floats() -> None:
    """As `token_mask` may; integers and bools were asked for."""
    logits, data = batch()
    loss_fn = of(own={**NLL, "mask": "not observation_mask", "rows": "expert_mask"}, other=OBSERVED)
    shares = []
    for dtype in (torch.bool, torch.int32, torch.float32, torch.float64):
        cast = {**data, **{name: data[name].to(dtype) for name in ("observation_mask", "expert_mask")}}
        shares.append(loss_fn(logits, cast, *count_valid(cast), statistics=loss_fn.count(cast))[0])
    assert len(set(map(float, shares))) == 1 and shares[0] != 0


def test_a_mask_may_be_a_field_of_another_component() -> None:
    logits, data = batch()
    weighted = {"loss": {"name": "nll", "options": {"token_weights": "count"}}}
    data["token_weights"] = (data["token_weights"] > 0).double()
    both = of(first=weighted, second={**NLL, "mask": "token_weights"})
    reverse = of(second={**NLL, "mask": "token_weights"}, first=weighted)
    call = (logits, data, *count_valid(data))
    losses = [loss_fn(*call, statistics=loss_fn.count(data))[0].item() for loss_fn in (both, reverse)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-12)
    fields = {field.name: field.dtype for field in both.requirements.fields}
    assert fields == {"token_weights": "float"} and both.requirements.fields == reverse.requirements.fields


def oracle(logits: Tensor, data: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """RL on the policy's tokens + 0.3·NLL of observations (a mean of rows' means) − 0.4·k2 KL to a second reference on rows
    that are not an expert's, token by token.
    """
    valid, scores = data["sample_mask"].bool(), logits.log_softmax(-1)
    parts: dict[str, list[Tensor]] = {"policy": [], "observed": [], "second": []}
    for i in range(len(logits)):
        observed = []
        for t in range(1, logits.shape[1]):
            l = scores[i, t - 1, data["input_ids"][i, t]]  # noqa: E741
            if valid[i] and data["token_mask"][i, t]:
                a, ratio = data["advantages"][i, t], (l - data["prev_logprobs"][i, t]).exp()
                parts["policy"].append(-torch.minimum(ratio * a, ratio.clamp(0.9, 1.3) * a))
                if not data["expert_mask"][i]:
                    parts["second"].append((data["teacher_token_logprobs"][i, t] - l).square() / 2)
            if valid[i] and data["observation_mask"][i, t]:
                observed.append(-l)
        if valid[i]:
            parts["observed"].append(torch.stack(observed).mean() if observed else logits.new_zeros(()))
    shares = {name: torch.stack(each).mean() for name, each in parts.items()}
    return shares["policy"] + 0.3 * shares["observed"] - 0.4 * shares["second"], shares


CONFIG = {
    "policy": POLICY,
    "observed": {
        "loss": {"name": "nll", "options": {"aggregation": "seq-mean-token-mean"}},
        "mask": "observation_mask",
        "coefficient": 0.3,
    },
    "second": {
        "loss": {"name": "reference_kl", "options": {"estimator": "k2", "gradient": "plain"}},
        "rows": "not expert_mask",
        "coefficient": -0.4,
        "fields": {"reference_policy_logprobs": "teacher_token_logprobs"},
    },
}


@pytest.mark.parametrize("parts", [None, [range(5), range(5, 6), range(6, 12)]])
def test_each_component_is_a_mean_over_its_own_tokens(parts: list[range] | None) -> None:
    """Against loops: a denominator that counts another component's tokens, or a micro-batch's own, is off."""
    logits, data = batch()
    leaf = logits.clone().requires_grad_()
    want, shares = oracle(leaf, data)
    want.backward()
    found = step(of(**CONFIG), logits, data, parts)
    assert found.loss == pytest.approx(want.item(), rel=1e-12)
    assert leaf.grad is not None
    torch.testing.assert_close(found.gradient, leaf.grad, rtol=1e-9, atol=1e-14)
    for name, share in shares.items():
        assert found.metrics[f"{name}/loss"] == pytest.approx(share.item(), rel=1e-12)


def test_what_a_component_does_not_read_may_hold_anything() -> None:
    """Observations have no advantages and no old log-probs; masked rows of a component have none of its fields."""
    logits, data = batch()
    right = step(of(**CONFIG), logits, data)
    for name in ("advantages", "prev_logprobs"):
        data[name] = torch.where(data["token_mask"].bool(), data[name], math.nan)
    sampled = data["token_mask"].bool() & ~data["expert_mask"][:, None]
    data["teacher_token_logprobs"] = torch.where(sampled, data["teacher_token_logprobs"], math.nan)
    found = step(of(**CONFIG), logits, data)
    assert found.loss == right.loss and torch.equal(found.gradient, right.gradient)


def test_one_component_is_the_loss_itself() -> None:
    logits, data = batch()
    alone = step(PolicyLossFn(POLICY["loss"]["options"]), logits, data)
    found = step(of(policy=POLICY), logits, data)
    assert found.loss == alone.loss and torch.equal(found.gradient, alone.gradient)
    assert found.metrics == {"loss": alone.loss, **{f"policy/{name}": x for name, x in alone.metrics.items()}}


def test_mix_is_a_config_of_it() -> None:
    """To the bit, with the whole step's statistics of the policy loss."""
    logits, data = batch()
    policy = {
        "surrogate": {"name": "ppo", "dual_clip": 3.0},
        "entropy_filter": 0.6,
        "aggregation": "seq-mean-token-mean",
    }
    mixed = step(MixLossFn({"mu": 0.3, "policy": policy, "supervised": {"weighting": "phi"}}), logits, data)
    usual = {"loss": {"name": "policy", "options": policy}, "rows": "not expert_mask", "coefficient": 1 - 0.3}
    expert = {"loss": {"name": "nll", "options": {"weighting": "phi"}}, "rows": "expert_mask", "coefficient": 0.3}
    found = step(of(usual=usual, expert=expert), logits, data)
    assert found.loss == mixed.loss and torch.equal(found.gradient, mixed.gradient)
    assert {**found.metrics, "mu": 0.3} == mixed.metrics


def test_a_component_without_a_token_adds_an_exact_zero() -> None:
    logits, data = batch()
    data["observation_mask"] = torch.zeros_like(data["observation_mask"])
    alone = step(PolicyLossFn(POLICY["loss"]["options"]), logits, data)
    found = step(of(policy=POLICY, observed=OBSERVED), logits, data)
    assert found.loss == alone.loss and torch.equal(found.gradient, alone.gradient)
    assert found.metrics["observed/loss"] == 0


def test_observations_are_no_valid_tokens_of_the_others() -> None:
    """The counts of the call are those of token_mask, and matter to no component."""
    logits, data = batch()
    loss_fn, counts = of(policy=POLICY, observed=OBSERVED), count_valid(data)
    statistics = loss_fn.count(data)
    assert int(statistics["policy_tokens"]) == int(counts.toks)
    observed = data["observation_mask"][:, 1:] & data["sample_mask"].bool()[:, None]
    assert int(statistics["observed_tokens"]) == int(observed.sum()) > 0
    loss, _ = loss_fn(logits, data, *counts, statistics=statistics)
    other, _ = loss_fn(logits, data, torch.tensor(1), torch.tensor(999), statistics=statistics)
    assert loss.item() == other.item()


@pytest.mark.parametrize(
    ("schedule", "want"),
    [
        (
            {"peak": 0.9, "valley": 0.05, "warmup_steps": 10, "decay_steps": 10},
            {0: 0.0, 5: 0.45, 10: 0.9, 15: 0.475, 20: 0.05},
        ),
        (
            {"peak": 0.1, "valley": 0.95, "start": 1.0, "warmup_steps": 10, "decay_steps": 10},
            {0: 1.0, 5: 0.55, 15: 0.525},
        ),
        ({"peak": 0.4, "valley": 0.2, "decay_steps": 4}, {0: 0.4, 2: 0.3, 9: 0.2}),
    ],
)
def test_schedules(schedule: dict[str, Any], want: dict[int, float]) -> None:
    """The second is one minus CHORD's μ, the first."""
    config = CoefficientScheduleConfig(**schedule)
    assert {at: config.at(at) for at in want} == pytest.approx(want, abs=1e-12)


def test_the_state_of_schedules_and_components_is_saved_and_restored() -> None:
    schedule = {"peak": 0.9, "valley": 0.05, "warmup_steps": 4, "decay_steps": 10}
    bonus = {"name": "schedule", "peak": 0.4, "valley": 0.1, "decay_steps": 5}
    policy = {"loss": {"name": "policy", "options": {"entropy_bonus": bonus}}}
    logits, data = batch()
    loss_fn = of(policy=policy, observed={**OBSERVED, "coefficient": schedule})
    for _ in range(3):
        loss_fn.after_step({"policy/entropy": 1.0})
    state = loss_fn.state_dict()
    assert state == {"steps": 3, "policy/entropy_bonus_steps": 3}
    resumed = of(policy=policy, observed={**OBSERVED, "coefficient": schedule})
    assert step(resumed, logits, data).loss != step(loss_fn, logits, data).loss
    resumed.load_state_dict(state)
    assert step(resumed, logits, data).loss == step(loss_fn, logits, data).loss
    assert step(resumed, logits, data).metrics["observed/coefficient"] == pytest.approx(0.675)
    for bad in ({}, {"steps": -1}, {"steps": 1.5, "policy/entropy_bonus_steps": 3}, {**state, "other/steps": 1}):
        with pytest.raises(ValueError, match=r"state|steps"):
            resumed.load_state_dict(bad)


def test_a_truncated_policy_drops_the_same_tokens_of_a_component() -> None:
    logits, data, _ = make_batch(7, False, "policy", torch.float64, truncated=True)
    options = POLICY["loss"]["options"]
    alone, found = (step(fn, logits, data) for fn in (PolicyLossFn(options, top_k=9), of_truncated(options)))
    assert alone.metrics["dropped_tokens"] == found.metrics["dropped_tokens"] > 0
    assert found.loss == alone.loss and torch.equal(found.gradient, alone.gradient)


def test_kept_sets_of_no_component_may_hold_anything() -> None:
    """The ids that the sampler kept are looked at where a component scores a token, not where token_mask is set."""
    logits, data, _ = make_batch(7, False, "policy", torch.float64, truncated=True)
    part = {**POLICY, "mask": "observation_mask"}
    loss_fn = ComponentsLossFn({"components": {"policy": part}}, kept_sets=True)
    right = step(loss_fn, logits, data)
    spoiled = torch.where(data["observation_mask"][..., None], data["kept_ids"], 10**6)
    found = step(loss_fn, logits, {**data, "kept_ids": spoiled})
    assert found.loss == right.loss != 0 and torch.equal(found.gradient, right.gradient)
    spoiled = torch.where(data["observation_mask"][..., None], 10**6, data["kept_ids"])
    with pytest.raises(ValueError, match=r"kept_ids = 1000000 at .* lies outside the vocabulary"):
        step(loss_fn, logits, {**data, "kept_ids": spoiled})


@pytest.mark.parametrize("other", [{}, {"fields": {"prev_logprobs": "earlier_logprobs"}}], ids=["present", "renamed"])
def test_a_component_loses_the_tokens_that_its_own_fields_drop(other: dict[str, Any]) -> None:
    """A log-prob of −inf drops the token of the component that reads it, under whatever name, and of no other."""
    logits, data, _ = make_batch(7, False, "policy", torch.float64, truncated=True)
    data["prev_logprobs"][:, 5:8] = -math.inf
    data["earlier_logprobs"] = data["prev_logprobs"]
    reinforce = {"loss": {"name": "policy", "options": {"surrogate": {"name": "reinforce"}}}}
    del data["generation_logprobs"]
    found = step(ComponentsLossFn({"components": {"a": {**POLICY, **other}, "b": reinforce}}, top_k=9), logits, data)
    ratio, plain = (step(PolicyLossFn(part["loss"]["options"], top_k=9), logits, data) for part in (POLICY, reinforce))
    assert ratio.metrics["dropped_tokens"] > plain.metrics["dropped_tokens"] > 0
    assert found.loss == pytest.approx(ratio.loss + plain.loss, rel=1e-12)
    torch.testing.assert_close(found.gradient, ratio.gradient + plain.gradient, rtol=1e-12, atol=1e-14)


def of_truncated(options: dict[str, Any]) -> ComponentsLossFn:
    return ComponentsLossFn({"components": {"policy": {"loss": {"name": "policy", "options": options}}}}, top_k=9)


def test_it_separates_over_tokens_where_all_components_do() -> None:
    assert of(policy=POLICY, observed=OBSERVED).requirements.token_separable
    gspo = {"loss": {"name": "policy", "options": {"ratio_level": "sequence-mean"}}}
    assert not of(policy=gspo, observed=OBSERVED).requirements.token_separable
    needs = of(policy=POLICY, top={"loss": {"name": "distillation"}}).requirements
    assert needs.reads == "logits" and not needs.token_separable


def test_a_field_that_is_read_elsewhere_is_not_taken_from_another_component() -> None:
    """An optional one that the data lacks: the metrics of the second sampler were those of the first, under its name."""
    logits, data = batch()
    other = {**POLICY, "fields": {"generation_logprobs": "second_generation_logprobs"}}
    found = step(of(own=POLICY, other=other), logits, data).metrics
    assert "own/rollout_log_ppl" in found
    assert not [name for name in found if name.startswith("other/rollout")]


def test_nll_of_rows_is_nll() -> None:
    logits, data = batch()
    rows = data["expert_mask"]
    alone = step(NLLLoss(), logits, {**data, "sample_mask": data["sample_mask"] * rows})
    assert step(of(expert={**NLL, "rows": "expert_mask"}), logits, data).loss == alone.loss


@pytest.mark.parametrize("gradient", ["plain", "score-function", "straight-through"])
@pytest.mark.parametrize("estimator", ["k1", "k3", "abs", "low_var_kl"])
@pytest.mark.filterwarnings("ignore:a k1 estimate")
def test_reference_kl_is_the_kl_of_the_policy_loss(estimator: str, gradient: str) -> None:
    """Whose surrogate is turned off by advantages of 0."""
    logits, data = batch()
    data["advantages"] = torch.zeros_like(data["advantages"])
    kl = {"estimator": estimator, "gradient": gradient}
    whole = step(PolicyLossFn({"surrogate": "reinforce", "kl": {"coefficient": 1.0, **kl}}), logits, data)
    found = step(get_loss("reference_kl")(kl), logits, data)
    assert found.loss == pytest.approx(whole.loss, rel=1e-12)
    torch.testing.assert_close(found.gradient, whole.gradient, rtol=1e-12, atol=1e-16)


@pytest.mark.parametrize("gradient", ["plain", "score-function", "straight-through"])
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_a_log_prob_below_the_clamp_has_no_gradient(estimator: str, gradient: str) -> None:
    """Whatever the gradient is made of: the score function's weight once pushed unlikely tokens further down."""
    if (estimator, gradient) == ("k2", "straight-through"):
        return
    logits, data = batch()
    data["reference_policy_logprobs"] = torch.full_like(data["reference_policy_logprobs"], -1.0)
    config = {"estimator": estimator, "gradient": gradient, "log_prob_min_clamp": -2.0}
    found = step(get_loss("reference_kl")(config), logits, data).gradient[:, :-1]
    own = logits.log_softmax(-1)[:, :-1].gather(-1, data["input_ids"][:, 1:, None])[..., 0]
    valid = (data["token_mask"] * data["sample_mask"][:, None])[:, 1:].bool()
    moved = found.abs().sum(-1) > 0
    assert bool((own[valid] < -2.0).any()) and not moved[own < -2.0].any() and bool(moved[valid & (own > -2.0)].any())


def test_reference_kl_with_clamped_log_probs() -> None:
    """verl's clamp: below it a log-prob is a constant, on either side."""
    logits, data = batch()
    config = {"estimator": "k2", "gradient": "plain", "log_prob_min_clamp": -2.0}
    found = step(get_loss("reference_kl")(config), logits, data)
    leaf = logits.clone().requires_grad_()
    own = leaf.log_softmax(-1)[:, :-1].gather(-1, data["input_ids"][:, 1:, None])[..., 0].clamp(min=-2.0)
    valid = (data["token_mask"] * data["sample_mask"][:, None])[:, 1:].bool()
    assert bool((own[valid] == -2.0).any()) and bool((own[valid] > -2.0).any())
    want = ((own - data["reference_policy_logprobs"][:, 1:].clamp(min=-2.0)).square() / 2)[valid].sum() / valid.sum()
    want.backward()
    assert found.loss == pytest.approx(want.item(), rel=1e-12)
    torch.testing.assert_close(found.gradient, leaf.grad, rtol=1e-11, atol=1e-15)
    with pytest.raises(ValueError, match=r"log_prob_min_clamp = 0.5 must be below 0"):
        get_loss("reference_kl")({"log_prob_min_clamp": 0.5})
