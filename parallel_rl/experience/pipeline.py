"""Experience from samples: models' fields, shaped rewards, the KL in the reward and its coefficient, advantages."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from parallel_rl.advantages import AdvantageEstimator, Advantages, estimate
from parallel_rl.experience.samples import Experience, Samples
from parallel_rl.experience.shaping import RewardShaping, RunningMoments
from parallel_rl.functional.kl import KLType, kl_estimate
from parallel_rl.groups import ParallelGroups

_STEP = 0.2  # largest reaction of an update, as a fraction of the target


class FixedKLController:
    """A constant coefficient; ValueError for a `value` that is negative or not finite."""

    def __init__(self, value: float) -> None:
        if not 0 <= value < math.inf:
            raise ValueError(f"KL coefficient = {value} must be at least 0")
        self.value = value

    def update(self, current: float, n_steps: int) -> None:
        """Leave the value unchanged."""

    def state_dict(self) -> dict[str, float]:
        return {"value": self.value}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Continue from a checkpoint's `state`; ValueError for the state of something else."""
        self.value = _value(state)


class AdaptiveKLController(FixedKLController):
    """A coefficient that rises while the KL is above its target, else falls (arXiv 1909.08593).

        e = clip(current/target − 1, −0.2, 0.2)        value ← value·(1 + e·n_steps/horizon)

    Args:
        value: initial, above 0.
        target: of the KL, above 0.
        horizon: in the unit of `n_steps`, above 0; `n_steps` ≥ 5·horizon could flip the sign and is refused.
    """

    def __init__(self, value: float, target: float, horizon: float) -> None:
        super().__init__(value)
        for name, number in (("value", value), ("target", target), ("horizon", horizon)):
            if not 0 < number < math.inf:
                raise ValueError(f"{name} = {number} of an adaptive KL controller must be above 0")
        self.target, self.horizon = target, horizon

    def update(self, current: float, n_steps: int) -> None:
        """Update with the mean KL of `n_steps` samples; ValueError if not finite or above the horizon's bound."""
        if not math.isfinite(current):
            raise ValueError(f"the KL = {current} is not finite")
        if not 0 <= n_steps * _STEP < self.horizon:
            raise ValueError(f"n_steps = {n_steps} must be at least 0 and below 5 × horizon = {5 * self.horizon:g}")
        error = min(max(current / self.target - 1, -_STEP), _STEP)
        self.value *= 1 + error * n_steps / self.horizon


def kl_controller(value: float, target: float | None = None, horizon: float | None = None) -> FixedKLController:
    """Return an adaptive controller if there is a target (horizon 10000 by default), else a fixed one.

    >>> controller = kl_controller(0.1, target=0.05)
    >>> controller.update(current=0.2, n_steps=500)
    >>> round(controller.value, 6)
    0.101

    Raises:
        ValueError: a horizon without a target; what the controllers refuse.
    """
    if target is None and horizon is not None:
        raise ValueError(f"horizon = {horizon} has no effect without a target; set target or leave it out")
    return (
        FixedKLController(value)
        if target is None
        else AdaptiveKLController(value, target, 10000.0 if horizon is None else horizon)
    )


def _value(state: Mapping[str, float]) -> float:
    value = state.get("value")
    if not isinstance(value, (int, float)) or not 0 <= value < math.inf:
        raise ValueError(f"the state {dict(state)} is not one of a KL controller; it needs a value of at least 0")
    return float(value)


PerSample = Callable[[Experience], Tensor]

_WHOLE = "untruncated_logprobs"


@dataclass(frozen=True, kw_only=True)
class Models:
    """Models evaluated on whole, padded samples, without gradient.

    Attributes:
        policy_logprobs: samples -> [N, S]; None: the sampler's `generation_logprobs`, if any.
        untruncated_logprobs: samples -> [N, S] of the policy without the sampler's truncation, for comparison with
            untruncated models; None: `policy_logprobs` are not truncated.
        reference_logprobs: samples -> [N, S] of the frozen reference.
        values: samples -> [N, S] of the critic; column t is the value before token t.
        others: an estimator's other inputs by name, such as greedy_rewards [N], teacher_token_logprobs [N, S].
    """

    policy_logprobs: PerSample | None = None
    untruncated_logprobs: PerSample | None = None
    reference_logprobs: PerSample | None = None
    values: PerSample | None = None
    others: Mapping[str, PerSample] = field(default_factory=dict)


