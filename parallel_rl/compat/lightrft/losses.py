"""LightRFT's losses of actor, critic and scalar reward model."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from parallel_rl.compat.dense import Count, Step, dense_batch, row_mean
from parallel_rl.compat.preference import PairWiseLoss, pairs
from parallel_rl.counts import token_weights
from parallel_rl.functional.preference import cross_entropy
from parallel_rl.functional.surrogates import CPGD, PPO
from parallel_rl.losses.core.call import share_of
from parallel_rl.losses.policy import PolicyLossFn
from parallel_rl.losses.policy_config import PolicyLossConfig
from parallel_rl.losses.value import clipped_squared_error, squared_error

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
