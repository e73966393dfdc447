"""The losses that the law is tested on; the harness is `parallel_rl.testing`."""

from __future__ import annotations

from typing import Any

import pytest

from parallel_rl.config.yaml_files import read_tree
from parallel_rl.recipes import loss_of, recipes
from parallel_rl.testing.batches import PLACEHOLDER, REWARD_IDS
from parallel_rl.testing.cases import Case
from tests.distributed import law_objectives  # noqa: F401  # registers them

_SEQ = {"token_level_loss": False}
_IS = {"use_importance_sampling_correction": True}
_GSPO = {**_SEQ, "sequence_level_importance_ratios": True, "ratio_clip_min": 0.05, "ratio_clip_max": 0.04}


def _tis(kind: str, low: float | None, high: float) -> dict:
    bounds = {"truncated_importance_sampling_ratio": high} | (
        {} if low is None else {"truncated_importance_sampling_ratio_min": low}
    )
    return {**_IS, "truncated_importance_sampling_type": kind, **bounds}


_MIX = {
    "mu": {"peak": 0.3, "valley": 0.2, "decay_steps": 9},
    "policy": {
        "surrogate": {"name": "ppo", "dual_clip": 3.0},
        "aggregation": "seq-mean-token-mean",
        "entropy_filter": 0.7,
    },
    "supervised": {"weighting": "phi"},
}

_ECHO = {
    "policy": {"loss": {"name": "policy", "options": {"surrogate": {"name": "ppo", "dual_clip": 3.0}}}},
    "observed": {
        "loss": {"name": "nll", "options": {"aggregation": "seq-mean-token-mean"}},
        "coefficient": {"peak": 0.3, "valley": 0.1, "start": 0.2, "warmup_steps": 3},
        "mask": "observation_mask",
    },
}
_SECOND = {
    "policy": {
        "loss": {
            "name": "policy",
            "options": {"entropy_filter": 0.7, "kl": {"coefficient": 0.1}, "aggregation": "seq-mean-token-mean"},
        },
        "rows": "not expert_mask",
    },
    "second": {
        "loss": {"name": "reference_kl", "options": {"estimator": "k3"}},
        "coefficient": -0.4,
        "fields": {"reference_policy_logprobs": "teacher_token_logprobs"},
    },
    "expert": {
        "loss": {"name": "nll", "options": {"token_weights": "count"}},
        "rows": "expert_mask",
        "coefficient": 0.3,
    },
}
_TEACHERS = {
    "policy": {"loss": {"name": "policy", "options": {"entropy_bonus": 0.1}}},
    "top": {"loss": {"name": "distillation", "options": {"kl_type": "reverse"}}, "coefficient": 0.7},
    "whole": {"loss": {"name": "full_distillation"}, "rows": "expert_mask", "coefficient": 0.2},
}

_TURNS = {
    "ratio_level": "turn-mean",
    "importance": {"level": "turn-sum", "mode": "tis", "low": 0.6, "high": 1.3},
    "rejection": {"rules": [{"statistic": "k1", "low": 0.5, "high": 1.7, "level": "turn-max"}]},
}

_KEPT = {"rules": [{"statistic": "k1", "low": 0.7, "high": 1.4}], "denominator": "kept"}

# each component has units of its own
_UNITS = {
    "policy": {
        "loss": {"name": "policy", "options": {"aggregation": "prompt-mean", "rejection": _KEPT}},
        "rows": "not expert_mask",
    },
    "turns": {"loss": {"name": "nll", "options": {"aggregation": "turn-mean"}}, "coefficient": 0.3},
    "mix": {"loss": {"name": "mix", "options": {"supervised": {"aggregation": "trajectory-mean"}}}, "coefficient": 0.7},
}

