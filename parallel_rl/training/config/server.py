"""The section `rl.server`: where completions come from when the trainer does not draw them itself."""

from __future__ import annotations

import math
from dataclasses import dataclass

from parallel_rl.config.strict import at_least
from parallel_rl.servers.completion_server import CompletionServerConfig
from parallel_rl.servers.weights import EngineName


@dataclass(frozen=True, kw_only=True)
class ServerConfig(CompletionServerConfig):
    """Servers that draw the samples, see `CompletionServerConfig`; `concurrency` is that of each data rank.

    A policy's version is the number of optimizer steps behind it since RL began. A server tells its own in weight_version, or
    is taken to have what was last sent to it, 0 before that. A sample's staleness is the trainer's version minus that; it is
    recorded, and `importance` or `rejection` of the loss correct for it by generation_logprobs.

    Attributes:
        ahead: steps whose samples are asked for before their turn, while others are trained on.
        max_staleness: samples whose policy lies more optimizer steps than this away count in the advantages of their group, and
            are masked in the loss; None: all are trained on.
        max_mismatch: the mean |log ratio| between a server and the trainer (TRL's sampling_logp_difference) over the tokens of
            samples with staleness 0 is at most this, or the run ends: beyond it the server has other weights. What precision
            leaves is below 0.1. With prev_logprobs = "generation" the first step of each start alone is looked at, by a forward
            more. None: samples may be of any policy.
        update: the engine whose servers get the trainer's weights: a Hugging Face folder for each version in run.dir/policy,
            the newest two of which stay. What was asked for before is awaited first, so that a sample is of one policy.
            Evaluations then go through the servers, too. None: the servers have weights of their own.
        update_every: steps from one update to the next; an evaluation sends the weights in any case.
    """

    ahead: int = 0
    max_staleness: int | None = None
    max_mismatch: float | None = 0.3
    update: EngineName | None = None
    update_every: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(self, ahead=0, update_every=1)
        if self.max_staleness is not None:
            at_least(self, max_staleness=0)
        if self.max_mismatch is not None and not 0 < self.max_mismatch < math.inf:
            raise ValueError(f"max_mismatch = {self.max_mismatch} must be a finite number above 0, or null")
        if self.update is None and self.update_every != 1:
            raise ValueError(f"update_every = {self.update_every} has no effect without update")
        if self.update == "vllm" and self.api == "sglang":
            raise ValueError(
                "update = 'vllm' is incompatible with api = 'sglang', which vLLM does not speak; leave api out"
            )
