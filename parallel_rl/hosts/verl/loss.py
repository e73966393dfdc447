"""Losses as policy losses of verl (0.9.1), in its registry as `parallel_rl:RECIPE`.

verl's hidden factors: a rank's loss is multiplied by the number of data ranks, which FSDP and DDP divide by; verl's Megatron
engine multiplies by the micro-batches. verl adds KL and entropy by its own config.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import cast

import torch
from torch import Tensor

from parallel_rl.hosts.function_loss import FunctionLoss, on_rows
from parallel_rl.hosts.scaling import (
    Setting,
    averaged,
    check_fits,
    check_learns,
    check_settings,
    floats,
    losses_of,
    read_setting,
    scales_with_advantages,
    unit_of,
)
from parallel_rl.hosts.verl.keys import AGGREGATIONS
from parallel_rl.losses.core.base import LossFn
from parallel_rl.losses.policy import PolicyLoss
from parallel_rl.metrics import Metric, Metrics
from parallel_rl.validation import checks_values

_FIELDS = ("advantages", "prev_logprobs")
_SETTINGS = (
    Setting("clip_ratio_low", 0.2, ("clip_low", "low")),
    Setting("clip_ratio_high", 0.2, ("clip_high", "high")),
    Setting("clip_ratio_c", 3.0, ("dual_clip", "ratio_max")),
    Setting("tau_pos", 1.0, ("tau_pos",)),
    Setting("tau_neg", 1.05, ("tau_neg",)),
)
_COUNTS = ("dp_size", "batch_num_tokens", "global_batch_size")


def register(*recipes: str) -> list[str]:
    """Register recipes' losses in verl's registry, and return their names there.

    In a module of yours that every worker imports (VERL_USE_EXTERNAL_MODULES=my_losses):

        from parallel_rl.hosts import verl
        verl.register("dapo", "gspo")

    and in verl's config `actor.policy_loss.loss_mode: parallel_rl:dapo`. KL and entropy bonus are left to verl's use_kl_loss
    and entropy_coeff. ValueError for an unknown recipe, a loss that verl cannot feed, or a missing registry.
    """
    try:
        host = importlib.import_module("verl.trainer.ppo.core_algos").register_policy_loss
    except ImportError as error:
        raise ValueError(f"verl is not installed ({error}); supported is 0.9.1") from None
    except AttributeError:
        raise ValueError("this verl has no registry of policy losses; supported is 0.9.1") from None
    names = []
    for name, loss_fn in losses_of(recipes, kl=None, entropy_bonus=0.0):
        host(name)(policy_loss(loss_fn))
        names.append(name)
    return names


def policy_loss(loss_fn: LossFn) -> Callable[..., tuple[Tensor, dict[str, float]]]:
    """Wrap a loss in verl's call (old_log_prob, log_prob, advantages, response_mask, ...).

    >>> from types import SimpleNamespace
    >>> from parallel_rl import PolicyLossFn
    >>> call = policy_loss(PolicyLossFn({"surrogate": {"name": "reinforce"}}))
    >>> config = SimpleNamespace(global_batch_info={"dp_size": 2, "batch_num_tokens": 4, "global_batch_size": 2})
    >>> call(None, torch.tensor([[-1.0, -2.0]]), torch.ones(1, 2), torch.ones(1, 2), "token-mean", config)[0].item()
    1.5

    Raises:
        ValueError: a loss that verl cannot feed, or that ignores the advantages. In a call: loss_agg_mode, clip_ratio_low,
            clip_ratio_high, clip_ratio_c, tau_pos or tau_neg differs from the loss's own (verl's defaults of the last five
            pass); no counts of the step, or counts below the call's own; rollout_is_weights that are negative, or given to a
            loss that does not scale with its advantages.
    """
    check_fits("verl", loss_fn, _FIELDS)
    check_learns("verl", loss_fn)
    unit, name = unit_of(loss_fn), type(loss_fn).__name__

    def call(
        old_log_prob: Tensor,
        log_prob: Tensor,
        advantages: Tensor,
        response_mask: Tensor,
        loss_agg_mode: str = "token-mean",
        config: object = None,
        rollout_is_weights: Tensor | None = None,
    ) -> tuple[Tensor, dict[str, float]]:
        info = _counts(config, response_mask)
        check_settings("verl", loss_fn, _with_one_clip(config), _SETTINGS)
        _check_aggregation(loss_fn, unit, loss_agg_mode, info.get("loss_scale_factor") or response_mask.shape[-1])
        if rollout_is_weights is not None:
            if not scales_with_advantages(loss_fn):
                raise ValueError(
                    f"rollout_is_weights multiply terms that scale with the advantages; those of {name} do not"
                )
            _check_weights(rollout_is_weights, response_mask)
            advantages = torch.where(response_mask != 0, advantages * rollout_is_weights, 0)
        fields = {"advantages": advantages, "prev_logprobs": old_log_prob}
        loss, metrics = loss_fn.from_logprobs(
            log_prob,
            data={"response_mask": response_mask, **{field: fields[field] for field in loss_fn.requirements.names}},
            global_valid_seqs=torch.as_tensor(info["global_batch_size"]).clamp(min=1),
            global_valid_toks=torch.as_tensor(info["batch_num_tokens"]).clamp(min=1),
        )
        return averaged(loss, int(info["dp_size"])), floats(_local_means(metrics, info, response_mask))

    return call


def _with_one_clip(config: object) -> dict[str, object]:
    """Read the numbers of `_SETTINGS`; a side of the clip that is None is clip_ratio."""
    values = {key: read_setting(config, key) for key, *_ in _SETTINGS}
    both = read_setting(config, "clip_ratio")
    return {
        key: both if value is None and key in ("clip_ratio_low", "clip_ratio_high") else value
        for key, value in values.items()
    }


def _check_weights(weights: Tensor, mask: Tensor) -> None:
    if weights.shape != mask.shape:
        raise ValueError(f"rollout_is_weights has shape {list(weights.shape)}; response_mask has {list(mask.shape)}")
    if checks_values(weights):
        wrong = ~((weights >= 0) & weights.isfinite()) & (mask != 0)
        if bool(wrong.any()):
            at = wrong.nonzero()[0].tolist()
            raise ValueError(
                f"rollout_is_weights = {float(weights[tuple(at)]):g} at {at} must be at least 0 and finite"
            )


def _counts(config: object, mask: Tensor) -> Mapping[str, int]:
    info = getattr(config, "global_batch_info", None)
    if not isinstance(info, Mapping) or any(info.get(name) is None for name in _COUNTS):
        raise ValueError(
            f"config.global_batch_info must hold {', '.join(_COUNTS)} of the whole step, as verl's ppo_loss fills them in; got "
            f"{info!r}"
        )
    if checks_values(mask):
        for name, local in (("batch_num_tokens", (mask != 0).sum()), ("global_batch_size", (mask != 0).any(1).sum())):
            if checks_values(torch.as_tensor(info[name])) and info[name] < local:
                raise ValueError(
                    f"{name} = {int(info[name])} of config.global_batch_info is below the {int(local)} of this call alone; it "
                    "counts the whole step"
                )
    return info


def _check_aggregation(loss_fn: LossFn, unit: str | None, mode: str, length: float) -> None:
    wanted = AGGREGATIONS.get(mode)
    if not isinstance(loss_fn, PolicyLoss):
        if mode not in AGGREGATIONS or {"token-mean": "tokens", "token-sum": None}.get(mode, "sequences") != unit:
            raise ValueError(
                f"loss_agg_mode = {mode!r}, but {type(loss_fn).__name__} is divided by {unit or 'neither count, or by both'}"
            )
        return
    policy = loss_fn.policy
    if wanted != policy.aggregation:
        theirs = next((name for name, ours in AGGREGATIONS.items() if ours == policy.aggregation), None)
        raise ValueError(
            f"loss_agg_mode = {mode!r}, but the loss has aggregation {policy.aggregation!r}; "
            + ("verl has none like it" if theirs is None else f"set actor.loss_agg_mode={theirs}")
        )
    if wanted == "constant-length" and cast(int, policy.max_length) != length:
        raise ValueError(
            f"the loss divides by max_length = {policy.max_length}, verl by {length:g}: "
            "set actor.loss_scale_factor or max_length"
        )


def _local_means(metrics: Metrics, info: Mapping[str, int], mask: Tensor) -> Metrics:
    """Turn metrics into means over this micro-batch, which verl averages over micro-batches."""
    local_counts = {"tokens": mask.sum().clamp(min=1), "sequences": torch.tensor(len(mask))}
    step_counts = {"tokens": info["batch_num_tokens"], "sequences": info["global_batch_size"]}
    means = {}
    for name in metrics:
        part, per = metrics.parts(name), metrics.divided_by[name]
        if part.kind == "share" and per in local_counts:
            means[f"actor/{name}"] = Metric("share", metrics[name] * step_counts[per] / local_counts[per])
        elif part.denominator is not None:
            means[f"actor/{name}"] = Metric("share", metrics[name])
    return Metrics(means)


_VERL = {"constant-length": "seq-mean-token-sum-norm"}


def verl(policy_loss: Callable[..., tuple], config: object = None, loss_agg_mode: str = "token-mean") -> FunctionLoss:
    """Adapt a verl policy loss: (old_log_prob, log_prob, advantages, response_mask, ...) → (loss, ...).

    `config.global_batch_info` is filled in as by verl's workers: dp_size 1, batch_num_tokens and global_batch_size of the whole
    step. The factor that verl multiplies and DDP divides by, the number of data ranks, is left out.

    >>> def loss(old, new, advantages, mask, mode, config):
    ...     return -(advantages * new * mask).sum() / config.global_batch_info["batch_num_tokens"], 0.0
    >>> verl(loss).fields
    ('advantages', 'prev_logprobs')
    """
    settings = SimpleNamespace(**vars(config)) if config is not None else SimpleNamespace()

    def rows(logprobs: Tensor, mask: Tensor, data: Mapping[str, Tensor], seqs: Tensor, toks: Tensor) -> Tensor:
        old, advantages = (torch.where(mask, data[name], 0) for name in ("prev_logprobs", "advantages"))
        counts = {"dp_size": 1, "batch_num_tokens": toks, "global_batch_size": seqs}
        settings.global_batch_info = counts
        return policy_loss(old, logprobs, advantages, mask.to(logprobs), loss_agg_mode, settings)[0]

    rows.__name__ = getattr(policy_loss, "__name__", "verl")
    return on_rows(rows, ("advantages", "prev_logprobs"))


def through(loss_fn: LossFn) -> FunctionLoss:
    """Run a loss of this library in the framework's call, as a subject of the law."""
    mode, length = "token-mean", None
    if isinstance(loss_fn, PolicyLoss):
        mode = _VERL.get(loss_fn.policy.aggregation, loss_fn.policy.aggregation)
        length = loss_fn.policy.max_length
    call = policy_loss(loss_fn)

    def with_length(*arguments: object) -> tuple[Tensor, dict[str, float]]:
        config: SimpleNamespace = arguments[-1]  # type: ignore[assignment]
        config.global_batch_info["loss_scale_factor"] = length
        return call(*arguments)

    return verl(with_length, None, mode)