# One or two of each loss, rich in options: they run on every world and layout, MORE on those of four ranks, the recipes on
# some of these.
CORE = [
    Case("nll"),
    Case("nll", {"token_weights": "count"}),
    Case("preference"),
    Case("dpo", {"sft_loss_weight": 0.4, "preference_loss_weight": 0.7, "reference_policy_kl_penalty": 0.3}),
    Case("simpo", {"label_smoothing": 0.1}),
    Case("cpo", {"sft_loss_weight": 0.5, "sft_average_log_probs": True}),
    Case("orpo"),
    Case("kto", {"desirable_weight": 1.3, "undesirable_weight": 0.8}),
    Case("prm", {"placeholder_token_id": PLACEHOLDER, "reward_token_ids": REWARD_IDS}),
    Case("value", {"cliprange": 0.3, "scale": 0.4}),
    Case("clipped_pg", {**_GSPO, **_tis("tis", 0.7, 1.3)}),
    Case("clipped_pg", {"positive_example_nll_weight": 0.3}),
    Case(
        "policy",
        {
            "surrogate": {"name": "clip_cov", "fraction": 0.1, "low": -0.2},
            "entropy_filter": 0.6,
            "entropy_bonus": 0.1,
            "off_policy_mask": {"delta": 0.02},
        },
    ),
    Case(
        "policy",
        {
            "surrogate": "gmpo",
            "aggregation": "seq-mean-token-mean",
            "rejection": {
                "rules": [
                    {"statistic": "k1", "low": 0.7, "high": 1.4},
                    {"statistic": "k3", "high": 0.2, "level": "sequence-max"},
                ],
                "denominator": "kept",
            },
            "kl": {"coefficient": 2.0, "gradient": "old", "weight_clamp": 1.1},
        },
    ),
    Case("policy", _TURNS),
    Case("nll", {"aggregation": "prompt-mean"}),
    Case("policy", {"aggregation": "trajectory-mean", "entropy_bonus": 0.1}),
    Case("full_distillation", {"divergence": {"name": "jsd", "beta": 0.3}, "teacher_temperature": 1.3}),
    Case("distillation", {"zero_outside_topk": True, "mixed_kl_weight": 0.9, "aggregation": "seq-mean-token-mean"}),
    Case("mix", _MIX),
    Case("components", {"components": _ECHO}),
    Case("reference_kl", {"gradient": "straight-through", "input_clamp": 0.4}),
    Case("test_entropy"),
    Case("test_sequence_token", {"aggregation": "constant-length", "max_length": 40}),
    Case("test_sequence"),
    Case("test_pair"),
    Case("test_class"),
]
MORE = [
    Case("nll", {"weighting": "phi", "cutoff_prob": 0.3, "aggregation": "seq-mean-token-mean"}),
    Case("nll", {"weighting": "probability"}),
    Case("nll", {"aggregation": "turn-mean"}),
    Case("policy", {"aggregation": "prompt-mean", "rejection": _KEPT}),
    Case("policy", {"aggregation": "turn-mean", "rejection": _KEPT}),
    Case("test_sequence_token", {"aggregation": "prompt-mean"}),
    Case("value", {"aggregation": "trajectory-mean", "head_position": "token"}),
    Case("distillation", {"aggregation": "prompt-mean"}),
    Case("nll", {"token_weights": "sum", "aggregation": "seq-mean-token-mean"}),
    Case("nll", {"token_weights": "count", "aggregation": "token-sum"}),
    Case("policy", {"token_weights": "sum", "entropy_bonus": 0.1, "kl": {"coefficient": 0.3}}),
    Case("policy", {"token_weights": "count", "ratio_level": "sequence-mean", "rejection": _KEPT}),
    Case("test_sequence_token", {"token_weights": "count", "aggregation": "prompt-mean"}),
    Case("full_distillation", {"token_weights": "sum"}),
    Case("components", {"components": _SECOND}),
    Case("components", {"components": _UNITS}),
    Case("components", {"components": _TEACHERS}),
    Case(
        "components",
        {"components": {"mix": {"loss": {"name": "mix", "options": {"mu": 0.3}}}, "nll": _ECHO["observed"]}},
    ),
    Case("reference_kl", {"estimator": "low_var_kl", "aggregation": "seq-mean-token-mean"}),
    Case("full_distillation", {"divergence": "reverse_kl", "aggregation": "seq-mean-token-sum"}),
    Case("distillation", {"kl_type": "reverse", "topk_alignment": "predictor"}),
    Case("distillation", {"bucket_tail": True}),
    Case("nll"),
    Case("preference"),
    Case("dpo"),
    Case("dpo", {"sft_loss_weight": 0.4, "preference_loss_weight": 0.7, "reference_policy_kl_penalty": 0.3}),
    Case("dpo", {"preference_average_log_probs": True, "sft_loss_weight": 0.4, "sft_average_log_probs": True}),
    Case("dpo", {"reference_logprobs_alignment": "predictor"}),
    Case("dpo", {"kind": "robust", "label_smoothing": 0.1, "length_desensitization": 0.3}),
    Case("preference", {"margin": 0.2, "pair_margins": True}),
    Case("kto", {"baseline": "opposite-class"}),
    Case("prm", {"placeholder_token_id": PLACEHOLDER}),
    Case("value", {"head_position": "token", "aggregation": "seq-mean-token-mean"}),
    Case("clipped_pg"),
    Case(
        "clipped_pg",
        {"ratio_clip_min": 0.2, "ratio_clip_max": 0.28, "ratio_clip_c": 1.5, "reference_policy_kl_penalty": 0.0},
    ),
    Case(
        "clipped_pg",
        {**_SEQ, "reference_policy_kl_type": "k2", "kl_input_clamp_value": None, "kl_output_clamp_value": None},
    ),
    Case("clipped_pg", {"disable_ppo_ratio": True, "reference_policy_kl_type": "k1"}),
    Case("clipped_pg", {"force_on_policy_ratio": True, **_IS}),
    Case(
        "clipped_pg", {"reference_policy_kl_penalty": 1.0, "kl_input_clamp_value": 0.15, "kl_output_clamp_value": 0.01}
    ),
    Case("clipped_pg", {"reference_policy_kl_penalty": 0.5, "use_on_policy_kl_approximation": True}),
    Case("clipped_pg", {"use_kl_in_reward": True, **_IS, **_SEQ}),
    Case("clipped_pg", _tis("tis", None, 1.1)),
    Case("clipped_pg", _tis("tis", 0.9, 1.1)),
    Case("clipped_pg", _tis("icepop", 0.8, 1.2)),
    Case("clipped_pg", _tis("seq-mask-tis", 0.97, 1.05)),
    Case("clipped_pg", _GSPO),
    Case("clipped_pg", {**_GSPO, **_tis("tis", 0.7, 1.3)}),
    Case("clipped_pg", {**_GSPO, **_tis("icepop", 0.5, 2.0), "reference_policy_kl_penalty": 0.2}),
    Case("clipped_pg", {"use_cispo": True, "ratio_clip_min": 1.0, "ratio_clip_max": 0.1}),
    Case("clipped_pg", {**_GSPO, "force_on_policy_ratio": True, **_IS, "ratio_clip_min": 0.2, "ratio_clip_max": 0.2}),
    Case("test_entropy"),
    Case("test_entropy", {"aggregation": "seq-mean-token-mean"}),
    Case("test_sequence_token", {"aggregation": "seq-mean-token-sum"}),
    Case("test_sequence_token", {"aggregation": "constant-length", "max_length": 40}),
    Case("test_sequence"),
    Case("policy", {"surrogate": {"name": "kl_cov", "fraction": 0.2}, "positive_nll_weight": 0.2}),
    Case("policy", {"surrogate": "vespo", "importance": {"mode": "tis", "high": 1.1, "normalize": True}}),
    Case("policy", {"surrogate": {"name": "topr"}, "ratio_level": "sequence-sum", "aggregation": "seq-mean-token-sum"}),
    Case("policy", {"ratio_level": "sequence-mean", "ratio_gradient": "token", "log_ratio_clamp": 0.1}),
    Case("policy", {"ratio_level": "sequence-mean", "kl": {"coefficient": 0.3, "gradient": "ratio"}}),
    Case("policy", {"surrogate": {"name": "rec", "clip_mode": "gspo-one-side", "weight": "gspo_importance_sampling"}}),
    Case(
        "policy",
        {"surrogate": "reinforce", "kl": {"coefficient": 0.3, "gradient": "straight-through", "against": "prev"}},
    ),
    Case(
        "policy",
        {
            "importance": {"mode": "tis", "high": 1.1},
            "rejection": {
                "rules": [
                    {"statistic": "k2", "high": 0.03, "level": "step"},
                    {"statistic": "tv", "high": 0.02, "level": "step", "signed": True},
                    {"statistic": "binary_kl", "high": 0.02, "level": "sequence-mean"},
                    {"statistic": "k1", "low": 0.75, "high": 1.2, "signed": True},
                ],
                "denominator": "kept",
            },
        },
    ),
    Case(
        "policy",
        {
            "on_policy": True,
            "aggregation": "seq-mean-token-mean",
            "rejection": {
                "rules": [
                    {"statistic": "k3", "high": 0.02, "level": "step", "signed": True},
                    {"statistic": "tv", "high": 0.05, "level": "sequence-mean", "signed": True},
                ]
            },
        },
    ),
    Case("policy", {"entropy_bonus": {"name": "schedule", "peak": 0.1, "valley": 0.0, "decay_steps": 9}}),
    Case("policy", {"surrogate": {"name": "dppo", "low": 0.03, "high": 0.02, "ratio_max": 1.2}}),
    Case(
        "policy",
        {"surrogate": {"name": "dppo", "divergence": "binary_kl", "low": 3e-3, "high": 2e-3, "detached": True}},
    ),
]
MORE = [case for case in MORE if case not in CORE]
# a policy that is read as its sampler was: truncated, at its temperatures
TRUNCATED = [
    Case("clipped_pg", {"reference_policy_kl_penalty": 0.3}, {"top_k": 13}),
    Case("clipped_pg", _GSPO, {"top_k": 15, "top_p": 0.95, "temperature": 1.2}),
    Case("clipped_pg", {**_SEQ, **_tis("icepop", 0.5, 2.0)}, {"kept_sets": True}),
    Case("policy", {"entropy_filter": 0.6, "entropy_bonus": 0.1}, {"top_p": 0.9, "temperature": 0.8}),
    Case("policy", {"aggregation": "seq-mean-token-mean"}, {"top_p": 0.9, "temperature": "per-sample"}),
    Case("policy", {"entropy_bonus": 0.1}, {"temperature": "per-sample"}),
    Case("policy", {"aggregation": "prompt-mean", "rejection": _KEPT}, {"top_p": 0.9}),
    Case("policy", {**_TURNS, "aggregation": "turn-mean"}, {"top_k": 13}),
]


def recipe_cases() -> list[Case]:
    """The loss of every recipe, with the options of its file."""
    found: list[Case] = []
    for path in recipes().values():
        choice = loss_of(read_tree(path))
        assert isinstance(choice, dict)
        options = dict(choice.get("options") or {})
        if "placeholder_token_id" in options:  # its ids are those of another vocabulary
            options |= {"placeholder_token_id": PLACEHOLDER, "reward_token_ids": REWARD_IDS}
        found += [case for case in [Case(choice["name"], options)] if case not in (*CORE, *MORE, *found)]
    return found


RECIPES = recipe_cases()
CASES = [*CORE, *MORE, *RECIPES]


def one_of_each(cases: list[Case]) -> list[Any]:
    """For `parametrize`: the cases of CORE, which hold every loss; the other options of a loss are slow tests."""
    return [case if case in CORE else pytest.param(case, marks=pytest.mark.slow) for case in cases]
