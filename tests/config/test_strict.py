"""Strict configs: what is wrong is named, with its value and what would be right."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Literal

import pytest

from parallel_rl import ClippedPGLossFn, DPOLossFn, NLLLoss, get_loss
from parallel_rl.config.strict import configure, nearest
from parallel_rl.losses import ClippedPGLossConfig, DPOLossConfig
from parallel_rl.losses.registry import ObjectiveConfig

# `configure`


@dataclass(frozen=True)
class Inner:
    rate: float = 0.5
    kind: Literal["a", "b"] = "a"

    def __post_init__(self) -> None:
        if self.rate > 1:
            raise ValueError(f"rate = {self.rate} must be at most 1")


@dataclass(frozen=True)
class Outer:
    steps: int
    name: str = "x"
    flag: bool = False
    limit: float | None = None
    either: int | str = 0
    inner: Inner = field(default_factory=Inner)
    maybe: Inner | None = None
    sizes: list[int] = field(default_factory=list)
    betas: tuple[float, ...] = (0.9,)
    span: tuple[int, float] = (1, 2.0)
    table: dict[str, float] = field(default_factory=dict)
    derived: int = field(init=False, default=7)


def test_a_mapping_becomes_the_dataclass() -> None:
    got = configure(
        Outer,
        {
            "steps": 3,
            "limit": "1e-3",  # what YAML 1.1 makes of 1e-3
            "either": "text",
            "inner": {"rate": 1, "kind": "b"},
            "maybe": {},
            "sizes": [1, 2],
            "betas": [0, "0.5"],
            "span": [3, 4],
            "table": {"p": 1},
        },
    )
    assert got == Outer(3, "x", False, 1e-3, "text", Inner(1.0, "b"), Inner(), [1, 2], (0.0, 0.5), (3, 4.0), {"p": 1.0})
    assert isinstance(got.inner.rate, float) and isinstance(got.betas, tuple) and isinstance(got.table["p"], float)


def test_nothing_an_instance_and_null() -> None:
    assert configure(Inner) == configure(Inner, {}) == Inner()
    given = Inner(0.25)
    assert configure(Inner, given) is given
    assert configure(Outer, {"steps": 1, "inner": given, "maybe": None, "limit": None}).inner is given
    assert configure(Outer, {"steps": 1, "inner": None}).inner == Inner()  # a section without keys


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({}, "Outer needs the key 'steps', which is missing"),
        ({"step": 1}, "unknown key step = 1 in Outer; did you mean 'steps'?"),
        ({"steps": 1, "zzz": 0}, "unknown key zzz = 0 in Outer; valid: betas, either, flag"),
        ({"steps": 1, "derived": 1}, "unknown key derived = 1 in Outer"),
        ({"steps": 1, "inner": {"rat": 2}}, "unknown key inner.rat = 2 in Inner; did you mean 'rate'?"),
        ({"steps": "1"}, "steps = '1' is not valid; a value of type int is needed"),
        (
            {"steps": 1, "limit": False},
            "limit = False is not valid; a value of type float is needed, or null",
        ),  # YAML's off
        ({"steps": 1.0}, "steps = 1.0 is not valid; a value of type int is needed"),
        ({"steps": True}, "steps = True is not valid; a value of type int"),
        ({"steps": None}, "steps = None is not valid; a value of type int"),
        ({"steps": 1, "name": 3}, "name = 3 is not valid; a value of type str"),
        ({"steps": 1, "flag": 1}, "flag = 1 is not valid; a value of type bool"),
        ({"steps": 1, "flag": "true"}, "flag = 'true' is not valid"),
        ({"steps": 1, "limit": "small"}, "limit = 'small' is not valid; a value of type float"),
        ({"steps": 1, "limit": True}, "limit = True is not valid; a value of type float"),
        ({"steps": 1, "either": 1.5}, "either = 1.5 is not valid"),
        ({"steps": 1, "inner": {"kind": "c"}}, "inner.kind = 'c' is not valid; choose one of 'a', 'b'"),
        ({"steps": 1, "inner": {"kind": ["a"]}}, r"inner.kind = \['a'\] is not valid; choose one of 'a', 'b'"),
        ({"steps": 1, "inner": {"rate": 2}}, "inner: rate = 2.0 must be at most 1"),
        ({"steps": 1, "inner": 3}, "inner must be a mapping or a Inner, got 3"),
        ({"steps": 1, "maybe": {"rate": "x"}}, "maybe.rate = 'x' is not valid"),
        ({"steps": 1, "sizes": 3}, "sizes = 3 is not valid; a list is needed"),
        ({"steps": 1, "sizes": "12"}, "sizes = '12' is not valid; a list is needed"),
        ({"steps": 1, "sizes": [1, "2"]}, r"sizes\[1\] = '2' is not valid"),
        ({"steps": 1, "span": [1]}, r"span = \[1\] is not valid; 2 values are needed"),
        ({"steps": 1, "span": [0.5, 1]}, r"span\[0\] = 0.5 is not valid; a value of type int"),
        ({"steps": 1, "table": [1]}, r"table = \[1\] is not valid; a mapping is needed"),
        ({"steps": 1, "table": {"p": "x"}}, "table.p = 'x' is not valid"),
        ([1], r"Outer must be a mapping or a Outer, got \[1\]"),
        (Inner(), "Outer must be a mapping or a Outer, got Inner"),
    ],
)
def test_what_is_wrong_is_named(value: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        configure(Outer, value)


def test_errors_say_where_in_the_whole_config() -> None:
    for value, message in (
        ({"steps": 1, "inner": {"rat": 2}}, "unknown key run.it.inner.rat = 2"),
        ({}, "run.it needs the key 'steps'"),
        ({"steps": 1, "inner": {"rate": 2}}, "run.it.inner: rate = 2.0 must be at most 1"),
        (Outer(steps="3"), "run.it.steps = '3' is not valid; a value of type int"),  # type: ignore[arg-type]
    ):
        with pytest.raises(ValueError, match=message):
            configure(Outer, value, "run.it")


def test_nearest() -> None:
    assert nearest("clip_max", ["ratio_clip_max", "kl"]) == "did you mean 'ratio_clip_max'?"
    assert nearest("q", ["b", "a"]) == "valid: a, b"


# Losses: a dict and the dataclass say the same, also where they are wrong.

IS = {"use_importance_sampling_correction": True}
TIS = {**IS, "truncated_importance_sampling_type": "tis", "truncated_importance_sampling_ratio": 2.0}
MIN = "truncated_importance_sampling_ratio_min"

POLICY_FAULTS: list[tuple[dict, str]] = [
    ({"ratio_clip_min": -0.1}, "ratio_clip_min = -0.1 must be at least 0"),
    ({"ratio_clip_max": float("nan")}, "ratio_clip_max = nan must be at least 0"),
    ({"reference_policy_kl_penalty": -1.0}, "reference_policy_kl_penalty = -1.0 must be at least 0"),
    ({"positive_example_nll_weight": -1.0}, "positive_example_nll_weight = -1.0 must be at least 0"),
    ({"kl_input_clamp_value": 0.0}, "kl_input_clamp_value = 0.0 must be positive, or None for no clamp"),
    ({"kl_output_clamp_value": -2.0}, "kl_output_clamp_value = -2.0 must be positive"),
    ({"ratio_clip_c": 1.0}, "ratio_clip_c = 1.0 must exceed 1, or be None for no dual clip"),
    ({"ratio_clip_c": 0.5}, "ratio_clip_c = 0.5 must exceed 1"),
    ({"reference_policy_kl_type": "k4"}, "reference_policy_kl_type = 'k4' is not valid; choose one of 'k1', 'k2', 'k3'"),
    (
        {"disable_ppo_ratio": True, "force_on_policy_ratio": True},
        "disable_ppo_ratio = True is incompatible with force_on_policy_ratio = True",
    ),
    (
        {"sequence_level_importance_ratios": True},
        "token_level_loss = True is incompatible with sequence_level_importance_ratios = True",
    ),
    ({"use_cispo": True, "token_level_loss": False}, "token_level_loss = False is incompatible with use_cispo = True"),
    (
        {"use_cispo": True, "token_level_loss": True, "sequence_level_importance_ratios": True},
        "is incompatible with",
    ),
    ({"use_cispo": True, "ratio_clip_c": 3.0}, "ratio_clip_c = 3.0 is incompatible with use_cispo = True"),
    (
        {"use_on_policy_kl_approximation": True, "reference_policy_kl_penalty": 0.0},
        "use_on_policy_kl_approximation = True is incompatible with no KL in the loss",
    ),
    (
        {"use_on_policy_kl_approximation": True, "use_kl_in_reward": True},
        "use_on_policy_kl_approximation = True is incompatible with no KL in the loss",
    ),
    *(
        ({switch: True, key: value}, f"{key} = {value} is incompatible with {switch} = True")
        for switch in ("disable_ppo_ratio", "force_on_policy_ratio")
        for key, value in {
            "use_cispo": True, "ratio_clip_c": 3.0, "ratio_clip_min": 0.1, "ratio_clip_max": 0.3,
        }.items()
    ),
    ({"truncated_importance_sampling_ratio": 2.0}, "ratio = 2.0 has no effect without truncated_importance_sampling_type"),
    ({MIN: 0.5}, f"{MIN} = 0.5 has no effect without truncated_importance_sampling_type"),
    ({**TIS, **dict.fromkeys(IS, False)}, "'tis' has no effect without use_importance_sampling_correction = True"),
    ({**TIS, "truncated_importance_sampling_type": "tiss", MIN: 0.5}, "'tiss' is not valid; choose one of 'tis', 'icepop'"),
    ({**TIS, "truncated_importance_sampling_ratio": None}, "sampling_ratio = None must be positive with type 'tis'"),
    ({**TIS, "truncated_importance_sampling_ratio": 0.0}, "sampling_ratio = 0.0 must be positive with type 'tis'"),
    ({**TIS, "truncated_importance_sampling_type": "icepop"}, f"{MIN} must be set with type 'icepop'"),
    ({**TIS, "truncated_importance_sampling_type": "seq-mask-tis"}, f"{MIN} must be set with type 'seq-mask-tis'"),
    ({**TIS, MIN: 2.5}, rf"{MIN} = 2.5 must lie in \[0, truncated_importance_sampling_ratio = 2.0\]"),  # reversed
    ({**TIS, MIN: -0.5}, rf"{MIN} = -0.5 must lie in \[0,"),
    (
        {
            **TIS, "truncated_importance_sampling_type": "seq-mask-tis", MIN: 0.5,
            "sequence_level_importance_ratios": True, "token_level_loss": False,
        },
        "'seq-mask-tis' is incompatible with sequence_level_importance_ratios = True",
    ),
]  # fmt: skip


@pytest.mark.parametrize("form", [dict, ClippedPGLossConfig])
@pytest.mark.parametrize(
    ("config", "message"), POLICY_FAULTS, ids=lambda value: "-".join(value) if isinstance(value, dict) else ""
)
def test_policy_configs_that_contradict_themselves(config: dict, message: str, form: type) -> None:
    with pytest.raises(ValueError, match=message):
        ClippedPGLossFn(form(**config))


DPO_FAULTS = [
    ({"reference_policy_kl_penalty": 0.0}, "reference_policy_kl_penalty = 0.0 must be positive"),
    ({"preference_loss_weight": -1.0}, "preference_loss_weight = -1.0 must be at least 0"),
    ({"sft_loss_weight": float("nan")}, "sft_loss_weight = nan must be at least 0"),
    ({"preference_loss_weight": 0.0}, "preference_loss_weight and sft_loss_weight are both 0"),
    ({"sft_average_log_probs": True}, "sft_average_log_probs = True has no effect with sft_loss_weight = 0"),
    ({"reference_logprobs_alignment": "tokens"}, "reference_logprobs_alignment = 'tokens' is not valid; choose one of"),
]


@pytest.mark.parametrize("form", [dict, DPOLossConfig])
@pytest.mark.parametrize(
    ("config", "message"), DPO_FAULTS, ids=lambda value: "-".join(value) if isinstance(value, dict) else ""
)
def test_dpo_configs_that_contradict_themselves(config: dict, message: str, form: type) -> None:
    with pytest.raises(ValueError, match=message):
        DPOLossFn(form(**config))


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"ratio_clip_c": 1.0001},
        {"use_cispo": True, "ratio_clip_min": 1.0},
        {"disable_ppo_ratio": True, "ratio_clip_min": 0.2, "ratio_clip_max": 0.2},  # NeMo-RL's files spell them out
        {**TIS, MIN: 2.0},
        {**TIS, MIN: 0.0},
        {"kl_input_clamp_value": None, "kl_output_clamp_value": None},
        {"reference_policy_kl_penalty": 0},
    ],
)
def test_a_dict_and_the_dataclass_say_the_same(config: dict) -> None:
    assert ClippedPGLossFn(config).config == ClippedPGLossFn(ClippedPGLossConfig(**config)).config


def test_configs_are_frozen_and_of_the_right_kind() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        ClippedPGLossConfig().use_cispo = True  # type: ignore[misc]
    with pytest.raises(ValueError, match="ClippedPGLossConfig must be a mapping or a ClippedPGLossConfig, got DPOLoss"):
        ClippedPGLossFn(DPOLossConfig())  # type: ignore[arg-type]
    with pytest.raises(
        ValueError, match=r"unknown key ratio_clip_mx = 0.3 in ClippedPGLossConfig; did you mean 'ratio_clip_ma"
    ):
        ClippedPGLossFn({"ratio_clip_mx": 0.3})
    with pytest.raises(ValueError, match="unknown key beta = 1 in NLLLossConfig"):
        NLLLoss({"beta": 1})
    with pytest.raises(ValueError, match=r"unknown key beta = 0.1 in DPOLossConfig"):
        get_loss("dpo")({"beta": 0.1})


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"aggregation": "mean"}, "aggregation = 'mean' is not valid; choose one of 'token-mean'"),
        ({"aggregation": "constant-length"}, "max_length = None goes with aggregation 'constant-length' only"),
        ({"max_length": 4}, "max_length = 4 goes with aggregation 'constant-length' only"),
        ({"aggregation": "constant-length", "max_length": 0}, "max_length = 0 must be a positive number of tokens"),
    ],
)
def test_configs_of_a_users_objective(config: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        configure(ObjectiveConfig, config)
