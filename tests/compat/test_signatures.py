"""Names, arguments, defaults and calls are those that the origins document."""

from __future__ import annotations

import inspect

import pytest
import torch

from parallel_rl.compat import lightrft, openrlhf, openrlhf_article, trinity

REQUIRED = inspect.Parameter.empty
AGG = {"loss_agg_mode": "token-mean"}
CLIP = {"clip_range": None, "clip_range_low": None, "clip_range_high": None}
BATCHING = {
    "use_dynamic_bsz": None,
    "ppo_mini_batch_size": 1,
    "ppo_micro_batch_size_per_gpu": 1,
    "ngpus_trainer": 1,
    "train_batch_size_usual": 1,
    "train_batch_size_expert": 1,
    "loss_agg_mode": "token-mean",
    "sft_loss_agg_mode": None,
    "grpo_loss_agg_mode": None,
}
RATIO = ["logprob", "old_logprob", "action_mask", "advantages"]
PPO_DEFAULTS = {
    "clip_ratio_c": 3.0,
    "loss_agg_mode": "token-mean",
    "enable_sequence_masking": False,
    "delta_sequence_masking": 0.1,
    "fallback_to_policy_gradient": False,
}
CISPO = {
    "clip_range_low": 1.0,
    "clip_range_high": 0.28,
    "enable_mask_clip": False,
    "mask_clip_range_low": 1.0,
    "mask_clip_range_high": 0.28,
    **AGG,
}
REC = {
    "epsilon_low": 0.2,
    "epsilon_high": 0.2,
    "epsilon_low_prime": 0.4,
    "epsilon_high_prime": 0.4,
    "clip_mode": "none",
    "weight": "none",
    "regularizer": "none",
    "regularizer_coef": 0.0,
    "temp": 1.0,
}
CHORD = {
    "mu_warmup_steps": 0,
    "mu_decay_steps": 0,
    "mu_peak": 0.1,
    "mu_valley": 0.1,
    "enable_phi_function": True,
}
SAPO = {"tau_pos": 1.0, "tau_neg": 1.05, **AGG}
#: class: (constructor behind `backend`, the call, default_args)
TRINITY: dict[str, tuple[dict, list[str], dict]] = {
    "PPOPolicyLossFn": (CLIP | PPO_DEFAULTS, RATIO, {"clip_range": 0.2, **PPO_DEFAULTS}),
    "OPMDPolicyLossFn": ({"tau": 1.0, **AGG}, ["logprob", "action_mask", "advantages"], {"tau": 1.0, **AGG}),
    "DPOLossFn": (
        {"beta": 0.1, "label_smoothing": 0.0},
        ["logprob", "ref_logprob", "action_mask"],
        {"beta": 0.1, "label_smoothing": 0.0},
    ),
    "SFTLossFn": (AGG, ["logprob", "action_mask"], AGG),
    "MIXPolicyLossFn": (
        {"mu": 0.1, **CLIP, **BATCHING},
        [*RATIO, "expert_mask"],
        {"mu": 0.1, "clip_range": 0.2, **AGG},
    ),
    "GSPOLossFn": (
        CLIP | {"loss_agg_mode": "seq-mean-token-mean"},
        RATIO,
        {"clip_range_low": 0.0003, "clip_range_high": 0.0004, "loss_agg_mode": "seq-mean-token-mean"},
    ),
    "TOPRPolicyLossFn": ({"advantage_threshold": 0.0, **AGG}, RATIO, {"advantage_threshold": 0.0, **AGG}),
    "CISPOPolicyLossFn": (CISPO, RATIO, CISPO),
    "MIXCHORDPolicyLossFn": (
        CHORD | CLIP | BATCHING,
        [*RATIO, "expert_mask", "step"],
        CHORD | {"clip_range": 0.2, **AGG},
    ),
    "SFTISLossFn": (AGG, ["logprob", "action_mask"], AGG),
    "SFTPhiLossFn": (AGG | {"cutoff_prob": 1.0}, ["logprob", "action_mask"], AGG | {"cutoff_prob": 1.0}),
    "sPPOPolicyLossFn": ({"epsilon": 0.3, **AGG}, RATIO, {"epsilon": 0.3, **AGG}),
    "RECPolicyLossFn": (REC, RATIO, REC | {"epsilon_low_prime": 0.6, "epsilon_high_prime": 2}),
    "SAPOPolicyLossFn": (SAPO, RATIO, SAPO),
    "ImportanceSamplingLossFn": (AGG, RATIO, AGG),
}
VERL = {"old_logprob": "old_log_probs", "ref_logprob": "ref_log_prob", "action_mask": "response_mask"}


def arguments(function: object) -> dict[str, object]:
    """Name → default of what may be given by position."""
    parameters = inspect.signature(function).parameters.values()
    kept = [each for each in parameters if each.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD and each.name != "self"]
    return {each.name: each.default for each in kept}


@pytest.mark.parametrize("name", TRINITY)
def test_trinity(name: str) -> None:
    cls, (options, call, defaults) = getattr(trinity, name), TRINITY[name]
    assert list(arguments(cls).items()) == [("backend", "verl"), *options.items()]
    assert list(arguments(cls.__call__).items()) == [(key, REQUIRED) for key in call]
    assert cls.default_args() == defaults
    fn = cls(**defaults)  # the defaults make a loss
    assert fn.select_keys == [VERL.get(key, key) for key in call[1:]]
    assert cls(backend="tinker", **defaults).select_keys == call[1:]
    assert isinstance(fn, trinity.PolicyLossFn) and cls in trinity.POLICY_LOSS_FN.values()


