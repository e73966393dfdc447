"""What a host's config, counts and weights say otherwise than the loss is refused by name; a host's defaults are not set."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from parallel_rl import LossFn, NLLLoss, PolicyLossFn
from parallel_rl.hosts import skyrl, slime, torchtitan, transformers, verl
from parallel_rl.hosts.nemo_rl import HostLoss
from tests.hosts.rows import B, clean, step

TOKENS = 17
ADAPTERS: list[Callable[[Any], object]] = [
    verl.policy_loss, skyrl.policy_loss, slime.custom_loss, HostLoss, torchtitan.HostLoss, transformers.compute_loss_func,
]  # fmt: skip
PPO = {"surrogate": {"name": "ppo", "clip_low": 0.1, "clip_high": 0.3, "dual_clip": 5.0}}
CISPO = {"surrogate": {"name": "cispo", "clip_low": 0.5, "clip_high": 2.0}}
TIS = {"mode": "tis", "high": 5.0}
SAPO = {"surrogate": {"name": "sapo", "tau_pos": 2.0, "tau_neg": 3.0}}
OTHERWISE: list[tuple[str, dict, dict, str]] = [
    ("verl", PPO, {"clip_ratio_low": 0.3}, r"clip_ratio_low = 0.3, but the surrogate 'ppo' has clip_low = 0.1; .* verl's"),
    ("verl", PPO, {"clip_ratio_high": 0.28}, "clip_ratio_high = 0.28, but .* clip_high = 0.3"),
    ("verl", PPO, {"clip_ratio": 0.3, "clip_ratio_low": None}, "clip_ratio_low = 0.3, but .* clip_low = 0.1"),
    ("verl", PPO, {"clip_ratio_c": 10.0}, "clip_ratio_c = 10.0, but .* dual_clip = 5.0"),
    ("verl", CISPO, {"clip_ratio_high": 0.28}, "clip_ratio_high = 0.28, but the surrogate 'cispo' has clip_high = 2.0"),
    ("verl", SAPO, {"tau_neg": 1.2}, "tau_neg = 1.2, but the surrogate 'sapo' has tau_neg = 3.0"),
    ("skyrl", PPO, {"eps_clip_low": 0.3}, "eps_clip_low = 0.3, but .* clip_low = 0.1; .* SkyRL's"),
    ("skyrl", PPO, {"eps_clip_high": 0.28}, "eps_clip_high = 0.28, but .* clip_high = 0.3"),
    ("skyrl", PPO, {"clip_ratio_c": 10.0}, "clip_ratio_c = 10.0, but .* dual_clip = 5.0"),
    ("skyrl", CISPO, {"cispo": SimpleNamespace(cispo_eps_clip_high=3.0)}, "cispo.cispo_eps_clip_high = 3.0, but .* = 2.0"),
    ("skyrl", PPO, {"off_policy_correction": SimpleNamespace(tis_ratio_type="token")}, "tis_ratio_type = .token. is applied"),
    ("skyrl", PPO, {"off_policy_correction": {"token_mask_is_threshold_high": 2.0}}, "token_mask_is_threshold_high = 2.0"),
    ("skyrl", PPO, {"use_tis": True}, "use_tis = True is applied by SkyRL's own losses alone"),
    ("slime", PPO, {"eps_clip": 0.25}, "eps_clip = 0.25, but .* clip_low = 0.1; .* slime's"),
    ("slime", PPO, {"eps_clip_c": 3.0}, "eps_clip_c = 3.0, but .* dual_clip = 5.0"),
    ("slime", PPO, {"use_kl_loss": True, "kl_loss_coef": 0.01}, "kl_loss_coef = 0.01, but the loss has kl.coefficient = None"),
    ("slime", {**PPO, "kl": {"coefficient": 0.1, "estimator": "k1"}}, {"use_unbiased_kl": True}, "the loss has kl.gradient = "),
    ("slime", PPO, {"use_opsm": True}, "use_opsm = True, but the loss has off_policy_mask = None"),
    ("slime", {**PPO, "off_policy_mask": {"delta": 0.1}}, {"use_opsm": True, "opsm_delta": 0.2}, "opsm_delta = 0.2, but"),
    ("slime", PPO, {"custom_tis_function_path": "a.b"}, "custom_tis_function_path = 'a.b' is called by slime's own"),
    ("slime", PPO, {"entropy_coef": 0.01}, "entropy_coef = 0.01, but the loss has entropy_bonus = 0.0"),
    ("slime", PPO, {"use_tis": True}, "use_tis = True, but the loss has importance = None"),
    ("slime", {**PPO, "kl": {"coefficient": 0.1, "estimator": "k3"}}, {"kl_loss_type": "k2"}, "kl.estimator = 'k3'"),
    ("slime", {**PPO, "importance": TIS}, {"use_tis": True, "tis_clip": 3.0}, "tis_clip = 3.0, but .* importance.high = 5.0"),
    ("slime", {**PPO, "importance": TIS}, {"use_tis": True, "tis_clip_low": 0.1}, "tis_clip_low = 0.1, but .* importance.low"),
]  # fmt: skip
ALIKE: list[tuple[str, dict, dict]] = [
    (
        "verl",
        PPO,
        {"clip_ratio": 0.2, "clip_ratio_low": 0.2, "clip_ratio_high": 0.2, "clip_ratio_c": 3.0, "tau_pos": 1.0},
    ),
    ("verl", PPO, {"clip_ratio_low": 0.1, "clip_ratio_high": 0.3, "clip_ratio_c": 5.0}),
    ("verl", {"surrogate": "reinforce"}, {"clip_ratio_low": 0.1}),
    ("skyrl", PPO, {"eps_clip_low": 0.2, "clip_ratio_c": 3.0, "off_policy_correction": {"tis_ratio_type": None}}),
    ("skyrl", CISPO, {"eps_clip_low": 0.3}),
    ("slime", {**PPO, "entropy_bonus": 0.01}, {"eps_clip": 0.1, "eps_clip_high": 0.3, "entropy_coef": 0.01}),
    ("slime", {**PPO, "importance": {}}, {"use_tis": True, "kl_loss_coef": 0.0}),
    (
        "slime",
        {**PPO, "off_policy_mask": {"delta": 0.1}},
        {"use_opsm": True, "opsm_delta": 0.1, "use_unbiased_kl": True},
    ),
    ("slime", {**PPO, "importance": TIS}, {"use_tis": True, "tis_clip": 5.0, "tis_clip_low": 0}),
]


def called(host: str, options: dict, settings: dict) -> None:
    data = clean(step())
    if host == "verl":
        info = {"dp_size": 1, "batch_num_tokens": TOKENS, "global_batch_size": B}
        config = SimpleNamespace(global_batch_info=info, **settings)
        loss_fn = verl.policy_loss(PolicyLossFn(options))
        loss_fn(data["old"], data["new"], data["advantages"], data["mask"], config=config)
    elif host == "skyrl":
        config = SimpleNamespace(**settings)
        skyrl.policy_loss(PolicyLossFn(options))(data["new"], data["old"], data["advantages"], config, data["mask"])
    else:
        batch = {"unconcat_tokens": [torch.tensor([0, 1, 2])], "loss_masks": [torch.ones(2)]}
        batch |= {"total_lengths": [3], "response_lengths": [2]}
        batch |= {name: [-torch.ones(2)] for name in ("advantages", "log_probs", "rollout_log_probs")}
        args = SimpleNamespace(calculate_per_token_loss=True, **settings)
        slime.custom_loss(PolicyLossFn(options))(args, batch, torch.zeros(1, 3, 4), None)


@pytest.mark.parametrize(("host", "options", "settings", "message"), OTHERWISE)
def test_an_option_that_its_user_has_set_is_not_ignored(host: str, options: dict, settings: dict, message: str) -> None:
    """The loss's own 0.2 and 0.28 stood in its place without a word."""
    with pytest.raises(ValueError, match=message):
        called(host, options, settings)


