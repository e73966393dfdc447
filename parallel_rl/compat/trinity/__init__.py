"""Trinity-RFT's policy losses (0.6.0): its names, constructor arguments, `default_args`, `select_keys`, and metrics.

Its trainer overrides loss_agg_mode (Q35) and averages per micro-batch (Q31). Here the class's arguments hold, and with counts
of the whole step local losses add up.
"""

from parallel_rl.compat.trinity.mix import (
    DPOLossFn,
    MIXCHORDPolicyLossFn,
    MIXPolicyLossFn,
    SFTISLossFn,
    SFTLossFn,
    SFTPhiLossFn,
)
from parallel_rl.compat.trinity.off_policy import (
    CISPOPolicyLossFn,
    ImportanceSamplingLossFn,
    RECPolicyLossFn,
    SAPOPolicyLossFn,
    TOPRPolicyLossFn,
    sPPOPolicyLossFn,
)
from parallel_rl.compat.trinity.policy import (
    ALL_MAPPERS,
    GSPOLossFn,
    KeyMapper,
    OPMDPolicyLossFn,
    PolicyLossFn,
    PPOPolicyLossFn,
)

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
