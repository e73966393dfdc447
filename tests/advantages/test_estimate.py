"""The one entry: names, fields, KL, whitening and clip, and every fault named."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from parallel_rl.advantages import AdvantageEstimator, estimate, estimator_config, gae, moments, whiten
from parallel_rl.config.strict import configure

GENERATOR = torch.Generator().manual_seed(0)
MASK = torch.tensor([[0, 1, 1, 1, 0], [0, 0, 1, 1, 1], [0, 1, 0, 1, 1], [0, 1, 1, 0, 0]])


def batch() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    data = {
        "rewards": torch.randn(4, generator=generator, dtype=torch.float64),
        "greedy_rewards": torch.randn(4, generator=generator, dtype=torch.float64),
        "bootstrap_values": torch.randn(4, generator=generator, dtype=torch.float64),
        "reward_components": torch.randn(4, 2, generator=generator, dtype=torch.float64),
        "group_ids": torch.tensor([3, 8, 3, 8]),
        **dict.fromkeys(("sample_ids", "run_ids", "step_ids"), torch.arange(4)),
        "state_ids": torch.tensor([1, 1, 2, 2]),
        "token_mask": MASK,
    }
    for name in ("kl", "values", "teacher_token_logprobs", "prev_logprobs", "sum_pi_squared"):
        data[name] = torch.randn(4, 5, generator=generator, dtype=torch.float64)
    return data


def following(x: Tensor, mask: Tensor, gamma: float = 1.0) -> Tensor:
    """Discounted sums over the valid tokens from each one on."""
    out = torch.zeros_like(x)
    for i in range(len(x)):
        places = [t for t in range(x.shape[1]) if mask[i, t]]
        for k, t in enumerate(places):
            out[i, t] = sum(gamma**j * float(x[i, s]) for j, s in enumerate(places[k:]))
    return out


def test_reinforce_and_its_relatives() -> None:
    data, keep = batch(), MASK.bool()
    flat = torch.where(keep, data["rewards"][:, None], 0.0)
    assert torch.equal(estimate("reinforce", data).advantages, flat)
    at_end = torch.zeros(4, 5, dtype=torch.float64)
    at_end[torch.arange(4), torch.tensor([3, 4, 4, 2])] = data["rewards"]
    paid = following(at_end - 0.3 * data["kl"], MASK, 0.9)
    options = {"kl_coefficient": 0.3, "gamma": 0.9}
    torch.testing.assert_close(estimate({"name": "reinforce", **options}, data).advantages, paid)
    found = estimate({"name": "remax", **options}, data)
    torch.testing.assert_close(found.advantages, torch.where(keep, paid - data["greedy_rewards"][:, None], 0.0))

    found = estimate({"name": "reinforce_plus_plus", **options}, data)
    torch.testing.assert_close(found.returns, paid)
    valid = paid[keep]
    white = torch.where(keep, (paid - valid.mean()) / valid.std(correction=0), 0.0)
    torch.testing.assert_close(found.advantages, white)


def test_the_kl_of_a_group_estimator() -> None:
    data, keep = batch(), MASK.bool()
    plain = estimate("rloo", data).advantages
    own = estimate({"name": "rloo", "kl_coefficient": 0.2, "kl_form": "token"}, data).advantages
    torch.testing.assert_close(own, torch.where(keep, plain - 0.2 * data["kl"], 0.0))
    summed = estimate({"name": "rloo", "kl_coefficient": 0.2}, data).advantages
    torch.testing.assert_close(summed, torch.where(keep, plain - 0.2 * following(data["kl"], MASK), 0.0))


def test_gae_reads_its_options() -> None:
    data = batch()
    at_end = torch.zeros(4, 5, dtype=torch.float64)
    at_end[torch.arange(4), torch.tensor([3, 4, 4, 2])] = data["rewards"]
    rewards = at_end - 0.1 * data["kl"]
    found = estimate({"name": "gae", "gamma": 0.9, "lam": 0.8, "kl_coefficient": 0.1}, data)
    expected = gae(rewards, data["values"], MASK, 0.9, 0.8)
    torch.testing.assert_close(found.advantages, expected.advantages)
    torch.testing.assert_close(found.returns, expected.returns)
    options = {"name": "gae", "length_adaptive": 0.5, "value_lam": 1.0, "bootstrap": True}
    found, lam = estimate(options, data), 1 - 1 / (0.5 * MASK.sum(1)).clamp(min=1)
    expected = gae(at_end, data["values"], MASK, 1.0, lam.double(), 1.0, data["bootstrap_values"])
    torch.testing.assert_close(found.advantages, expected.advantages)
    torch.testing.assert_close(found.returns, expected.returns)


def test_distillation() -> None:
    data = batch()
    found = estimate({"name": "on_policy_distillation", "coefficient": 2.0}, data).advantages
    ratio = data["teacher_token_logprobs"] - data["prev_logprobs"]
    torch.testing.assert_close(found, torch.where(MASK.bool(), 2 * ratio, 0.0))


def test_whitening() -> None:
    x, mask = (
        torch.randn(5, 7, dtype=torch.float64, generator=GENERATOR) + 3,
        torch.rand(5, 7, generator=GENERATOR) < 0.5,
    )
    valid, poisoned = x[mask], torch.where(mask, x, torch.nan)
    for mode, expected in (
        ("none", x),
        ("center", x - valid.mean()),
        ("population", (x - valid.mean()) / valid.std(correction=0)),
        ("unbiased", (x - valid.mean()) / (valid.var() + 1e-8).sqrt()),
    ):
        torch.testing.assert_close(whiten(poisoned, mask, mode), torch.where(mask, expected, 0.0))  # type: ignore[arg-type]
    kept = whiten(poisoned, mask, "population", keep_mean=True)[mask]
    assert float(kept.mean()) == pytest.approx(float(valid.mean())) and float(kept.std(correction=0)) == pytest.approx(
        1
    )
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        constant = torch.full((3, 3), 0.1, dtype=dtype)
        for mode in ("center", "population", "unbiased"):
            assert not whiten(constant, torch.ones(3, 3), mode).any()  # type: ignore[arg-type]
    assert not whiten(poisoned, torch.zeros_like(mask), "population").any()
    shifted = whiten(torch.tensor([1e9, 1e9 + 1, 1e9 + 2], dtype=torch.float64), torch.ones(3))  # two passes
    assert shifted.tolist() == pytest.approx([-1.224744871, 0, 1.224744871])
    with pytest.raises(ValueError, match="whitening = 'std' is not valid; choose none, center"):
        whiten(x, mask, "std")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="the mask of a whitening"):
        whiten(x, mask[0])


def test_moments_of_little() -> None:
    none = moments(torch.full((3,), torch.nan), torch.zeros(3))
    assert [float(x) for x in none[:3]] == [0, 0, 0] and float(none.variance()) == 0
    one = moments(torch.tensor([2.0, 5.0]), torch.tensor([1, 0]))
    assert float(one.mean) == 2 and float(one.variance(1)) == 0


def test_the_clip_comes_last() -> None:
    data = batch()
    white = estimate({"name": "reinforce", "whiten": "unbiased"}, data).advantages
    found = estimate({"name": "reinforce", "whiten": "unbiased", "clip_low": -0.5, "clip_high": 0.1}, data)
    torch.testing.assert_close(found.advantages, white.clamp(-0.5, 0.1))
    above = estimate({"name": "reinforce", "clip_low": 0.5}, data).advantages
    assert float(above[MASK.bool()].min()) == 0.5 and not above[~MASK.bool()].any()


@pytest.mark.parametrize("name", list(AdvantageEstimator.variants))
def test_what_a_mask_hides_has_no_say(name: str) -> None:
    data = batch()
    plain = estimate(name, data)
    hidden = {**data, "token_mask": torch.cat([MASK, MASK[:1]]), "sample_mask": torch.tensor([1, 1, 1, 1, 0])}
    for key, field in data.items():
        if field.is_floating_point():
            valid = (
                MASK.bool()
                if key not in ("rewards", "greedy_rewards", "bootstrap_values", "reward_components")
                else None
            )
            inner = field if valid is None else torch.where(valid, field, torch.nan)
            hidden[key] = torch.cat([inner, torch.full_like(field[:1], torch.inf)])
        elif key != "token_mask":
            hidden[key] = torch.cat([field, torch.tensor([99])])
    found = estimate(name, hidden)
    for mine, expected in zip(found, plain, strict=True):
        torch.testing.assert_close(mine[:4], expected, rtol=1e-13, atol=1e-13)
        assert not mine[4].any()


@pytest.mark.parametrize("name", list(AdvantageEstimator.variants))
def test_only_the_fields_it_needs(name: str) -> None:
    data, needs = batch(), estimator_config(name).needs
    expected = estimate(name, data).advantages
    assert torch.equal(estimate(name, {key: data[key] for key in needs}).advantages, expected)
    for missing in needs:
        with pytest.raises(ValueError, match=rf"advantages '{name}' need the field {missing} \[N.*, which is missing"):
            estimate(name, {key: data[key] for key in needs if key != missing})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_the_dtype_of_the_rewards(dtype: torch.dtype) -> None:
    data = batch()
    data["rewards"] = data["rewards"].to(dtype)
    found = estimate("grpo", data)
    assert found.advantages.dtype == found.returns.dtype == torch.promote_types(dtype, torch.float32)


def test_no_sample() -> None:
    empty = {"rewards": torch.zeros(0), "group_ids": torch.zeros(0, dtype=torch.int64), "token_mask": torch.zeros(0, 5)}
    with pytest.raises(ValueError, match="there is no sample in the step; a comparison by group needs at least one"):
        estimate("grpo", empty)
    assert estimate("reinforce_plus_plus", empty).advantages.shape == (0, 5)
    data = {**batch(), "sample_mask": torch.zeros(4)}
    for name in AdvantageEstimator.variants:
        assert not estimate(name, data).advantages.any()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("rlo", "advantages.name = 'rlo' is not valid; did you mean 'rloo'"),
        (
            {"name": "grpo", "normalise": "std"},
            "unknown key advantages.normalise = 'std' in GRPO; did you mean 'normalize'",
        ),
        (
            {"name": "grpo", "normalize": "sd"},
            "advantages.normalize = 'sd' is not valid; choose one of 'std', 'population'",
        ),
        ({"normalize": "std"}, "must be a name or a mapping with the key 'name'"),
        (
            {"name": "grpo", "singleton": "drop"},
            "advantages.singleton = 'drop' is not valid; choose one of 'zero', 'reward'",
        ),
        ({"name": "grpo", "eps": -1}, "eps = -1.0 must be at least 0"),
        ({"name": "grpo", "eps": math.inf}, "eps = inf must be at least 0 and finite"),
        ({"name": "gae", "lam": 1.2}, r"lam = 1.2 must lie in \[0, 1\]"),
        ({"name": "gae", "lam": 0.9, "length_adaptive": 0.05}, "lam = 0.9 has no effect with length_adaptive = 0.05"),
        ({"name": "gae", "kl_form": "token", "kl_coefficient": 1}, "kl_form = 'token' has no effect on gae"),
        ({"name": "rloo", "kl_form": "token"}, "kl_form = 'token' has no effect with kl_coefficient = 0"),
        ({"name": "rloo", "kl_coefficient": -1}, "kl_coefficient = -1.0 must be at least 0"),
        ({"name": "rloo", "clip_low": 1, "clip_high": 0}, "clip_low = 1.0 must not be above clip_high = 0.0"),
        ({"name": "opmd", "tau": 1}, "tau = 1.0 has no effect with baseline = 'mean'"),
        ({"name": "opmd", "baseline": "logavgexp", "tau": 0}, "tau = 0.0 must be above 0"),
        ({"name": "cpgd", "weight_clip": 3}, "weight_clip = 3.0 has no effect with normalize = 'population'"),
        ({"name": "gpg", "f_norm": 0}, "f_norm = 0.0 must be above 0"),
        (
            {"name": "reinforce", "gamma": 0.5, "kl_form": "token", "kl_coefficient": 1},
            "gamma = 0.5 has no effect with kl_form = 'token'",
        ),
        ({"name": "on_policy_distillation", "coefficient": 0}, "coefficient = 0.0 must be above 0"),
        (
            {"name": "on_policy_distillation", "kl_coefficient": 1},
            "kl_coefficient = 1.0 has no effect on on_policy_distill",
        ),
    ],
)
def test_bad_options(options: str | dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        estimator_config(options)
    if isinstance(options, dict) and "name" in options:
        cls = AdvantageEstimator.variants[options["name"]]
        with pytest.raises(ValueError, match=message.replace("advantages.", "")):
            configure(cls, {key: value for key, value in options.items() if key != "name"})


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("grpo", {"rewards": torch.ones(4, 5)}, r"rewards must be floats \[N\] = \[4\], got torch.float32 \[4, 5\]"),
        (
            "grpo",
            {"rewards": torch.ones(4, dtype=torch.int64)},
            r"rewards must be floats \[N\] = \[4\], got torch.int64",
        ),
        ("grpo", {"rewards": torch.tensor([1.0, torch.nan, 0, 0])}, r"rewards\[1\] = nan is not finite"),
        (
            "grpo",
            {"group_ids": torch.ones(3, dtype=torch.int64)},
            r"group_ids must be integers \[N\] = \[4\], got torch.int64",
        ),
        ("grpo", {"group_ids": torch.ones(4)}, r"group_ids must be integers \[N\] = \[4\], got torch.float32"),
        ("grpo", {"token_mask": torch.ones(4)}, r"token_mask must be \[N, S\], got \[4\]"),
        ("grpo", {"sample_mask": torch.ones(5)}, r"sample_mask must be a mask \[N\] = \[4\], got torch.float32 \[5\]"),
        ("gae", {"values": torch.ones(4, 4)}, r"values must be floats \[N, S\] = \[4, 5\], got torch.float32 \[4, 4\]"),
        ("gae", {"values": torch.full((4, 5), torch.inf)}, r"values\[0, 1\] = inf is not finite"),
        ("gdpo", {"reward_components": torch.ones(4)}, r"reward_components must be floats \[N, K\] = \[4, 'K'\], got"),
        ("gdpo", {"reward_components": torch.ones(4, 1)}, "reward_components has 1 columns; gdpo needs at least 2"),
        (
            {"name": "gdpo", "weights": [1, 2, 3]},
            {},
            r"weights = \[1.0, 2.0, 3.0\] must be one a column of reward_components",
        ),
        ({"name": "rloo", "kl_coefficient": 1}, {"kl": torch.ones(4)}, r"kl must be floats \[N, S\] = \[4, 5\]"),
    ],
)
def test_bad_batches(name: str | dict, change: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        estimate(name, {**batch(), **change})
