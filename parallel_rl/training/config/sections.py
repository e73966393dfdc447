"""The common sections of a run: layout, model, batch, sampling, evaluation, optimizer."""

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
    """Sizes of the parallel dimensions, and Megatron DDP's options of data and context ranks.

    Attributes:
        tensor, context, pipeline: sizes; the rest of the world is data parallel, exactly `data` if set.
        sequence_parallel: tensor ranks split the hidden states between matrix products.
        use_distributed_optimizer: data × context ranks each hold a part of the optimizer's moments, master weights (ZeRO-1)
            and reduced gradients. Weights and checkpoints stay the same.
        expert, expert_tensor: ranks of a pipeline stage that split a layer's experts, and that split each expert's matrices
            (null: `tensor`).
        overlap_grad_reduce: reduce gradients while backward continues.
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
    """Return the number of data ranks in a world; ValueError if it does not fit the sizes."""
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
        micro_batch_size: sequences per micro-batch, in data order; 64 if `tokens` is not set either.
        packing: concatenate sequences in one row instead of padding them to one width.
        tokens: capacity of a packed row, including padding. Sequences are balanced by tokens over data ranks and packed by
            first-fit decreasing; pairs stay together. Metrics then have `packing_efficiency` (tokens / capacity of all rows),
            `padding_fraction` and `data_imbalance` (tokens of the fullest data rank / mean).
        share_prefixes: store shared prefixes, such as a prompt, once per packed row (prefix trees). `tokens` counts them once,
            too, and the samples of a prompt go to one data rank. Metrics then have `tokens_computed` (rows),
            `tokens_trained` (sequences) and `shared` (fraction saved).
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
        """Return the sequences of a micro-batch without `tokens`."""
        return 64 if self.micro_batch_size is None else self.micro_batch_size


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW (arXiv 1711.05101) with the gradient clipped to the norm `clip` (null: off).

    The rate rises over the first `warmup_steps` of the phase, then stays or falls on a cosine to `final_fraction` of it.

    Attributes:
        on_nonfinite: for a gradient norm that is not finite or above `spike`: "error" ends the run, "skip" leaves the weights
            unchanged and counts `skipped_updates`.
        max_skips: consecutive skips allowed; one more ends the run.
        spike: largest accepted gradient norm; null: any finite one.
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
    """Sampling of rollouts.

    The policy's log-probs in RL, old and new, use the same truncated distribution. A token outside one of them leaves the mask
    (metric dropped_tokens). Comparisons with a frozen model are never truncated.

    Attributes:
        max_new_tokens: longest completion.
        temperature: of the softmax.
        top_k: sample from the k most likely tokens; null: from all.
        top_p: then from the most likely of these with total probability p; null: from all.
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
        """Return the truncation by top_k and top_p."""
        return Truncation(self.top_k, self.top_p)


@dataclass(frozen=True)
class EvaluationConfig:
    """Mean reward of `samples` completions per held-out prompt; `every` steps, 0: first and last only.

    Several samples add mean@n and pass@k, of all prompts and of each source (`experience.pass_at_k`).

    Attributes:
        passing: least reward of a passing completion.
        show: number of prompts printed after each evaluation with completion, reward and answer.
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