def ask_models(samples: Experience, models: Models, kl_estimator: KLType | None) -> dict[str, Tensor]:
    """Return the models' fields, and with `kl_estimator` `kl` [N, S], the estimated KL to the reference.

    >>> from parallel_rl.experience import padded_samples
    >>> made = Experience.of(padded_samples([[1]], [[2, 3]], logprobs=[[-1.0, -2.0]]))
    >>> ask_models(made, Models(reference_logprobs=lambda made: torch.full((1, 3), -3.0)), "k1")["kl"][:, 1:]
    tensor([[2., 1.]])

    Raises:
        ValueError: a field of another shape, or a KL without log-probs of the policy.
    """
    fields = {} if samples.generation_logprobs is None else {"prev_logprobs": samples.generation_logprobs}
    by_name = {
        "prev_logprobs": models.policy_logprobs,
        _WHOLE: models.untruncated_logprobs,
        "reference_policy_logprobs": models.reference_logprobs,
        "values": models.values,
        **models.others,
    }
    wide = samples.input_ids.shape
    for name, model in by_name.items():
        if model is not None:
            fields[name] = model(samples)
            if fields[name].shape[:2] not in (wide, wide[:1]):
                raise ValueError(f"{name} must be {list(wide)} or {list(wide[:1])}, got {list(fields[name].shape)}")
    if models.reference_logprobs is not None and kl_estimator is not None:
        if "prev_logprobs" not in fields:
            raise ValueError(
                "the KL needs sources.policy_logprobs or samples with generation_logprobs; both are missing"
            )
        mask, policy = samples.token_mask.bool(), fields.get(_WHOLE, fields["prev_logprobs"])
        policy, reference = (torch.where(mask, x, 0.0) for x in (policy, fields["reference_policy_logprobs"]))
        fields["kl"] = kl_estimate(policy, reference, kl_estimator)
    return fields


def shape_rewards(
    samples: Samples,
    rewards: Tensor,
    shaping: RewardShaping,
    running: RunningMoments | None = None,
    keep: Tensor | None = None,
    group: ProcessGroup | None = None,
) -> tuple[Tensor, Tensor]:
    """Return [N] shaped rewards in the dtype of raw ones [N], and [N] bool: those that the clip changed.

    >>> from parallel_rl.experience import padded_samples
    >>> samples = padded_samples([[1], [1]], [[2], [3]])
    >>> shape_rewards(samples, torch.tensor([0.5, 3.0]), RewardShaping(reward_clip=(0.0, 1.0)))
    (tensor([0.5000, 1.0000]), tensor([False,  True]))

    Args:
        running: moments of all rewards of the run so far, updated here; needed for `running_norm`.
        keep: [N] bool: samples that count in them; None: all.
        group: the data ranks, which all call this.
    """
    shaped = rewards if shaping.reward_scale is None else shaping.reward_scale(rewards)
    if shaping.overlong is not None:
        shaped = shaping.overlong(shaped, samples.response_lengths, is_truncated(samples)).to(rewards.dtype)
    if shaping.running_norm:
        assert running is not None
        running.update(shaped, keep, group)
        shaped = running.normalize(shaped, minus_mean=shaping.running_minus_mean)
    within = shaped if shaping.reward_clip is None else shaped.clamp(*shaping.reward_clip)
    return within, within != shaped


def compute_advantages(
    fields: Mapping[str, Tensor],
    estimator: AdvantageEstimator,
    groups: ParallelGroups | None = None,
    controller: FixedKLController | None = None,
) -> Advantages:
    """Estimate advantages with the KL in the reward, at the controller's coefficient if there is one.

    >>> from parallel_rl.advantages import estimator_config
    >>> fields = {"rewards": torch.tensor([1.0]), "kl": torch.tensor([[0.0, 2.0]]), "token_mask": torch.ones(1, 2)}
    >>> compute_advantages(fields, estimator_config({"name": "reinforce", "kl_coefficient": 0.25})).advantages
    tensor([[0.5000, 0.5000]])

    `fields` are those of an `Experience` (`Samples.data`): what the estimator reads, and `sample_mask`.

    Raises:
        ValueError: what `estimate` refuses; on all data ranks alike.
    """
    if controller is not None and estimator.kl_coefficient:
        estimator = replace(estimator, kl_coefficient=controller.value)
    if _WHOLE in fields:
        fields = {**fields, "prev_logprobs": fields[_WHOLE]}
    names = (*estimator.needs, "sample_mask")
    return estimate(estimator, {name: fields[name] for name in names if name in fields}, groups)


def is_truncated(samples: Samples) -> Tensor:
    """Return [N] bool: cut off responses; all False without `truncated`."""
    if samples.truncated is None:
        return torch.zeros_like(samples.lengths, dtype=torch.bool)
    return samples.truncated.bool()
