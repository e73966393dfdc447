"""NeMo-RL's terms for a loss: its options, unit, input, divisors of metrics, and fields of data."""

from __future__ import annotations

import dataclasses
import enum
import sys
import warnings
from collections.abc import Mapping
from typing import ClassVar, TypedDict, TypeVar

from torch import Tensor

from parallel_rl.config.strict import configure, nearest
from parallel_rl.losses.clipped_pg import ClippedPGLossConfig as ClippedPG
from parallel_rl.losses.policy_config import PolicyLossConfig


class _EqualByName(enum.Enum):
    """Enumeration whose members equal the origin's members of the same name."""

    def __eq__(self, other: object) -> bool:
        return (type(self).__name__, self.value) == (type(other).__name__, getattr(other, "value", None))

    def __hash__(self) -> int:
        return hash(self.name)


class LossType(_EqualByName):
    """Unit that a loss is averaged over."""

    TOKEN_LEVEL = "token_level"
    SEQUENCE_LEVEL = "sequence_level"


class LossInputType(_EqualByName):
    """Input of a loss, which `prepare_loss_input` makes of logits."""

    LOGIT = "logit"
    LOGPROB = "logprob"
    DISTILLATION = "distillation"
    DRAFT = "draft"


class MetricNormalizer(_EqualByName):
    """Divisor of a metric: global_valid_toks, global_valid_seqs, or none (counts, extrema, local means)."""

    TOKENS = "tokens"
    SEQUENCES = "sequences"
    NONE = "none"


def normalizers() -> tuple[MetricNormalizer, MetricNormalizer, MetricNormalizer]:
    """Return tokens, sequences, none: NeMo-RL's members if it is loaded, as it compares by identity."""
    host = sys.modules.get("nemo_rl.algorithms.loss.interfaces")
    tokens, sequences, none = getattr(host, "MetricNormalizer", MetricNormalizer)
    return tokens, sequences, none


class LossFunction:
    """Base of the losses: `loss, metrics = loss_fn(output, data, global_valid_seqs, global_valid_toks)`."""

    loss_type: LossType
    input_type: LossInputType


class PreferenceLossDataDict(TypedDict):
    """Data of pairs of rows, chosen even and rejected odd: [2P, S] and sample_mask [2P]."""

    input_ids: Tensor
    token_mask: Tensor
    sample_mask: Tensor


class DPOLossDataDict(PreferenceLossDataDict):
    """Data of `DPOLossFn`; reference_policy_logprobs [2P, S]: column t is of token t + 1."""

    reference_policy_logprobs: Tensor


class ClippedPGLossDataDict(TypedDict):
    """Data of `ClippedPGLossFn`: [B, S], column t is of token t; sample_mask [B]."""

    input_ids: Tensor
    advantages: Tensor
    prev_logprobs: Tensor
    generation_logprobs: Tensor
    reference_policy_logprobs: Tensor
    token_mask: Tensor
    sample_mask: Tensor


class DistillationLossDataDict(TypedDict):
    """Data of `DistillationLossFn`; teacher_topk_logits, teacher_topk_indices: [B, S, K] at the predictor."""

    input_ids: Tensor
    input_lengths: Tensor
    token_mask: Tensor
    sample_mask: Tensor
    teacher_topk_logits: Tensor
    teacher_topk_indices: Tensor


ConfigT = TypeVar("ConfigT", bound="LossConfig")


class ConfigError(ValueError, AssertionError):
    """Options that cannot be right; also an AssertionError, which the origin raises."""


