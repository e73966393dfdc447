"""OpenRLHF's policy loss, by its present signature and by that of its article."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor, nn

from parallel_rl.compat.dense import Count, Step, dense_batch
from parallel_rl.compat.openrlhf.losses import mode_of, with_totals
from parallel_rl.functional.ratio import MAX_EXPONENT
from parallel_rl.functional.surrogates import PPO
from parallel_rl.losses.policy import PolicyLossFn
from parallel_rl.losses.policy_config import ImportanceConfig, PolicyLossConfig

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class PolicyLoss(nn.Module):
    """PPO by the article: clipped at 1 ± clip_eps, a mean over all rows of their means over tokens; returns the scalar.

    With any option of the present source (0.11), clip_eps_low and clip_eps_high among them, it is that source's loss: PPO or
    GSPO, with dual clip and correction of the sampler's mismatch, a mean over tokens or over rows that have any. `clip_eps`
    given as the first of several positional arguments is then clip_eps_low.

        ppo   ρ = exp(clamp(l − l_old, ±20)), times ω of l_old − l_rollout where enable_vllm_is_correction
        gspo  ρ = exp(mean_t(l − l_old)), with the correction of l − l_rollout; always a mean over rows

    vllm_is_truncated_threshold: [low, high]. vllm_is_correction_type: "tis" clamps ω into it, which also raises a small ω to
    `low` (Q30); "icepop" takes 0 outside; "seq-mask-tis" drops rows whose geometric mean lies outside and keeps the token
    weights of the others as they are, not clamped (Q30).

    Papers: arXiv 1707.06347, 1912.09729 (dual clip), 2507.18071 (GSPO).
    """

    def __init__(
        self,
        clip_eps: float = 0.2,
        clip_eps_high: float | None = None,
        dual_clip: float | None = None,
        token_level_loss: bool | None = None,
        policy_loss_type: Literal["ppo", "gspo"] | None = None,
        enable_vllm_is_correction: bool | None = None,
        vllm_is_truncated_threshold: list[float] | None = None,
        vllm_is_correction_type: Literal["tis", "icepop", "seq-mask-tis"] | None = None,
        *,
        clip_eps_low: float | None = None,
    ) -> None:
        super().__init__()
        present = (
            clip_eps_low, clip_eps_high, dual_clip, token_level_loss, policy_loss_type, enable_vllm_is_correction,
            vllm_is_truncated_threshold, vllm_is_correction_type,
        )  # fmt: skip
        self.of_article = all(option is None for option in present)
        self.clip_eps_low = clip_eps if clip_eps_low is None else clip_eps_low
        self.clip_eps_high = clip_eps_high if clip_eps_high is not None else clip_eps if self.of_article else 0.2
        policy_loss_type, vllm_is_correction_type = policy_loss_type or "ppo", vllm_is_correction_type or "tis"
        self.dual_clip, self.policy_loss_type = dual_clip, policy_loss_type
        self.token_level_loss = not self.of_article and token_level_loss is not False and policy_loss_type == "ppo"
        self.enable_vllm_is_correction = bool(enable_vllm_is_correction)
        self.vllm_is_truncated_threshold = vllm_is_truncated_threshold
        self.vllm_is_correction_type = vllm_is_correction_type
        for name, value, valid in (
            ("policy_loss_type", policy_loss_type, ("ppo", "gspo")),
            ("vllm_is_correction_type", vllm_is_correction_type, ("tis", "icepop", "seq-mask-tis")),
        ):
            if value not in valid:
                raise ValueError(f"{name} = {value!r} is not valid; choose one of {', '.join(valid)}")
        gspo = policy_loss_type == "gspo"
        self.loss_fn = PolicyLossFn(
            PolicyLossConfig(
                PPO(self.clip_eps_low, self.clip_eps_high, dual_clip),
                mode_of(self.token_level_loss),
                ratio_level="sequence-mean" if gspo else "token",
                log_ratio_clamp=None if gspo or self.of_article else 20.0,
                importance=self._importance() if enable_vllm_is_correction and not gspo else None,
            )
        )

    def _importance(self) -> ImportanceConfig:
        if self.vllm_is_truncated_threshold is None:
            raise ValueError("enable_vllm_is_correction = True needs vllm_is_truncated_threshold = [low, high]")
        low, high = self.vllm_is_truncated_threshold
        if low <= 0 and high == math.inf:
            return ImportanceConfig()
        return ImportanceConfig(mode=self.vllm_is_correction_type, low=max(low, 0.0), high=high)

    def forward(
        self,
        log_probs: Tensor,
        old_log_probs: Tensor,
        advantages: Tensor,
        action_mask: Tensor | None = None,
        rollout_log_probs: Tensor | None = None,
        dp_size: float = 1,
        batch_num_tokens: Count | None = None,
        global_batch_size: Count | None = None,
        *,
        global_valid_seqs: Count | None = None,
        global_valid_toks: Count | None = None,
        context_parallel_group: ProcessGroup | None = None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None] | Tensor:
        """(loss, clip_ratio, ppo_kl, vllm_kl); with the counts of the step all of them are shares, which add up.

        clip_ratio: fraction of tokens where the clip holds, without the dual one. ppo_kl, vllm_kl: means of l_old − l and of
        l_rollout − l_old, the latter None without the correction (and for GSPO).

        Args:
            log_probs, ...: [B, A/cp]. action_mask: [B, A/cp], None is all tokens. dp_size, ...: see `aggregate_loss`.

        Raises:
            ValueError: the correction without `rollout_log_probs`.
        """
        step = Step(global_valid_seqs, global_valid_toks, context_parallel_group)
        fields = {"advantages": advantages, "prev_logprobs": old_log_probs, "old_logprobs": old_log_probs}
        if self.enable_vllm_is_correction:
            if rollout_log_probs is None:
                raise ValueError("enable_vllm_is_correction = True needs rollout_log_probs")
            fields["generation_logprobs"] = fields["rollout_logprobs"] = rollout_log_probs
            if self.policy_loss_type == "gspo":
                fields["prev_logprobs"] = rollout_log_probs
            elif self.vllm_is_correction_type == "tis":  # an overflowing ω is clamped as well; the library's would be 0
                fields["generation_logprobs"] = torch.maximum(rollout_log_probs, old_log_probs - MAX_EXPONENT)
        batch = dense_batch(log_probs, action_mask, fields, step, count_empty=self.of_article)
        totals = (dp_size, batch_num_tokens, global_batch_size)
        whole, factor = with_totals(batch, totals, self.token_level_loss, step)
        shares = self.loss_fn.shares(whole)
        loss = shares.loss * factor
        if self.of_article:
            return loss
        with torch.no_grad():
            plain = shares.terms.ratio * batch["advantages"]
            clipped = shares.terms.ratio.clamp(1 - self.clip_eps_low, 1 + self.clip_eps_high) * batch["advantages"]
            means = [clipped < plain, batch["old_logprobs"] - batch.logprobs]
            if self.enable_vllm_is_correction and self.policy_loss_type == "ppo":
                means.append(batch["rollout_logprobs"] - batch["old_logprobs"])
            found = [batch.token_mean(mean).value.to(loss.dtype) for mean in means]
        return loss, found[0], found[1], found[2] if len(found) > 2 else None
