"""The losses that the law is tested on, and dense references of those that have one; the harness is `parallel_rl.testing`."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from parallel_rl import LossFn, Metrics, TokenBatch, register_loss, register_objective
from parallel_rl.config.yaml_files import read_tree
from parallel_rl.losses import Field, NoConfig, Requirements
from parallel_rl.metrics import Mean, Measure, Metric, MinMax, Sum
from parallel_rl.recipes import loss_of, recipes
from parallel_rl.testing import cases
from parallel_rl.testing.batches import PLACEHOLDER, REWARD_IDS, make_batch
from parallel_rl.testing.cases import Batch, Case, Expected, Reference
from tests import reference, reference_distillation, reference_heads, reference_preference


@register_objective("test_entropy", token_fields=("advantages",), needs_entropy=True, token_separable=True)
def EntropyBonus(logprobs: Tensor, batch: TokenBatch) -> tuple[Tensor, dict[str, Measure]]:
    """A user's objective: policy gradient with an entropy bonus, and metrics of its own."""
    measures = {"sure": Mean(batch.entropy < 1.5), "entropy": MinMax(batch.entropy), "likely": Sum(logprobs > -2)}
    return -batch["advantages"] * logprobs - 0.3 * batch.entropy, measures


@register_objective("test_sequence_token", token_fields=("prev_logprobs",))
def SequenceToken(logprobs: Tensor, batch: TokenBatch) -> Tensor:
    """A user's objective: a token term that uses a quantity of the whole sequence, with gradient through both."""
    return batch.expand(batch.segment_mean(logprobs - batch["prev_logprobs"]).exp()) * logprobs.exp()


@register_objective("test_sequence", level="sequence", sequence_fields=("rewards",))
def SequenceLevel(logprobs: Tensor, batch: TokenBatch) -> tuple[Tensor, dict[str, Measure]]:
    """A user's objective on sums of log-probs, with metrics of its own."""
    measures = {"good": Sum(batch.per_sequence("rewards") > 0), "sum": MinMax(logprobs), "likelihood": Mean(logprobs)}
    return (logprobs / 10).exp() * (1 + batch.per_sequence("rewards").square()), measures


@register_objective("test_pair", level="pair", token_fields=("reference_policy_logprobs",))
def PairLevel(logprobs: Tensor, batch: TokenBatch) -> tuple[Tensor, dict[str, Measure]]:
    """A user's objective on pairs, hinge on the difference of log-probs to the reference's, with metrics of its own."""
    margins = (logprobs - batch.segment_sum(batch["reference_policy_logprobs"])).view(-1, 2)
    better = margins[:, 0] - margins[:, 1]
    return torch.relu(1 - better), {"accuracy": Mean(better > 0), "margin": MinMax(better), "wins": Sum(better > 0)}


@register_loss("test_class")
class UserLoss(LossFn[NoConfig]):
    """A user's class."""

    config_class = NoConfig
    requirements = Requirements(
        (Field("advantages"), Field("rewards", per="sequence")), entropy=True, token_separable=True
    )

    def compute(self, batch: TokenBatch) -> tuple[Tensor, Metrics]:
        weights = batch.per_sequence("rewards") / batch.counts.toks
        loss = batch.weighted_sum(batch["advantages"] * batch.logprobs.exp() - batch.entropy, weights)
        return loss, Metrics({"loss": Metric("share", loss)})


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


_REFERENCES: dict[str, Reference] = {
    "nll": reference.nll,
    "preference": reference_heads.preference,
    "value": reference_heads.value,
    "prm": reference_heads.prm,
    "dpo": reference_preference.dpo,
    "simpo": reference_preference.simpo,
    "cpo": reference_preference.cpo,
    "kto": reference_preference.kto,
    "clipped_pg": reference.clipped_pg,
    "distillation": reference_distillation.distillation,
    "full_distillation": reference_distillation.full_distillation,
}


def batch_of(
    case: Case, seed: int = 5, half_masked: bool = False, dtype: torch.dtype = torch.float64, shift: float = 0.0
) -> Batch:
    """A batch that suits the case's loss and options."""
    return make_batch(seed, half_masked, case.loss, dtype, shift, truncated=case.truncated)


def reference_of(case: Case, dtype: torch.dtype = torch.float64) -> Reference | None:
    """The dense reference of the case's loss; there is none for a truncated policy, weights of tokens, or measured overlap."""
    if case.options or "token_weights" in case.config or "overlap" in case.config:
        return None
    if case.loss == "orpo":  # what a certain response counts depends on the digits that its log-prob has
        eps = torch.finfo(torch.promote_types(dtype, torch.float32)).eps
        return partial(reference_preference.orpo, eps=eps)
    return _REFERENCES.get(case.loss)


def expected(case: Case, batch: Batch, dtype: torch.dtype = torch.float64) -> Expected:
    """The numbers of one process, by the dense reference where there is one, for logits that came in `dtype`."""
    return cases.expected(case, batch, reference_of(case, dtype))
