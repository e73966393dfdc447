"""Advantages of a step's tokens from its rewards, for all estimators."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from parallel_rl.advantages import grouped, optimal_baseline, tokenwise, weighted  # noqa: F401  (they register the estimators)
from parallel_rl.advantages.base import AdvantageEstimator, Advantages
from parallel_rl.advantages.table import by_group
from parallel_rl.agreement import raise_on_all_ranks
from parallel_rl.config.strict import configure

if TYPE_CHECKING:
    from torch import Tensor

    from parallel_rl.groups import ParallelGroups

# shapes of fields other than [N, S]
_SHAPES = {
    "rewards": "[N]",
    "group_ids": "[N]",
    "sample_ids": "[N]",
    "run_ids": "[N]",
    "step_ids": "[N]",
    "state_ids": "[N]",
    "sample_mask": "[N]",
    "greedy_rewards": "[N]",
    "bootstrap_values": "[N]",
    "reward_components": "[N, K]",
}
_INTEGERS = ("group_ids", "sample_ids", "run_ids", "step_ids", "state_ids")


def estimate(
    config: AdvantageEstimator | Mapping | str,
    batch: Mapping[str, Tensor],
    groups: ParallelGroups | None = None,
) -> Advantages:
    """Compute advantages and returns of every token of this rank's samples.

    >>> batch = {"rewards": torch.tensor([1.0, 0.0]), "group_ids": torch.tensor([7, 7]), "token_mask": torch.ones(2, 2)}
    >>> estimate("rloo", batch).advantages
    tensor([[ 1.,  1.],
            [-1., -1.]])

    A group is the samples with one id, on any data ranks. Group statistics are in float64 and cost two all-gathers over data
    ranks; whitening costs one.

    Args:
        config: an estimator, `{name: rloo, ...}` or a name; `estimator_config(config).needs` lists the fields that it reads.
        batch: this rank's samples, whole on its tensor, context and pipeline ranks; N may be 0 on some ranks. rewards,
            greedy_rewards, bootstrap_values [N]; reward_components [N, K]; group_ids, sample_ids [N] integers, and run_ids,
            step_ids, state_ids if a row is one step of a run (`stepwise_grpo`, `gigpo`); token_mask [N, S]: the response's
            tokens, in any pattern; sample_mask [N], optional: dropped samples are in no statistic and get 0; kl [N, S]: an
            estimate of the KL to the reference at each token; values, teacher_token_logprobs, prev_logprobs,
            generation_logprobs [N, S]; sum_pi_squared [N, S]: Σ_v π_v² of the policy of prev_logprobs, see `token_scores`.
        groups: `data` are the ranks that hold the other samples; None is one process.

    Returns:
        (advantages, returns), [N, S] each, in the dtype of the rewards but at least float32.

    Raises:
        ValueError: on all data ranks alike: an unknown name or option (with the nearest), a field that is missing or of a
            wrong shape or dtype, an infinite or NaN valid entry, no sample at all, a group of one if `singleton` is "error".
    """
    estimator = estimator_config(config)
    group = None if groups is None else groups.data
    like = next((x for x in batch.values() if isinstance(x, torch.Tensor)), torch.empty(0))
    raise_on_all_ranks(lambda: _check(estimator, batch), [group], like)
    keep, mask = _masks(batch)
    clean: dict[str, Tensor] = {}
    for name in estimator.needs:
        if name not in (*_INTEGERS, "token_mask"):
            clean[name] = torch.where(_valid(name, keep, mask), batch[name], 0).double()
    scores = clean.get("rewards", torch.zeros_like(keep, dtype=torch.float64))
    if estimator.grouped:
        columns = {name: clean[name] for name in estimator.needs if name in clean and name in _SHAPES}
        columns |= {name: batch[name] for name in _INTEGERS if name in estimator.needs}
        scores = by_group(estimator.scores, {**columns, "lengths": mask.sum(1)}, keep, group)
    fields = {**clean, "sample_mask": keep, **{name: batch[name] for name in _INTEGERS if name in estimator.needs}}
    estimated = estimator.finish(estimator.tokens(fields, scores, mask, group), fields, mask, group)
    dtype = torch.promote_types(batch[estimator.fields[0]].dtype, torch.float32)
    return Advantages(estimated.advantages.to(dtype), estimated.returns.to(dtype))


def estimator_config(config: AdvantageEstimator | Mapping | str) -> AdvantageEstimator:
    """Build an estimator from its name or a mapping with the key `name`; return an estimator as it is.

    >>> estimator_config({"name": "gae", "lam": 0.95}).needs
    ('rewards', 'values', 'token_mask')

    Raises:
        ValueError: an unknown name or option (with the nearest valid one), or options that contradict each other.
    """
    estimator: AdvantageEstimator = configure(AdvantageEstimator, config, "advantages")
    return estimator


def _masks(batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    mask = batch["token_mask"].bool()
    keep = batch["sample_mask"].bool() if "sample_mask" in batch else mask.new_ones(len(mask))
    return keep, mask & keep[:, None]


def _valid(name: str, keep: Tensor, mask: Tensor) -> Tensor:
    return {"[N]": keep, "[N, K]": keep[:, None]}.get(_SHAPES.get(name, ""), mask)


def _check(estimator: AdvantageEstimator, batch: Mapping[str, Tensor]) -> None:
    for name in estimator.needs:
        if not isinstance(batch.get(name), torch.Tensor):
            shape = _SHAPES.get(name, "[N, S]")
            raise ValueError(f"advantages {estimator.name!r} need the field {name} {shape}, which is missing")
    mask = batch["token_mask"]
    if mask.dim() != 2:
        raise ValueError(f"token_mask must be [N, S], got {list(mask.shape)}")
    shapes = {"[N]": [len(mask)], "[N, S]": list(mask.shape)}
    for name in [*estimator.needs, *(("sample_mask",) if "sample_mask" in batch else ())]:
        field, axes = batch[name], _SHAPES.get(name, "[N, S]")
        valid = list(field.shape) == shapes[axes] if axes in shapes else field.dim() == 2 and len(field) == len(mask)
        kind = "integers" if name in _INTEGERS else "a mask" if name.endswith("_mask") else "floats"
        if kind == "integers":
            valid = valid and not field.is_floating_point() and field.dtype != torch.bool
        elif kind == "floats":
            valid = valid and field.is_floating_point()
        if not valid:
            expected = shapes.get(axes, [len(mask), "K"])
            raise ValueError(f"{name} must be {kind} {axes} = {expected}, got {field.dtype} {list(field.shape)}")
    estimator.check_batch(batch)
    keep, mask = _masks(batch)
    for name in estimator.needs:
        if name in (*_INTEGERS, "token_mask"):
            continue
        infinite = _valid(name, keep, mask) & ~batch[name].isfinite()
        if infinite.any():
            place = infinite.nonzero()[0].tolist()
            raise ValueError(f"{name}{place} = {batch[name][tuple(place)].item()} is not finite")
