"""OpenRLHF's losses (0.11.2, and those dropped since its article); `openrlhf_article` has those of the article."""

from parallel_rl.compat.language import KDLoss, PRMLoss
from parallel_rl.compat.openrlhf.losses import GPTLMLoss, SFTLoss, ValueLoss, aggregate_loss
from parallel_rl.compat.openrlhf.policy import PolicyLoss
from parallel_rl.compat.preference import DPOLoss, KTOLoss, LogExpLoss, PairWiseLoss, VanillaKTOLoss

__all__ = [
    "GPTLMLoss",
    "SFTLoss",
    "PolicyLoss",
    "ValueLoss",
    "PairWiseLoss",
    "LogExpLoss",
    "DPOLoss",
    "KTOLoss",
    "VanillaKTOLoss",
    "KDLoss",
    "PRMLoss",
    "aggregate_loss",
]
