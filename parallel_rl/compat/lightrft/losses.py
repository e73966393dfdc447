"""LightRFT's losses of actor, critic and reward model, and the functions and options of its experience maker."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor, nn

from parallel_rl.advantages import AdvantageEstimator
from parallel_rl.advantages.grouped import GRPO
from parallel_rl.advantages.returns import discounted_returns, gae
from parallel_rl.compat.dense import Count, Step, dense_batch, row_mean
from parallel_rl.compat.preference import PairWiseLoss, pairs
from parallel_rl.counts import token_weights
from parallel_rl.experience import pipeline, shaping
from parallel_rl.experience.dynamic_sampling import DynamicSampling
from parallel_rl.experience.failures import FailedSamplesConfig
from parallel_rl.experience.pipeline import kl_controller
from parallel_rl.experience.shaping import RewardShaping
from parallel_rl.functional.kl import KLType, kl_estimate
from parallel_rl.functional.preference import cross_entropy
from parallel_rl.functional.surrogates import CPGD, PPO
from parallel_rl.losses.core.call import share_of
from parallel_rl.losses.policy import PolicyLossFn
from parallel_rl.losses.policy_config import PolicyLossConfig
from parallel_rl.losses.value import clipped_squared_error, squared_error
from parallel_rl.vocab.stats import token_stats

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class PolicyLoss(nn.Module):
    """PPO, or CPGD with `use_cpg_loss`, a mean over all rows of each row's mean over its tokens.

        PPO   −min(ρ·A, clip(ρ, 1 − ε, 1 + ε)·A)
        CPGD  −A·l', l' = min(l, l_old + log(1 + ε)) where A > 0, else max(l, l_old + log(1 − ε)); without the drift term

    As in the origin, use_dapo and high_entropy_token_ratio have no effect (Q14: the library's `PolicyLossConfig` has
    clip-higher and the entropy filter), and `entropy_mask` replaces the action mask, also where it marks padding (Q16). A row
    without a token counts as 0 (Q13: the origin is NaN). Papers: arXiv 1707.06347, 2505.12504 (CPGD), 2506.01939 (mask).
    """

    def __init__(
        self,
        clip_eps: float = 0.2,
        use_dapo: bool = False,
        use_cpg_loss: bool = False,
        high_entropy_token_ratio: float = 0.0,
    ) -> None:
        super().__init__()
        self.clip_eps, self.use_dapo, self.use_cpg_loss = clip_eps, use_dapo, use_cpg_loss
        self.high_entropy_token_ratio = high_entropy_token_ratio
        surrogate = (CPGD if use_cpg_loss else PPO)(clip_eps, clip_eps)
        self.loss_fn = PolicyLossFn(PolicyLossConfig(surrogate, "seq-mean-token-mean"))

    def forward(
        self,
        log_probs: Tensor,
        old_log_probs: Tensor,
        advantages: Tensor,
        action_mask: Tensor | None = None,
        entropy_mask: Tensor | None = None,
        *,
        global_valid_seqs: Count | None = None,
        global_valid_toks: Count | None = None,
        context_parallel_group: ProcessGroup | None = None,
    ) -> Tensor:
        """Return the loss, or with counts of the step the local loss, from [B, A/cp]; mask None: all."""
        mask = action_mask if entropy_mask is None else entropy_mask
        step = Step(global_valid_seqs, global_valid_toks, context_parallel_group)
        fields = {"prev_logprobs": old_log_probs, "advantages": advantages}
        return share_of(self.loss_fn.shares(dense_batch(log_probs, mask, fields, step)).loss, None)


class ValueLoss(nn.Module):
    """½·(V − R)², or with `clip_eps` the larger of this and that of V clipped around V_old.

    A mean over rows of means over tokens; a row without a token counts as 0 (Q13: the origin is NaN).
    """

    def __init__(self, clip_eps: float | None = None) -> None:
        super().__init__()
        self.clip_eps = clip_eps

    def forward(
        self,
        values: Tensor,
        old_values: Tensor,
        returns: Tensor,
        action_mask: Tensor | None = None,
        *,
        global_valid_seqs: Count | None = None,
        global_valid_toks: Count | None = None,
        context_parallel_group: ProcessGroup | None = None,
    ) -> Tensor:
        """Return the loss, or with counts of the step the local loss, from [B, A/cp]; mask None: all."""
        step = Step(global_valid_seqs, global_valid_toks, context_parallel_group)
        batch = dense_batch(values, action_mask, {"old": old_values, "returns": returns}, step)
        error = squared_error(batch.logprobs, batch["returns"])
        if self.clip_eps is not None:
            error = clipped_squared_error(batch.logprobs, batch["returns"], batch["old"], self.clip_eps)
        weights = token_weights("seq-mean-token-mean", batch.tokens_per_sequence, batch.counts)
        return 0.5 * batch.weighted_sum(error, weights)


class LogSigmoidLoss(PairWiseLoss):
    """Bradley-Terry loss of a scalar reward model, the same as `PairWiseLoss`."""


class HPSLoss(nn.Module):
    """Cross-entropy of the scores (r_chosen, r_rejected) with the first, a mean over rows; 0 of none.

    Rewards are [B, 1] or [B] (Q22: the origin crashes). No temperature; the margin has no effect. Paper: arXiv 2303.14420.
    """

    def forward(
        self,
        chosen_reward: Tensor,
        reject_reward: Tensor,
        margin: Tensor | float | None = None,
        *,
        global_valid_seqs: Count | None = None,
        context_parallel_group: ProcessGroup | None = None,
    ) -> Tensor:
        """Return the loss; with `global_valid_seqs` (both rows of each pair count) the local loss."""
        if chosen_reward.dim() == 1:
            chosen_reward, reject_reward = chosen_reward[:, None], reject_reward[:, None]
        scores = torch.cat([chosen_reward, reject_reward], -1)
        first = torch.zeros_like(scores)
        first[..., 0] = 1
        return row_mean(cross_entropy(scores, first), pairs(global_valid_seqs), context_parallel_group)


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


class FixedKLController(pipeline.FixedKLController):
    """Constant KL coefficient."""

    def __init__(self, kl_coef: float) -> None:
        super().__init__(kl_coef)


class AdaptiveKLController(pipeline.AdaptiveKLController):
    """KL coefficient that adapts towards a target KL. Paper: arXiv 1909.08593."""

    def __init__(self, init_kl_coef: float, target: float, horizon: int) -> None:
        super().__init__(init_kl_coef, target, horizon)


@dataclass(frozen=True, kw_only=True)
class ExperienceConfig(RewardShaping):
    """Options of `ExperienceMaker`; rewards are shaped after the KL and before the advantages.

    Attributes:
        samples_per_prompt: n. dynamic_sampling: which prompts stay, by their raw rewards. kl_estimator: of each token's KL.
        advantages: the estimator; its `kl_coefficient` is the KL controller's initial value.
        weight_clip: multiply advantages by min(P/P', weight_clip), for P' of the step's P prompts with unequal rewards.
        mask_truncated: do not train on truncated responses; their rewards stay in the baselines.
        failed_samples: treatment of samples without a finite reward or finite log-probs.
        kl_target, kl_horizon: make the coefficient adaptive, see `AdaptiveKLController`; the controller is updated last.
    """

    samples_per_prompt: int = 8
    dynamic_sampling: DynamicSampling | None = None
    kl_estimator: KLType = "k3"
    advantages: AdvantageEstimator = field(default_factory=GRPO)
    weight_clip: float | None = None
    mask_truncated: bool = False
    failed_samples: FailedSamplesConfig = field(default_factory=FailedSamplesConfig)
    kl_target: float | None = None
    kl_horizon: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.samples_per_prompt < 1:
            raise ValueError(f"samples_per_prompt = {self.samples_per_prompt} must be at least 1")
        if self.weight_clip is not None and not self.weight_clip > 1:
            raise ValueError(f"weight_clip = {self.weight_clip} must be above 1")
        if self.weight_clip is not None and not self.advantages.grouped:
            raise ValueError(
                f"weight_clip = {self.weight_clip} needs a grouped estimator, not {self.advantages.name!r}"
            )
        if "rewards" not in self.advantages.needs:
            for name in ("reward_scale", "overlong", "running_norm", "reward_clip"):
                if getattr(self, name):
                    raise ValueError(f"{name} has no effect: advantages {self.advantages.name!r} read no rewards")
        if self.kl_target is not None and not self.advantages.kl_coefficient:
            raise ValueError(f"kl_target = {self.kl_target} needs advantages.kl_coefficient above 0 to start from")
        if self.failed_samples.timeout is not None:
            raise ValueError(
                f"failed_samples.timeout = {self.failed_samples.timeout:g} has no effect on sources.score; give it to "
                "reward_function(..., timeout=)"
            )
        kl_controller(self.advantages.kl_coefficient, self.kl_target, self.kl_horizon)
