"""The pure functions of LightRFT's experience maker."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from parallel_rl.advantages.returns import discounted_returns, gae
from parallel_rl.experience import kl_control, shaping
from parallel_rl.functional.kl import kl_estimate
from parallel_rl.vocab.stats import token_stats


def masked_mean(tensor: Tensor, mask: Tensor | None, dim: int | None = None) -> Tensor:
    """Average over the mask (None: all), along `dim` or over all; an empty mask gives 0 (origin: NaN)."""
    mask = torch.ones_like(tensor) if mask is None else mask
    total = torch.where(mask != 0, tensor * mask, 0)
    count = mask.expand_as(total)
    if dim is None:
        return total.sum() / torch.where(count.sum() == 0, 1, count.sum())
    return total.sum(dim) / torch.where(count.sum(dim) == 0, 1, count.sum(dim))


def compute_approx_kl(
    log_probs: Tensor,
    log_probs_base: Tensor,
    action_mask: Tensor | None = None,
    kl_estimator: Literal["k1", "k2", "k3"] = "k1",
) -> Tensor:
    """Estimate KL(π ‖ π_base) of each token by k1, k2 or k3, in float32, not clamped, 0 where masked."""
    if kl_estimator not in ("k1", "k2", "k3"):
        raise ValueError(f"kl_estimator = {kl_estimator!r} is not valid; choose k1, k2 or k3")
    policy, base = log_probs.float(), log_probs_base.float()
    if action_mask is not None:
        keep = action_mask.bool()
        policy, base = torch.where(keep, policy, 0), torch.where(keep, base, 0)
    if kl_estimator == "k3":  # in the origin's order, with its rounding of numbers around 1
        d = base - policy
        return d.exp() - 1 - d
    return kl_estimate(policy, base, kl_estimator)


def compute_reward(
    r: Tensor,
    kl_coef: float,
    kl: Tensor | Sequence[Tensor],
    action_mask: Tensor | None = None,
    num_actions: Sequence[int] | None = None,
    reward_clip_range: tuple[float, float] | None = None,
) -> Tensor | list[Tensor]:
    """Compute −kl_coef·kl of each token, plus the reward, clipped, at each row's last action; like `kl`.

    r: [B]. kl_coef: below 0 it counts as 0. kl: [B, A] with `action_mask`, or a list of [n_i] with `num_actions`. A row without
    an action has its reward in the last column; masked tokens keep −kl_coef·kl.
    """
    clip_range = reward_clip_range or None
    shaped = shaping.compute_reward(r, kl_coef, kl, action_mask, num_actions=num_actions, clip_range=clip_range)
    if isinstance(shaped, list) or not isinstance(kl, Tensor) or action_mask is None:
        return shaped
    return torch.where(action_mask.bool() | ~kl.isfinite(), shaped, shaped - max(kl_coef, 0.0) * kl).to(kl.dtype)


def clip_filter_like_weight_func(
    rewards: Tensor, clip_filter_like_weight_clip_eps: float = 3.0, lamda: float = 1.0
) -> Tensor:
    return shaping.clip_filter_like_weight(rewards, clip_filter_like_weight_clip_eps, lamda)


def entropy_from_logits(logits: Tensor) -> Tensor:
    stats = token_stats(logits, torch.zeros(logits.shape[:-1], dtype=torch.int64, device=logits.device))
    assert stats.entropy is not None
    return stats.entropy


def log_probs_from_logits(logits: Tensor, labels: Tensor, disable_logprobs_flashattn: bool = False) -> Tensor:
    """Compute labels' log-probs [...] in float32 or wider (Q56: bf16 there)."""
    return token_stats(logits, labels, entropy=False).logprobs


def create_high_entropy_mask(entropy: Tensor, action_mask: Tensor | None, high_entropy_ratio: float = 0.2) -> Tensor:
    """Mark each row's max(1, ⌊n·ratio⌋) tokens of highest entropy, n its valid ones: [B, A] float.

    A ratio outside (0, 1) returns the action mask. Masked tokens compete with entropy 0 (also for NaN) and win over a valid one
    below 0 (Q16); ties go to the first. ValueError for shapes other than [B, A].
    """
    if not 0.0 < high_entropy_ratio < 1.0:
        return torch.ones_like(entropy, dtype=torch.float32) if action_mask is None else action_mask.clone()
    mask = torch.ones_like(entropy, dtype=torch.bool) if action_mask is None else action_mask.bool()
    if entropy.dim() != 2 or mask.shape != entropy.shape:
        raise ValueError(f"entropy {list(entropy.shape)} and action_mask {list(mask.shape)} must both be [B, A]")
    valid = mask.sum(1)
    counts = torch.where(valid > 0, (valid.double() * high_entropy_ratio).long().clamp(min=1), 0)
    order = torch.where(mask, entropy, 0).argsort(dim=1, descending=True, stable=True)
    return (order.argsort(dim=1) < counts[:, None]).float()


def get_cumulative_returns(
    rewards: Tensor | list[Tensor], action_mask: Tensor | None, gamma: float
) -> Tensor | list[Tensor]:
    """Sum discounted rewards from each action on, [B, A] or a list of [n_i]; masked ones count as 0."""
    if isinstance(rewards, list):
        return [get_cumulative_returns(row[None], None, gamma)[0] for row in rewards]
    masked = _masked(rewards, action_mask)
    return discounted_returns(masked, torch.ones_like(masked), gamma)


def get_advantages_and_returns(
    values: Tensor | list[Tensor],
    rewards: Tensor | list[Tensor],
    action_mask: Tensor | None,
    gamma: float,
    lambd: float,
) -> tuple[Tensor, Tensor] | tuple[list[Tensor], list[Tensor]]:
    """Compute GAE advantages and returns, [B, A] or lists of [n_i]; masked inputs count as 0."""
    if isinstance(values, list) or isinstance(rewards, list):
        parts = [
            get_advantages_and_returns(v[None], r[None], None, gamma, lambd)
            for v, r in zip(values, rewards, strict=True)
        ]
        return [advantages[0] for advantages, _ in parts], [returns[0] for _, returns in parts]
    values, rewards = _masked(values, action_mask), _masked(rewards, action_mask)
    estimated = gae(rewards, values, torch.ones_like(rewards), gamma, lambd)
    return estimated.advantages, estimated.returns


def _masked(x: Tensor, mask: Tensor | None) -> Tensor:
    return x if mask is None else torch.where(mask.bool(), x, 0)


def unpacking_samples(values: Tensor, packed_seqlens: list[int]) -> list[Tensor]:
    """Split one packed row, [1, T] or [T], into its sequences."""
    starts = [sum(packed_seqlens[:index]) for index in range(len(packed_seqlens))]
    row = values.squeeze(0)
    return [row[start : start + length] for start, length in zip(starts, packed_seqlens, strict=True)]


class FixedKLController(kl_control.FixedKLController):
    """Constant KL coefficient."""

    def __init__(self, kl_coef: float) -> None:
        super().__init__(kl_coef)


class AdaptiveKLController(kl_control.AdaptiveKLController):
    """KL coefficient that adapts towards a target KL. Paper: arXiv 1909.08593."""

    def __init__(self, init_kl_coef: float, target: float, horizon: int) -> None:
        super().__init__(init_kl_coef, target, horizon)
