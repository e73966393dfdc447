"""Loss functions for RL post-training: one loss, any layout, the same numbers."""

from parallel_rl.counts import ValidCounts, count_valid
from parallel_rl.groups import ParallelGroups
from parallel_rl.layout import SequenceLayout
from parallel_rl.losses import (
    ClippedPGLossConfig,
    ClippedPGLossFn,
    CPOLossConfig,
    CPOLossFn,
    DistillationLossConfig,
    DistillationLossFn,
    DPOLossConfig,
    DPOLossFn,
    FullDistillationLossConfig,
    FullDistillationLossFn,
    KTOLossConfig,
    KTOLossFn,
    MixLossConfig,
    MixLossFn,
    MuSchedule,
    MuScheduleConfig,
    NLLLoss,
    NLLLossConfig,
    ORPOLossConfig,
    ORPOLossFn,
    PolicyLossConfig,
    PolicyLossFn,
    PreferenceLoss,
    PreferenceLossConfig,
    PRMLossConfig,
    PRMLossFn,
    SimPOLossConfig,
    SimPOLossFn,
    ValueLossConfig,
    ValueLossFn,
)
from parallel_rl.losses.core.base import LossFn
from parallel_rl.losses.core.batch import TokenBatch
from parallel_rl.losses.registry import ObjectiveConfig, get_loss, losses, register_loss, register_objective
from parallel_rl.metrics import Metrics, reduce_metrics
from parallel_rl.packing import SequencePackingLossWrapper
from parallel_rl.statistics import Statistics
from parallel_rl.validation import set_validation
from parallel_rl.vocab.linear.lm_head import LMHeadInput
from parallel_rl.vocab.linear.token_stats import LinearTokenStats, linear_token_stats
from parallel_rl.vocab.logprobs import token_logprobs
from parallel_rl.vocab.stats import TokenStats, token_stats

__version__ = "0.1.0"

__all__ = [
    "CPOLossConfig",
    "CPOLossFn",
    "ClippedPGLossConfig",
    "ClippedPGLossFn",
    "DPOLossConfig",
    "DPOLossFn",
    "DistillationLossConfig",
    "DistillationLossFn",
    "FullDistillationLossConfig",
    "FullDistillationLossFn",
    "KTOLossConfig",
    "KTOLossFn",
    "LMHeadInput",
    "LinearTokenStats",
    "LossFn",
    "Metrics",
    "MixLossConfig",
    "MixLossFn",
    "MuSchedule",
    "MuScheduleConfig",
    "NLLLoss",
    "NLLLossConfig",
    "ORPOLossConfig",
    "ORPOLossFn",
    "ObjectiveConfig",
    "PRMLossConfig",
    "PRMLossFn",
    "ParallelGroups",
    "PolicyLossConfig",
    "PolicyLossFn",
    "PreferenceLoss",
    "PreferenceLossConfig",
    "SequenceLayout",
    "SequencePackingLossWrapper",
    "SimPOLossConfig",
    "SimPOLossFn",
    "Statistics",
    "TokenBatch",
    "TokenStats",
    "ValidCounts",
    "ValueLossConfig",
    "ValueLossFn",
    "count_valid",
    "get_loss",
    "linear_token_stats",
    "losses",
    "reduce_metrics",
    "register_loss",
    "register_objective",
    "set_validation",
    "token_logprobs",
    "token_stats",
]
