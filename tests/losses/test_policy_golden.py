"""The policy loss on one batch: golden values and gradients of each option."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from tests.losses.policy_batches import DUAL, GSPO, SEQ, SUM, rec, run
from tests.losses.test_golden import check_row, make

WIDE = {"name": "ppo", "clip_low": 3e-4, "clip_high": 4e-4}
NOTHING = {"surrogate": "reinforce"}  # with advantages 0, for the rows of the KL alone


def kl(estimator: str, gradient: str = "plain", **options: object) -> dict[str, Any]:
    return {**NOTHING, "kl": {"coefficient": 1.0, "estimator": estimator, "gradient": gradient, **options}}


def seq(**options: object) -> dict[str, Any]:
    return {"aggregation": SEQ, **options}


Row = tuple[str, "dict[str, Any]", float, "tuple[float, float, float] | None"]
ROWS: list[Row] = [
    ("ppo", {}, 1.430469, (0.0, 0.074992, 1.344366)),
    ("ppo seq", seq(), 2.155992, None),
    ("ppo sum", {"aggregation": SUM}, 4.291408, None),
    ("ppo length", {"aggregation": "constant-length", "max_length": 4}, 3.218556 / 3, None),
    ("dual", {"surrogate": DUAL}, 0.75277, (0.0, 0.074992, 0.0)),
    ("dual seq", seq(surrogate=DUAL), 1.139443, None),
    ("clip higher", {"surrogate": {**DUAL, "clip_high": 0.28}}, 0.741503, None),
    ("off-policy mask", {"surrogate": DUAL, "off_policy_mask": {"delta": -1.0}}, -0.367204, None),
    ("cpgd", seq(surrogate="cpgd"), 0.046984, (0.0, 0.041667, 0.333333)),
    ("gspo", seq(surrogate=WIDE, **GSPO), 1.477155, None),
    ("gspo token", {"surrogate": WIDE, **GSPO}, 0.987538, None),
    ("gspo full", seq(ratio_level="sequence-mean"), math.nan, (0.0, 0.042721, 0.819868)),
    ("gspo token gradient", seq(**GSPO), math.nan, (0.0, 0.042721, 0.819868)),
    ("cispo", {"surrogate": "cispo"}, 0.108691, (-0.135711, 0.071111, 0.284444)),
    ("cispo mask", {"surrogate": {"name": "cispo", "mask_low": 1.0, "mask_high": 0.28}}, -0.175754, None),
    ("topr", {"surrogate": "topr"}, 0.072742, (-0.111111, 0.055556, 0.222222)),
    ("topr sequence", {"surrogate": "topr", "ratio_level": "sequence-sum"}, 0.061111, None),
    ("sppo", {"surrogate": "sppo"}, -0.022222, None),
    ("sapo", seq(surrogate="sapo"), 1.472165, (-0.134062, 0.054388, 0.039780)),
    ("sapo detached", {"surrogate": "sapo_detached"}, 0.134576, (-0.246723, 0.125041, 0.842365)),
    ("opmd", {"surrogate": "opmd"}, 0.030556, None),
    ("importance sampling", {"surrogate": "ratio", "log_ratio_clamp": 20.0}, 1.378233, None),
    ("rec one side", rec("one-side", weight="importance_sampling"), -0.668354, None),
    ("rec two side", rec("two-side"), -0.116667, None),
    ("rec ring", rec("ring"), -0.205556, None),
    ("rec gspo", seq(**rec("gspo-one-side", weight="gspo_importance_sampling")), -0.771242, None),
    ("rec k2", rec("none", regularizer="k2", regularizer_coef=0.1), 0.101667, None),
    ("rec forward", rec("none", regularizer="forward-kl", regularizer_coef=0.1), 0.138889, None),
    ("rec advantage", rec("none", weight="advantage"), 0.94207, None),
    ("gmpo", seq(surrogate="gmpo"), 1.416834, (-0.131262, 0.042721, 0.819868)),
    ("gpg", {"surrogate": "reinforce"}, 0.061111, None),
    ("k1", kl("k1"), 0.2, (0.111111, 0.111111, 0.111111)),
    ("k2", kl("k2"), 0.086667, (0.011111, -0.011111, 0.122222)),
    ("k3", kl("k3"), 0.066218, (0.010574, -0.011686, 0.074125)),
    ("low variance", kl("low_var_kl"), 0.066218, (0.010574, -0.011686, 0.074125)),
    ("abs", kl("abs"), 0.288889, None),
    ("k3 score function", kl("k3", "score-function"), 0.066218, (0.011111, -0.011111, 0.122222)),
    ("k3 straight through", kl("k3", "straight-through"), 0.066218, (0.011111, -0.011111, 0.122222)),
    ("corrected k3", kl("k3", "old", weight_clamp=2.0), 0.115038, (0.013571, -0.014998, 0.148251)),
    ("is", {"importance": {}}, 2.814071, None),
    ("tis", {"importance": {"mode": "tis", "high": 2.0}}, 2.795582, None),
    ("icepop", {"importance": {"mode": "icepop", "low": 0.5, "high": 5.0}}, 2.814071, None),
    ("seq-mask-tis", {"importance": {"mode": "seq-mask-tis", "low": 0.98, "high": 1.2}}, 0.238557, None),
]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_golden_row(row: Row) -> None:
    _, config, value, gradient = row
    logits, data = make()
    if "kl" in config:
        data["advantages"] = torch.zeros_like(data["advantages"])
    loss = run(config, logits, data)
    check_row(loss, logits, value, gradient)
