"""The section `rl.server`: servers that sample completions."""

from __future__ import annotations

import math
from dataclasses import dataclass

from parallel_rl.config.strict import at_least
from parallel_rl.servers.completion_server import CompletionServerConfig
from parallel_rl.servers.weights import EngineName


@dataclass(frozen=True, kw_only=True)
class ServerConfig(CompletionServerConfig):
    """Servers that sample completions, see `CompletionServerConfig`; `concurrency` is per data rank.

    A policy's version counts its optimizer steps since RL began. A server reports it in weight_version; otherwise it is the
    last version sent, or 0. A sample's staleness is the trainer's version minus its own; the loss's `importance` or
    `rejection` corrects for it by generation_logprobs.

    Attributes:
        ahead: steps whose samples are requested in advance, while others are trained on.
        max_staleness: samples more optimizer steps old than this are masked in the loss but count in their group's advantages;
            null: train on all.
        max_mismatch: bound on the mean |log ratio| between a server and the trainer (TRL's sampling_logp_difference) over
            tokens with staleness 0; above it the run ends, as the weights differ. Precision alone stays below 0.1. With
            prev_logprobs = "generation" only the first step of each start is checked. null: any policy may sample.
        update: the servers' engine, to send them the trainer's weights: a Hugging Face folder per version in run.dir/policy;
            the newest two stay. Requests in flight finish first, so that a sample has one policy. Evaluations then
            use the servers, too. null: servers keep their own weights.
        update_every: steps between updates; evaluations always send the weights.
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
