"""The sections that any run may have: layout, model, batch, sampling, evaluation; and the optimizer."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch

from parallel_rl.config.strict import at_least
from parallel_rl.vocab.truncation import Truncation

DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class ParallelConfig:
    """Sizes of the parallel dimensions, and what data and context ranks share; the last two as Megatron's DDP has them.

    Attributes:
        tensor, context, pipeline: sizes; what remains of the world is data parallel, or exactly `data` where that is given.
        sequence_parallel: tensor ranks split the hidden states between matrix products.
        use_distributed_optimizer: data × context ranks each hold a part of the optimizer's moments and master weights
            (ZeRO-1), and of the reduced gradients; the weights after a step are the same ones. Checkpoints are the same, too.
        expert, expert_tensor: ranks of a pipeline stage that share a layer's experts out, and those that share each expert's
            matrices (None: `tensor`).
        overlap_grad_reduce: gradients are reduced over them while the backward goes on.
    """

    tensor: int = 1
    context: int = 1
    pipeline: int = 1
    data: int | None = None
    sequence_parallel: bool = False
    use_distributed_optimizer: bool = False
    overlap_grad_reduce: bool = False
    expert: int = 1
    expert_tensor: int | None = None

    def __post_init__(self) -> None:
        at_least(self, tensor=1, context=1, pipeline=1, expert=1)
        if self.expert_tensor is not None:
            at_least(self, expert_tensor=1)
        if self.data is not None:
            at_least(self, data=1)
        if self.sequence_parallel and self.tensor == 1:
            raise ValueError("sequence_parallel = True has no effect with tensor = 1; raise tensor or leave it out")


def data_parallel_size(config: ParallelConfig, world_size: int) -> int:
    """Number of data parallel ranks that the world leaves.

    Raises:
        ValueError: `world_size` does not match tensor × context × pipeline (× data), or leaves an option without effect.
    """
    model = config.tensor * config.context * config.pipeline
    text = f"parallel.tensor {config.tensor} × context {config.context} × pipeline {config.pipeline}"
    if config.data is not None and world_size != model * config.data:
        raise ValueError(
            f"the world has {world_size} ranks; {text} × data {config.data} needs exactly {model * config.data}"
        )
    if world_size % model:
        raise ValueError(f"the world has {world_size} ranks; {text} needs {model} or a multiple of it")
    experts = (config.expert_tensor or config.tensor) * config.expert * config.pipeline
    if world_size % experts:
        raise ValueError(
            f"the world has {world_size} ranks; parallel.expert_tensor {config.expert_tensor or config.tensor} × expert "
            f"{config.expert} × pipeline {config.pipeline} needs {experts} or a multiple of it"
        )
    data = world_size // model
    for name in ("use_distributed_optimizer", "overlap_grad_reduce"):
        if getattr(config, name) and data * config.context == 1:
            raise ValueError(
                f"parallel.{name} = True has no effect on one data × context rank; set it to false, or raise the ranks"
            )
    return data


@dataclass(frozen=True)
class BatchConfig:
    """Micro-batches: how the sequences of a step reach the model.

    Attributes:
        micro_batch_size: sequences at a time, in the order of the data; 64 where `tokens` is not given either.
        packing: they stand one after the other in one row, instead of being padded to one width.
        tokens: what a packed row holds at most, padding included. Sequences then go to the data ranks such that their tokens
            are as many on each, and into rows by first-fit decreasing; pairs stay together. Each row of metrics then has
            `packing_efficiency` (true tokens over what all packed rows could hold), `padding_fraction` (of what they do hold)
            and `data_imbalance` (tokens of the fullest data rank over their mean).
        share_prefixes: a packed row holds tokens that its sequences share, such as a prompt, once (prefix trees). `tokens` then
            counts these once, too, and the samples of a prompt go to one data rank. Each row of metrics then has
            `tokens_computed` (of the rows), `tokens_trained` (of the sequences) and `shared` (the part that is saved).
    """

    micro_batch_size: int | None = None
    packing: bool = False
    tokens: int | None = None
    share_prefixes: bool = False

    def __post_init__(self) -> None:
        if self.share_prefixes and not self.packing:
            raise ValueError("share_prefixes = True stores sequences in one row; set packing to true")
        if self.tokens is None:
            at_least(self, **({} if self.micro_batch_size is None else {"micro_batch_size": 1}))
            return
        at_least(self, tokens=1)
        if self.micro_batch_size is not None:
            raise ValueError(
                f"micro_batch_size = {self.micro_batch_size} contradicts tokens = {self.tokens}; a micro-batch is filled by "
                "either. Set one of them to null"
            )
        if not self.packing:
            raise ValueError(f"tokens = {self.tokens} is the capacity of a packed row; set packing to true")

    @property
    def sequences(self) -> int:
        """Number of sequences in a micro-batch that is not filled by tokens."""
        return 64 if self.micro_batch_size is None else self.micro_batch_size


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW (arXiv 1711.05101) with the gradient clipped to the norm `clip` (None: not).

    The rate rises over the first `warmup_steps` of the phase, then stays or falls on a cosine to `final_fraction` of it.

    Attributes:
        on_nonfinite: a gradient norm that is not finite, or above `spike`, ends the run ("error"), or leaves the weights as
            they are ("skip"); either way the last checkpoint is good. A row counts its `skipped_updates`.
        max_skips: so many one after the other are left out; one more ends the run.
        spike: None: any finite norm is good.
    """

    lr: float
    warmup_steps: int = 0
    schedule: Literal["constant", "cosine"] = "constant"
    final_fraction: float = 0.0
    betas: tuple[float, ...] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.0
    clip: float | None = 1.0
    on_nonfinite: Literal["error", "skip"] = "error"
    max_skips: int = 3
    spike: float | None = None

    def __post_init__(self) -> None:
        at_least(self, warmup_steps=0, weight_decay=0, max_skips=1)
        if self.on_nonfinite == "error" and self.max_skips != 3:
            raise ValueError(f"max_skips = {self.max_skips} has no effect with on_nonfinite = 'error'")
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas = {list(self.betas)} is not valid; two numbers in [0, 1) are needed")
        for name in ("lr", "eps", "clip", "spike"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"{name} = {value} must be a finite number above 0")
        if not 0 <= self.final_fraction <= 1:
            raise ValueError(f"final_fraction = {self.final_fraction} must lie in [0, 1]")
        if self.final_fraction and self.schedule == "constant":
            raise ValueError(f"final_fraction = {self.final_fraction} has no effect with schedule = 'constant'")


