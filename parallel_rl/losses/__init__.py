"""What users call: an objective, token statistics and the reducer behind one signature."""

from parallel_rl.losses.clipped_pg import ClippedPGLossFn
from parallel_rl.losses.clipped_pg_config import ClippedPGLossConfig
from parallel_rl.losses.nll import NLLLoss
from parallel_rl.losses.preference import DPOLossConfig, DPOLossFn, PreferenceLoss

__all__ = ["ClippedPGLossConfig", "ClippedPGLossFn", "DPOLossConfig", "DPOLossFn", "NLLLoss", "PreferenceLoss"]
