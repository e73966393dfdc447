"""OpenRLHF's policy loss, and its correction of the mismatch between trainer and sampler."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor, nn

from parallel_rl.compat.dense import Count, Step, dense_batch, with_field
from parallel_rl.compat.openrlhf.losses import mode_of, with_totals
from parallel_rl.config.strict import nearest
from parallel_rl.functional.ratio import MAX_EXPONENT
from parallel_rl.functional.surrogates import PPO
from parallel_rl.losses.core.batch import TokenBatch
from parallel_rl.losses.core.call import share_of
from parallel_rl.losses.core.measures import sequence_mean
from parallel_rl.losses.off_policy_config import ImportanceConfig
from parallel_rl.losses.policy import PolicyLossFn
from parallel_rl.losses.policy_config import PolicyLossConfig

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

Level = Literal["off", "token", "seq"]
Mode = Literal["mask", "clip"]
Gating = Literal["ratio", "binary_kl", "tv"]

_CHOICES = {"level": ("off", "token", "seq"), "mode": ("mask", "clip"), "gating": ("ratio", "binary_kl", "tv")}


@dataclass(frozen=True)
class Correction:
    """Treatment of units (tokens or rows) whose statistic of ω = π_old/π_rollout is outside [low, high].

    level: the unit; "off" corrects nothing. gating: "ratio" is ω, of a row its geometric mean; "binary_kl" and "tv" are
    divergences of the two Bernoulli distributions of the sampled token, of a row their mean. mode: "mask" drops units outside
    and keeps the others' ω unclamped; "clip" clamps each token's ω, and also raises small ones to `low` (Q30).
    """

    level: Level = "off"
    mode: Mode = "mask"
    gating: Gating = "ratio"
    threshold: Sequence[float] = (0.5, 5.0)

    def __post_init__(self) -> None:
        for name, valid in _CHOICES.items():
            if getattr(self, name) not in valid:
                value = getattr(self, name)
                raise ValueError(f"is_correction_{name} = {value!r} is not valid; {nearest(str(value), valid)}")
        if len(self.threshold) != 2 or not self.low <= self.high:
            raise ValueError(f"is_correction_threshold = {list(self.threshold)} must be [low, high] with low ≤ high")
        if self.mode == "clip" and (self.level == "seq" or self.gating != "ratio"):
            raise ValueError(
                "is_correction_mode = 'clip' clamps the ratio of each token: it needs is_correction_level = 'token' and "
                f"is_correction_gating = 'ratio', got {self.level!r} and {self.gating!r}"
            )
        if self.gating != "ratio" and self.level != "off" and self.low > 0:
            raise ValueError(
                f"is_correction_gating = {self.gating!r} has an upper bound only: is_correction_threshold = "
                f"{list(self.threshold)} must begin with 0"
            )

    @property
    def low(self) -> float:
        return self.threshold[0]

    @property
    def high(self) -> float:
        return self.threshold[1]

    @property
    def importance(self) -> ImportanceConfig:
        """Return ω as the library's importance weight; `filtered` applies "mask"."""
        if self.mode == "mask" or (self.low <= 0 and self.high == math.inf):
            return ImportanceConfig()
        return ImportanceConfig(mode="tis", low=max(self.low, 0.0), high=self.high)

    @torch.no_grad()
    def filtered(self, batch: TokenBatch) -> tuple[Tensor, Tensor]:
        """Mark [T_local] tokens outside the band, alone or by non-empty row; return their local fraction too."""
        old, rollout = batch["old_logprobs"], batch["rollout_logprobs"]
        statistic = old - rollout if self.gating == "ratio" else _divergence(old, rollout, self.gating)
        by_row = self.level == "seq"
        statistic = batch.segment_mean(statistic) if by_row else statistic
        statistic = statistic.exp() if self.gating == "ratio" else statistic
        outside = (statistic < self.low) | (statistic > self.high)
        if not by_row:
            return outside, batch.token_mean(outside).value
        fraction = sequence_mean(batch, outside, batch.tokens_per_sequence > 0)
        return batch.expand(outside), fraction.value


def _divergence(old: Tensor, rollout: Tensor, gating: Gating) -> Tensor:
    """Compute a divergence of the sampled token's Bernoullis, probabilities within [1e-6, 1 − 1e-6]."""
    p, q = (x.exp().clamp(1e-6, 1 - 1e-6) for x in (rollout, old))
    if gating == "tv":
        return (p - q).abs()
    return p * (p / q).log() + (1 - p) * ((1 - p) / (1 - q)).log()


Result = tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]


