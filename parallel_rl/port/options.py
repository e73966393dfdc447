"""Detection of a config's framework, and its conversion."""

from __future__ import annotations

from collections.abc import Mapping

from parallel_rl.hosts.ported import Ported
from parallel_rl.hosts.registry import FRAMEWORKS, part


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
    ports = [part(framework.port) for framework in FRAMEWORKS.values() if framework.port]
    for port in ports:
        if port.recognises(host_config):
            ported: Ported = port.convert(host_config)
            return ported
    raise ValueError(
        f"the config has the sections {', '.join(map(str, host_config)) or 'none'}, which are of no framework known here; "
        f"supported are {' and '.join(port.SECTIONS for port in ports)}"
    )
