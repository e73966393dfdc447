"""Trinity-RFT's policy losses (0.6.0): its names, constructor arguments, `default_args`, `select_keys`, and metrics.

`POLICY_LOSS_FN` maps its configs' names to the classes. Its trainer overrides a loss's loss_agg_mode by the global
`algorithm.loss_agg_mode`, token-mean by default (Q35), and since 0.6 its losses are means over each micro-batch, so that
gradients grow with the number of micro-batches (Q31); here the class's arguments hold, and with the counts of the whole step
it returns the share that adds up.
"""

from parallel_rl.compat.trinity.base import ALL_MAPPERS, KeyMapper, PolicyLossFn
from parallel_rl.compat.trinity.mix import MIXCHORDPolicyLossFn, MIXPolicyLossFn
from parallel_rl.compat.trinity.off_policy import (
    CISPOPolicyLossFn,
    ImportanceSamplingLossFn,
    RECPolicyLossFn,
    SAPOPolicyLossFn,
    TOPRPolicyLossFn,
    sPPOPolicyLossFn,
)
from parallel_rl.compat.trinity.policy import GSPOLossFn, OPMDPolicyLossFn, PPOPolicyLossFn
from parallel_rl.compat.trinity.supervised import DPOLossFn, SFTISLossFn, SFTLossFn, SFTPhiLossFn

POLICY_LOSS_FN: dict[str, type[PolicyLossFn]] = {
    "ppo": PPOPolicyLossFn,
    "opmd": OPMDPolicyLossFn,
    "dpo": DPOLossFn,
    "sft": SFTLossFn,
    "mix": MIXPolicyLossFn,
    "gspo": GSPOLossFn,
    "topr": TOPRPolicyLossFn,
    "cispo": CISPOPolicyLossFn,
    "sft_is": SFTISLossFn,
    "sft_phi": SFTPhiLossFn,
    "mix_chord": MIXCHORDPolicyLossFn,
    "sppo": sPPOPolicyLossFn,
    "rec": RECPolicyLossFn,
    "sapo": SAPOPolicyLossFn,
    "importance_sampling": ImportanceSamplingLossFn,
}

__all__ = [
    "ALL_MAPPERS",
    "POLICY_LOSS_FN",
    "KeyMapper",
    "PolicyLossFn",
    "PPOPolicyLossFn",
    "OPMDPolicyLossFn",
    "DPOLossFn",
    "SFTLossFn",
    "MIXPolicyLossFn",
    "GSPOLossFn",
    "TOPRPolicyLossFn",
    "CISPOPolicyLossFn",
    "MIXCHORDPolicyLossFn",
    "SFTISLossFn",
    "SFTPhiLossFn",
    "sPPOPolicyLossFn",
    "RECPolicyLossFn",
    "SAPOPolicyLossFn",
    "ImportanceSamplingLossFn",
]