def test_trinity_registry_has_the_names_of_its_configs() -> None:
    names = "ppo opmd dpo sft mix gspo topr cispo sft_is sft_phi mix_chord sppo rec sapo importance_sampling"
    assert list(trinity.POLICY_LOSS_FN) == names.split()
    assert set(TRINITY) <= set(trinity.__all__)


PAIR = {"chosen_reward": REQUIRED, "reject_reward": REQUIRED, "margin": None}
LOGPS = [f"{who}_{which}_logps" for who in ("policy", "reference") for which in ("chosen", "rejected")]
KTO = [f"{who}_{which}_logps" for who in ("policy", "reference") for which in ("chosen", "rejected", "KL")]
TOTALS = {"dp_size": 1, "batch_num_tokens": None, "global_batch_size": None}


def required(names: list[str]) -> dict[str, object]:
    return dict.fromkeys(names, REQUIRED)


SHARED: dict[str, tuple[dict, dict]] = {
    "KDLoss": ({}, required(["logits", "teacher_logits", "label"])),
    "DPOLoss": ({"beta": REQUIRED, "label_smoothing": 0.0, "ipo": False}, required(LOGPS)),
    "KTOLoss": (required(["beta", "desirable_weight", "undesirable_weight", "world_size", "device"]), required(KTO)),
    "VanillaKTOLoss": (required(["beta"]), required(LOGPS)),
    "PairWiseLoss": ({}, PAIR),
    "LogExpLoss": ({}, PAIR),
    "PRMLoss": (
        {"placeholder_token_id": REQUIRED, "reward_token_ids": None},
        required(["inputs", "logits", "labels"]),
    ),
}
POLICY = required(["log_probs", "old_log_probs", "advantages"])
VALUE = required(["values", "old_values", "returns"]) | {"action_mask": None}
LIGHTRFT = SHARED | {
    "PolicyLoss": (
        {"clip_eps": 0.2, "use_dapo": False, "use_cpg_loss": False, "high_entropy_token_ratio": 0.0},
        POLICY | {"action_mask": None, "entropy_mask": None},
    ),
    "ValueLoss": ({"clip_eps": None}, VALUE),
    "GPTLMLoss": ({}, required(["logits", "labels"])),
    "LogSigmoidLoss": ({}, PAIR),
    "HPSLoss": ({}, PAIR),
}
OPENRLHF = SHARED | {
    "PolicyLoss": (
        {
            "clip_eps_low": 0.2,
            "clip_eps_high": 0.2,
            "dual_clip": None,
            "token_level_loss": True,
            "policy_loss_type": "ppo",
            "is_correction_level": "off",
            "is_correction_mode": "mask",
            "is_correction_gating": "ratio",
            "is_correction_threshold": (0.5, 5.0),
        },
        POLICY | {"action_mask": None, "rollout_log_probs": None} | TOTALS,
    ),
    "ValueLoss": ({"clip_eps": None, "token_level_loss": True}, VALUE | TOTALS),
    "GPTLMLoss": ({"ring_attn_group": None}, required(["logits", "labels"])),
    "SFTLoss": ({"token_level_loss": True}, required(["per_token_logps", "loss_mask"]) | TOTALS),
}
ARTICLE = SHARED | {
    "PolicyLoss": ({"clip_eps": 0.2}, POLICY | {"action_mask": None}),
    "ValueLoss": ({"clip_eps": None}, VALUE),
    "GPTLMLoss": ({}, required(["logits", "labels"])),
}
MODULES = {lightrft: LIGHTRFT, openrlhf: OPENRLHF, openrlhf_article: ARTICLE}


@pytest.mark.parametrize(
    ("origin", "name"),
    [(module, name) for module, names in MODULES.items() for name in names],
    ids=lambda value: value if isinstance(value, str) else value.__name__.rsplit(".", 1)[-1],
)
def test_modules(origin: object, name: str) -> None:
    options, call = MODULES[origin][name]
    cls = getattr(origin, name)
    assert issubclass(cls, torch.nn.Module) and name in origin.__all__
    assert list(arguments(cls).items()) == list(options.items())
    assert list(arguments(cls.forward).items()) == list(call.items())


FUNCTIONS = {
    lightrft.compute_approx_kl: required(["log_probs", "log_probs_base"]) | {"action_mask": None, "kl_estimator": "k1"},
    lightrft.compute_reward: required(["r", "kl_coef", "kl"])
    | {"action_mask": None, "num_actions": None, "reward_clip_range": None},
    lightrft.create_high_entropy_mask: required(["entropy", "action_mask"]) | {"high_entropy_ratio": 0.2},
    lightrft.clip_filter_like_weight_func: {
        "rewards": REQUIRED,
        "clip_filter_like_weight_clip_eps": 3.0,
        "lamda": 1.0,
    },
    lightrft.masked_mean: required(["tensor", "mask"]) | {"dim": None},
    lightrft.log_probs_from_logits: required(["logits", "labels"]) | {"disable_logprobs_flashattn": False},
    lightrft.entropy_from_logits: required(["logits"]),
    lightrft.unpacking_samples: required(["values", "packed_seqlens"]),
    lightrft.get_cumulative_returns: required(["rewards", "action_mask", "gamma"]),
    lightrft.get_advantages_and_returns: required(["values", "rewards", "action_mask", "gamma", "lambd"]),
    lightrft.FixedKLController: required(["kl_coef"]),
    lightrft.AdaptiveKLController: required(["init_kl_coef", "target", "horizon"]),
    openrlhf.aggregate_loss: required(["loss", "loss_mask"]) | {"token_level_loss": True} | TOTALS,
}


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda value: value.__name__)
def test_functions(function: object) -> None:
    assert list(arguments(function).items()) == list(FUNCTIONS[function].items())