class PolicyLoss(nn.Module):
    """PPO or GSPO with dual clip and off-policy correction, a mean over tokens or over non-empty rows.

        ppo   ρ = exp(clamp(l − l_old, ±20)), times ω of l_old − l_rollout where is_correction_level is not "off"
        gspo  ρ = exp(mean_t(l − l_old)), with a correction of l − l_rollout; always a mean over rows

    is_correction_mode, is_correction_gating, is_correction_threshold: see `Correction`; for PPO's correction only.
    Papers: arXiv 1707.06347, 1912.09729 (dual clip), 2507.18071 (GSPO).
    """

    def __init__(
        self,
        clip_eps_low: float = 0.2,
        clip_eps_high: float = 0.2,
        dual_clip: float | None = None,
        token_level_loss: bool = True,
        policy_loss_type: Literal["ppo", "gspo"] = "ppo",
        is_correction_level: Level = "off",
        is_correction_mode: Mode = "mask",
        is_correction_gating: Gating = "ratio",
        is_correction_threshold: Sequence[float] = (0.5, 5.0),
    ) -> None:
        super().__init__()
        if policy_loss_type not in ("ppo", "gspo"):
            raise ValueError(
                f"policy_loss_type = {policy_loss_type!r} is not valid; {nearest(policy_loss_type, ['ppo', 'gspo'])}"
            )
        gspo = policy_loss_type == "gspo"
        self.clip_eps_low, self.clip_eps_high, self.dual_clip = clip_eps_low, clip_eps_high, dual_clip
        self.token_level_loss, self.policy_loss_type = token_level_loss and not gspo, policy_loss_type
        self.is_correction_level, self.is_correction_mode = is_correction_level, is_correction_mode
        self.is_correction_gating, self.is_correction_threshold = is_correction_gating, is_correction_threshold
        correction = Correction(is_correction_level, is_correction_mode, is_correction_gating, is_correction_threshold)
        self.correction = None if gspo or is_correction_level == "off" else correction
        self.loss_fn = PolicyLossFn(
            PolicyLossConfig(
                PPO(clip_eps_low, clip_eps_high, dual_clip),
                mode_of(self.token_level_loss),
                ratio_level="sequence-mean" if gspo else "token",
                log_ratio_clamp=None if gspo else 20.0,
                importance=None if self.correction is None else self.correction.importance,
            )
        )

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
    ) -> Result:
        """Return (loss, clip_ratio, ppo_kl, vllm_kl, is_filter_ratio); with counts this rank's parts.

        clip_ratio: fraction of tokens that are clipped, without the dual clip. ppo_kl, vllm_kl: means of l_old − l and of
        l_rollout − l_old. is_filter_ratio: fraction of units outside the threshold, tokens or non-empty rows. The last two
        are None without a correction, and for GSPO.

        Args:
            log_probs, ...: [B, A/cp]. action_mask: [B, A/cp], None: all tokens. dp_size, ...: see `aggregate_loss`.

        Raises:
            ValueError: a correction without `rollout_log_probs`.
        """
        step = Step(global_valid_seqs, global_valid_toks, context_parallel_group)
        batch = self._batch((log_probs, old_log_probs, advantages, rollout_log_probs), action_mask, step)
        ratios: tuple[Tensor | None, Tensor | None] = (None, None)
        if self.correction is not None:
            outside, fraction = self.correction.filtered(batch)
            ratios = batch.token_mean(batch["rollout_logprobs"] - batch["old_logprobs"]).value, fraction
            if self.correction.mode == "mask":  # ω = 0 there
                batch = with_field(
                    batch, "generation_logprobs", torch.where(outside, torch.inf, batch["rollout_logprobs"])
                )
        counted, factor = with_totals(
            batch, (dp_size, batch_num_tokens, global_batch_size), self.token_level_loss, step
        )
        shares = self.loss_fn.shares(counted)
        loss = share_of(shares.loss, None) * factor
        with torch.no_grad():
            plain = shares.terms.ratio * batch["advantages"]
            clipped = shares.terms.ratio.clamp(1 - self.clip_eps_low, 1 + self.clip_eps_high) * batch["advantages"]
            clip_ratio = batch.token_mean(clipped < plain).value
            ppo_kl = batch.token_mean(batch["old_logprobs"] - batch.logprobs).value
        vllm_kl, filtered = (None if x is None else x.to(loss.dtype) for x in ratios)
        return loss, clip_ratio.to(loss.dtype), ppo_kl.to(loss.dtype), vllm_kl, filtered

    def _batch(
        self, tensors: tuple[Tensor, Tensor, Tensor, Tensor | None], mask: Tensor | None, step: Step
    ) -> TokenBatch:
        logprobs, old, advantages, rollout = tensors
        fields = {"advantages": advantages, "prev_logprobs": old, "old_logprobs": old}
        if self.is_correction_level != "off":
            if rollout is None:
                raise ValueError(
                    f"is_correction_level = {self.is_correction_level!r} needs rollout_log_probs, which is None"
                )
            fields["generation_logprobs"] = fields["rollout_logprobs"] = rollout
            if self.correction is None:
                fields["prev_logprobs"] = rollout
            elif self.is_correction_mode == "clip":  # an overflowing ω is clamped too; the library's would be 0
                fields["generation_logprobs"] = torch.maximum(rollout, old - MAX_EXPONENT)
        return dense_batch(logprobs, mask, fields, step, count_empty=False)
