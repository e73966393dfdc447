"""OpenRLHF's losses of its article; policy and value loss average each row first and return the scalar alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

from parallel_rl.compat import lightrft
from parallel_rl.compat.language import GPTLMLoss, KDLoss, PRMLoss
from parallel_rl.compat.lightrft.losses import ValueLoss
from parallel_rl.compat.preference import DPOLoss, KTOLoss, LogExpLoss, PairWiseLoss, VanillaKTOLoss

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup

    from parallel_rl.compat.dense import Count

__all__ = [
    "GPTLMLoss",
    "PolicyLoss",
    "ValueLoss",
    "PairWiseLoss",
    "LogExpLoss",
    "DPOLoss",
    "KTOLoss",
    "VanillaKTOLoss",
    "KDLoss",
    "PRMLoss",
]


class PolicyLoss(lightrft.PolicyLoss):
    """PPO clipped at 1 ± clip_eps, a mean over all rows of each row's mean over its tokens.

    The log-ratio is not clamped. A row without a token counts as 0 (Q13: the origin is NaN). Paper: arXiv 1707.06347.
    """

    def __init__(self, clip_eps: float = 0.2) -> None:
        super().__init__(clip_eps)

    def forward(  # type: ignore[override]
        self,
        log_probs: Tensor,
        old_log_probs: Tensor,
        advantages: Tensor,
        action_mask: Tensor | None = None,
        *,
        global_valid_seqs: Count | None = None,
        global_valid_toks: Count | None = None,
        context_parallel_group: ProcessGroup | None = None,
    ) -> Tensor:
        """Return the loss, or with counts of the step the local loss, from [B, A/cp]; mask None: all."""
        return super().forward(
            log_probs,
            old_log_probs,
            advantages,
            action_mask,
            global_valid_seqs=global_valid_seqs,
            global_valid_toks=global_valid_toks,
            context_parallel_group=context_parallel_group,
        )
