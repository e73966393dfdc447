"""Detection of a config's framework, and its conversion."""

from __future__ import annotations

from collections.abc import Mapping

from parallel_rl.port.nemo_rl import from_nemo_rl
from parallel_rl.port.ported import Ported
from parallel_rl.port.verl import from_verl

_NEMO_RL = ("grpo", "ppo", "dpo", "sft", "rm", "distillation")


def options_of(host_config: Mapping[str, object]) -> Ported:
    """Convert a resolved config of NeMo-RL or verl to our keys.

    >>> ported = options_of({"policy": {}, "dpo": {"reference_policy_kl_penalty": 0.1, "sft_average_log_probs": True}})
    >>> ported.config["preference"]["loss"]["options"]
    {'reference_policy_kl_penalty': 0.1}
    >>> ported.lines()[0]
    'dropped   dpo.sft_average_log_probs = True has no effect with sft_loss_weight = 0'

    Raises:
        ValueError: a config of neither; options that contradict each other there, too.
    """
    if not isinstance(host_config, Mapping):
        raise ValueError(f"a config must be a mapping, got {type(host_config).__name__}")
    if "actor_rollout_ref" in host_config:
        return from_verl(host_config)
    if (
        "loss_fn" in host_config
        or {"eval", "generation"} <= host_config.keys()
        or ("policy" in host_config and any(name in host_config for name in _NEMO_RL))
    ):
        return from_nemo_rl(host_config)
    raise ValueError(
        f"the config has the sections {', '.join(map(str, host_config)) or 'none'}, which are of no framework known here; "
        f"supported are NeMo-RL (policy, and loss_fn or one of {', '.join(_NEMO_RL)}) and verl (actor_rollout_ref)"
    )
