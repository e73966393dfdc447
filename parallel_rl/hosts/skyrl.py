"""Losses as policy losses of SkyRL (its source of August 2026), in its registry as `parallel_rl:RECIPE`.

SkyRL's hidden factor: it divides the advantages beforehand by what loss_reduction averages over, so a policy loss returns a
plain sum; the worker multiplies it by micro-batches and data ranks. SkyRL adds KL and entropy itself.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from parallel_rl.hosts.function_loss import FunctionLoss, on_rows
from parallel_rl.hosts.scaling import (
    Setting,
    check_fits,
    check_settings,
    floats,
    losses_of,
    read_setting,
    scales_with_advantages,
)
from parallel_rl.losses.core.base import LossFn
from parallel_rl.losses.policy import PolicyLoss
from parallel_rl.metrics import Metric, Metrics

_CLIPS = (
    Setting("eps_clip_low", 0.2, ("clip_low",)),
    Setting("eps_clip_high", 0.2, ("clip_high",)),
    Setting("clip_ratio_c", 3.0, ("dual_clip",)),
)
#: surrogates whose bounds SkyRL keeps elsewhere
_OF_SURROGATES = {
    "cispo": (
        Setting("cispo.cispo_eps_clip_low", 0.0, ("clip_low",)), Setting("cispo.cispo_eps_clip_high", 5.0, ("clip_high",)),
    ),
    "sapo": (Setting("sapo.tau_pos", 1.0, ("tau_pos",)), Setting("sapo.tau_neg", 1.05, ("tau_neg",))),
    "dppo": (Setting("dppo.delta_low", 0.2, ("low",)), Setting("dppo.delta_high", 0.2, ("high",))),
}  # fmt: skip
_CORRECTIONS = (
    "off_policy_correction.tis_ratio_type", "off_policy_correction.sequence_mask_metric",
    "off_policy_correction.outlier_token_is_threshold_low", "off_policy_correction.outlier_token_is_threshold_high",
    "off_policy_correction.token_mask_is_threshold_low", "off_policy_correction.token_mask_is_threshold_high", "use_tis",
)  # fmt: skip
_FIELDS = ("advantages", "prev_logprobs", "generation_logprobs")


def register(*recipes: str) -> list[str]:
    """Register recipes' losses in SkyRL and return the names, for `trainer.algorithm.policy_loss_type`.

    Averaging is left to SkyRL's loss_reduction, KL and entropy bonus to use_kl_loss and use_entropy_loss. ValueError for a loss
    that SkyRL cannot feed, or a missing registry.
    """
    try:
        host = importlib.import_module("skyrl.backends.skyrl_train.utils.ppo_utils").PolicyLossRegistry
    except ImportError as error:
        raise ValueError(f"SkyRL is not installed ({error}); supported is its source of August 2026") from None
    except AttributeError:
        raise ValueError("this SkyRL has no PolicyLossRegistry; supported is its source of August 2026") from None
    names = []
    for name, loss_fn in losses_of(recipes, kl=None, entropy_bonus=0.0, aggregation="token-mean", max_length=None):
        host.register(name, policy_loss(loss_fn))
        names.append(name)
    return names


def policy_loss(loss_fn: LossFn) -> Callable[..., tuple[Tensor, dict[str, float]]]:
    """Wrap a loss in SkyRL's call (log_probs, old_log_probs, advantages, config, loss_mask, ...).

    >>> from parallel_rl import PolicyLossFn
    >>> call = policy_loss(PolicyLossFn({"surrogate": {"name": "reinforce"}}))
    >>> call(torch.tensor([[-1.0, -2.0]]), None, torch.full((1, 2), 0.25), None)[0].item()
    0.75

    Raises:
        ValueError: a loss that SkyRL cannot feed, with another mean than over tokens, or that does not scale with its
            advantages. In a call: eps_clip_low, eps_clip_high, clip_ratio_c, or a bound in the sections cispo, sapo and dppo
            differs from the loss's own (SkyRL's defaults pass); off_policy_correction is on.
    """
    check_fits("SkyRL", loss_fn, _FIELDS)
    name = type(loss_fn).__name__
    if not isinstance(loss_fn, PolicyLoss) or loss_fn.policy.aggregation != "token-mean":
        raise ValueError(
            f"{name} must be a policy loss with aggregation 'token-mean', which is a sum here: SkyRL's loss_reduction averages"
        )
    if not scales_with_advantages(loss_fn):
        raise ValueError(
            f"{name} in this configuration does not scale with its advantages, in which SkyRL hides what it divides by"
        )

    def call(
        log_probs: Tensor,
        old_log_probs: Tensor,
        advantages: Tensor,
        config: object,
        loss_mask: Tensor | None = None,
        rollout_logprobs: Tensor | None = None,
    ) -> tuple[Tensor, dict[str, float]]:
        surrogate = loss_fn.policy.surrogate.name
        check_settings("SkyRL", loss_fn, config, _OF_SURROGATES.get(surrogate, _CLIPS))
        _check_correction(config)
        mask = torch.ones_like(log_probs, dtype=torch.int64) if loss_mask is None else loss_mask
        values = {"advantages": advantages, "prev_logprobs": old_log_probs, "generation_logprobs": rollout_logprobs}
        fields = {field: x for field, x in values.items() if field in loss_fn.requirements.names and x is not None}
        lacking = [field for field in loss_fn.requirements.names if field not in fields]
        if lacking:
            raise ValueError(f"{name} reads {', '.join(lacking)}, which this step of SkyRL does not have")
        unit = torch.ones((), device=log_probs.device)
        loss, metrics = loss_fn.from_logprobs(
            log_probs, data={"response_mask": mask, **fields}, global_valid_seqs=unit, global_valid_toks=unit
        )
        tokens = (mask != 0).sum().clamp(min=1)
        means = {
            key: Metric("share", metrics[key] / tokens if metrics.divided_by[key] == "tokens" else metrics[key])
            for key in metrics
            if key not in ("loss", "policy_loss") and metrics.parts(key).kind in ("share", "ratio")
        }
        return loss, floats(Metrics(means))

    return call


def _check_correction(config: object) -> None:
    for key in _CORRECTIONS:
        value = read_setting(config, key)
        if value not in (None, False, "null"):
            raise ValueError(
                f"{key} = {value!r} is applied by SkyRL's own losses alone; leave it out, and give the loss importance or "
                "rejection"
            )


def skyrl(policy_loss: Callable[..., tuple], config: object = None) -> FunctionLoss:
    """Adapt a SkyRL policy loss: (log_probs, old_log_probs, advantages, config, mask, ...) → (loss, ...).

    The advantages are divided by the step's tokens, as for loss_reduction "token_mean". SkyRL multiplies by micro-batches and
    data ranks, DDP and Megatron divide by them; both are left out here.

    >>> skyrl(lambda new, old, advantages, config, mask, rollout: (-(advantages * new * mask).sum(), {})).fields
    ('advantages', 'prev_logprobs')
    """

    def rows(logprobs: Tensor, mask: Tensor, data: Mapping[str, Tensor], seqs: Tensor, toks: Tensor) -> Tensor:
        old, advantages = (torch.where(mask, data[name], 0) for name in ("prev_logprobs", "advantages"))
        loss: Tensor = policy_loss(logprobs, old, advantages / toks, config, mask.to(logprobs), None)[0]
        return loss

    rows.__name__ = getattr(policy_loss, "__name__", "skyrl")
    return on_rows(rows, ("advantages", "prev_logprobs"))


def through(loss_fn: LossFn) -> FunctionLoss:
    """Run a loss of this library in the framework's call, as a subject of the law."""
    return skyrl(policy_loss(loss_fn))
