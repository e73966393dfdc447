"""Loss functions for RL post-training: one loss, any layout, the same numbers."""

from parallel_rl.groups import ParallelGroups
from parallel_rl.layout import SequenceLayout
from parallel_rl.losses import ClippedPGLossConfig, ClippedPGLossFn, DPOLossConfig, DPOLossFn, NLLLoss, PreferenceLoss
from parallel_rl.losses.registry import get_loss, losses, register_objective
from parallel_rl.packing import SequencePackingLossWrapper
from parallel_rl.reduce import Metrics, ValidCounts, count_valid, reduce_metrics
from parallel_rl.statistics import Statistics
from parallel_rl.validation import set_validation
from parallel_rl.vocab.logprobs import token_logprobs
from parallel_rl.vocab.stats import TokenStats, token_stats

__version__ = "0.1.0"

__all__ = [
    "ClippedPGLossConfig",
    "ClippedPGLossFn",
    "DPOLossConfig",
    "DPOLossFn",
    "Metrics",
    "NLLLoss",
    "ParallelGroups",
    "PreferenceLoss",
    "SequenceLayout",
    "SequencePackingLossWrapper",
    "Statistics",
    "TokenStats",
    "ValidCounts",
    "count_valid",
    "get_loss",
    "losses",
    "reduce_metrics",
    "register_objective",
    "set_validation",
    "token_logprobs",
    "token_stats",
]