@dataclass(frozen=True)
class SamplingConfig:
    """Sampling of rollouts: at most so many new tokens, and from which distribution.

    Log-probs of the policy in RL, old ones and those of the loss, are of the same truncated distribution: a token that one of
    them does not keep leaves the mask (the metric dropped_tokens). What is compared with a frozen model is never truncated.

    Attributes:
        max_new_tokens: of a completion.
        temperature: of the softmax.
        top_k: draws are among the k likeliest words; None: among all.
        top_p: and among the likeliest of these that together hold the fraction p; None: among all.
    """

    max_new_tokens: int = 8
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None

    def __post_init__(self) -> None:
        at_least(self, max_new_tokens=1)
        if not 0 < self.temperature < math.inf:
            raise ValueError(f"temperature = {self.temperature} must be a finite number above 0")
        _ = self.truncation  # refuses an invalid rule

    @property
    def truncation(self) -> Truncation:
        """The rule that top_k and top_p are."""
        return Truncation(self.top_k, self.top_p)


@dataclass(frozen=True)
class EvaluationConfig:
    """Mean reward of `samples` completions per held-out prompt, before and after, and every `every` steps (0: not between).

    With several samples each row has mean@n and pass@k, too, of all prompts and of each source (`experience.pass_at_k`).

    Attributes:
        passing: a completion passes with at least this reward.
        show: how many prompts are printed after each evaluation with their first completion, its reward and the answer.
    """

    samples: int = 1
    every: int = 0
    passing: float = 1.0
    show: int = 0

    def __post_init__(self) -> None:
        at_least(self, samples=1, every=0, show=0)
        if not math.isfinite(self.passing):
            raise ValueError(f"passing = {self.passing} must be a finite number")
        if self.passing != 1.0 and self.samples == 1:
            raise ValueError(
                f"passing = {self.passing} has no effect with samples = 1, which gives no pass@k; raise samples"
            )
