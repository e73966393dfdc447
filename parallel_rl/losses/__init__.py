"""Catalogue of the losses, one file each, with their options; importing it registers them all."""

from parallel_rl.losses.clipped_pg import ClippedPGLossConfig, ClippedPGLossFn
from parallel_rl.losses.components import ComponentConfig, ComponentsLossConfig, ComponentsLossFn
from parallel_rl.losses.core.options import NoConfig
from parallel_rl.losses.core.requirements import Field, Requirements
from parallel_rl.losses.distillation import (
    DistillationLossConfig,
    DistillationLossFn,
    FullDistillationLossConfig,
    FullDistillationLossFn,
)
from parallel_rl.losses.entropy_bonus import (
    AdaptiveEntropyBonus,
    CoefficientScheduleConfig,
    EntropyBonus,
    ScheduledEntropyBonus,
)
from parallel_rl.losses.kto import KTOLossConfig, KTOLossFn
from parallel_rl.losses.mix import MixLossConfig, MixLossFn, MuSchedule, MuScheduleConfig
from parallel_rl.losses.nll import NLLLoss, NLLLossConfig
from parallel_rl.losses.off_policy_config import (
    ImportanceConfig,
    OffPolicyMaskConfig,
    RejectionConfig,
    RejectionRule,
)
from parallel_rl.losses.policy import PolicyLossFn
from parallel_rl.losses.policy_config import KLConfig, PolicyLossConfig
from parallel_rl.losses.preference import DPOLossConfig, DPOLossFn
from parallel_rl.losses.prm import PreferenceLoss, PreferenceLossConfig, PRMLossConfig, PRMLossFn
from parallel_rl.losses.reference_free import (
    CPOLossConfig,
    CPOLossFn,
    ORPOLossConfig,
    ORPOLossFn,
    SimPOLossConfig,
    SimPOLossFn,
)
from parallel_rl.losses.reference_kl import ReferenceKLLossConfig, ReferenceKLLossFn
from parallel_rl.losses.value import ValueLossConfig, ValueLossFn

__all__ = [
    "ClippedPGLossConfig",
    "ClippedPGLossFn",
    "DPOLossConfig",
    "DPOLossFn",
    "DistillationLossConfig",
    "DistillationLossFn",
    "FullDistillationLossConfig",
    "FullDistillationLossFn",
    "CoefficientScheduleConfig",
    "ComponentConfig",
    "ComponentsLossConfig",
    "ComponentsLossFn",
    "MixLossConfig",
    "MixLossFn",
    "MuSchedule",
    "MuScheduleConfig",
    "NLLLoss",
    "NLLLossConfig",
    "PreferenceLoss",
    "PreferenceLossConfig",
    "ReferenceKLLossConfig",
    "ReferenceKLLossFn",
    "SimPOLossConfig",
    "SimPOLossFn",
    "CPOLossConfig",
    "CPOLossFn",
    "ORPOLossConfig",
    "ORPOLossFn",
    "KTOLossConfig",
    "KTOLossFn",
    "PRMLossConfig",
    "PRMLossFn",
    "ValueLossConfig",
    "ValueLossFn",
    "PolicyLossFn",
    "PolicyLossConfig",
    "KLConfig",
    "ImportanceConfig",
    "OffPolicyMaskConfig",
    "RejectionConfig",
    "RejectionRule",
    "EntropyBonus",
    "AdaptiveEntropyBonus",
    "ScheduledEntropyBonus",
    "Requirements",
    "Field",
    "NoConfig",
]