class LossConfig(dict[str, object]):
    """Options with defaults, as dict keys and attributes: a dict in older releases, now a model."""

    defaults: ClassVar[Mapping[str, object]] = {}

    def __init__(self, values: Mapping[str, object] | None = None, /, **options: object) -> None:
        super().__init__({**self.defaults, **(values or {}), **options})

    def __getattr__(self, name: str) -> object:
        if name not in self:
            raise AttributeError(f"{type(self).__name__} has no option {name!r}; {nearest(name, self)}")
        return self[name]

    def __setattr__(self, name: str, value: object) -> None:
        self[name] = value

    @classmethod
    def read(cls: type[ConfigT], cfg: object) -> ConfigT:
        """Read options of a mapping or an object, else ConfigError; warn of other keys, which have no effect."""
        if not isinstance(cfg, Mapping) and not hasattr(cfg, "__dict__"):
            raise ConfigError(f"cfg must be a mapping or a {cls.__name__}, got {cfg!r}")
        options = cfg if isinstance(cfg, Mapping) else vars(cfg)
        for key in options:
            if key not in cls.defaults:
                warnings.warn(
                    f"{cls.__name__}: the key {key!r} has no effect; {nearest(str(key), cls.defaults)}", stacklevel=3
                )
        return cls({key: options[key] for key in cls.defaults if key in options})

    def number(self, name: str) -> float:
        value = self[name]
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise ConfigError(f"{name} = {value!r} must be a number")
        return value


class ClippedPGLossConfig(LossConfig):
    """Options of `ClippedPGLossFn`: the library's `ClippedPGLossConfig`, with the same defaults."""

    defaults: ClassVar[Mapping[str, object]] = {field.name: field.default for field in dataclasses.fields(ClippedPG)}


class DPOLossConfig(LossConfig):
    """Options of `DPOLossFn`, with names and defaults of the library's `DPOLossConfig`."""

    defaults: ClassVar[Mapping[str, object]] = {
        "reference_policy_kl_penalty": 0.05,
        "preference_loss_weight": 1.0,
        "sft_loss_weight": 0.0,
        "preference_average_log_probs": False,
        "sft_average_log_probs": False,
    }


class DistillationLossConfig(LossConfig):
    """Options of `DistillationLossFn`, named as in the library's `DistillationLossConfig`."""

    defaults: ClassVar[Mapping[str, object]] = {"kl_type": "mixed", "mixed_kl_weight": 0.5, "zero_outside_topk": False}


class MseValueLossConfig(LossConfig):
    """Options of `MseValueLossFn`; cliprange None or 0 does not clip."""

    defaults: ClassVar[Mapping[str, object]] = {"scale": 1.0, "cliprange": None}


def policy_config(cfg: ClippedPGLossConfig) -> PolicyLossConfig:
    """Build the library's policy loss of these options, without the NLL (Q4); else raise ConfigError."""
    options = {**cfg, "positive_example_nll_weight": 0.0}
    if cfg["force_on_policy_ratio"]:
        options["disable_ppo_ratio"] = False
    if cfg["force_on_policy_ratio"] or cfg["disable_ppo_ratio"]:  # Q5: c·A never binds, there is nothing to clip
        for name in ("ratio_clip_c", "ratio_clip_min", "ratio_clip_max"):
            options[name] = cfg.defaults[name]
    if cfg["use_kl_in_reward"] or cfg["reference_policy_kl_penalty"] == 0:
        options |= {
            "use_on_policy_kl_approximation": False,
            "use_kl_in_reward": False,
            "reference_policy_kl_penalty": 0.0,
        }
    options |= _truncation(cfg)
    try:
        return configure(ClippedPG, options).policy
    except ValueError as error:
        raise ConfigError(str(error)) from None


def _truncation(cfg: ClippedPGLossConfig) -> dict[str, object]:
    """Read the truncation's options; a bound without a type (releases before 0.6) clamps from above."""
    prefix = "truncated_importance_sampling_"
    kind, high, low = (cfg[prefix + name] for name in ("type", "ratio", "ratio_min"))
    if kind is None and high is None:
        return {f"{prefix}ratio_min": None}
    if kind is None:
        kind, low = "tis", None
    if low is not None and high is not None and cfg.number(f"{prefix}ratio_min") > cfg.number(f"{prefix}ratio"):
        raise ConfigError(f"{prefix}ratio_min must be <= {prefix}ratio, got {low} > {high}")
    return {
        f"{prefix}type": kind,
        f"{prefix}ratio_min": None if low is None else max(cfg.number(f"{prefix}ratio_min"), 0.0),
    }