@pytest.mark.parametrize(("host", "options", "settings"), ALIKE)
def test_defaults_and_equal_numbers_are_no_contradiction(host: str, options: dict, settings: dict) -> None:
    called(host, options, settings)


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_a_class_and_a_recipes_name_are_no_loss(adapter: Callable[[Any], object]) -> None:
    with pytest.raises(
        ValueError, match=r"takes a loss such as .* got the class PolicyLossFn; build it from its config"
    ):
        adapter(PolicyLossFn)
    with pytest.raises(ValueError, match=r"takes a loss such as .* got 'dapo'; load_recipe gives a recipe's class"):
        adapter("dapo")


@pytest.mark.parametrize("adapter", [verl.policy_loss, torchtitan.HostLoss])
def test_a_loss_that_ignores_the_advantages_does_not_learn(adapter: Callable[[LossFn], object]) -> None:
    with pytest.raises(
        ValueError, match=r"NLLLoss does not read the advantages, so that .* would train without its rewards"
    ):
        adapter(NLLLoss())


def test_counts_and_weights_of_verl_that_cannot_be() -> None:
    data, call = clean(step()), verl.policy_loss(PolicyLossFn())

    def run(weights: torch.Tensor | None = None, **counts: int) -> None:
        info = {"dp_size": 1, "batch_num_tokens": TOKENS, "global_batch_size": B, **counts}
        config = SimpleNamespace(global_batch_info=info)
        call(data["old"], data["new"], data["advantages"], data["mask"], "token-mean", config, weights)

    run(weights=data["weights"])
    for count in (1, TOKENS - 1):
        with pytest.raises(ValueError, match=rf"batch_num_tokens = {count} .* is below the 17 of this call alone"):
            run(batch_num_tokens=count)
    with pytest.raises(ValueError, match=r"global_batch_size = 4 .* is below the 5 of this call alone"):
        run(global_batch_size=4)  # of its six rows one has no token
    weights = data["weights"].clone()
    weights[2, 1] = -0.5
    with pytest.raises(ValueError, match=r"rollout_is_weights = -0.5 at \[2, 1\] must be at least 0 and finite"):
        run(weights=weights)
    with pytest.raises(ValueError, match=r"rollout_is_weights has shape \[6, 1\]; response_mask has \[6, 5\]"):
        run(weights=weights[:, :1])
