"""Sections that several objectives share: run, layout, batch, optimizer, sampling, servers, evaluation."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch

from parallel_rl.config.strict import at_least
from parallel_rl.servers.completion_server import CompletionServerConfig
from parallel_rl.servers.weights import EngineName
from parallel_rl.training.reporting.loggers import check_loggers
from parallel_rl.vocab.shards import Truncation

DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class ParallelConfig:
    """Sizes of the parallel dimensions, and options of Megatron's DDP.

    Attributes:
        tensor: tensor parallel size: ranks that split each matrix and the vocabulary.
        context: context parallel size: ranks that split each sequence.
        pipeline: number of pipeline stages.
        data: data parallel size, as a check. null: the ranks of the world that tensor × context × pipeline leaves.
        sequence_parallel: tensor ranks split the hidden states between matrix products.
        use_distributed_optimizer: ZeRO-1: data × context ranks each hold a part of the optimizer's moments, master weights and
            reduced gradients. Weights and checkpoints stay the same.
        overlap_grad_reduce: reduce gradients over data × context ranks during the backward.
        expert: expert parallel size: ranks of a pipeline stage over which a layer's experts are distributed.
        expert_tensor: ranks that split each expert's matrices. null: as `tensor`.
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
        micro_batch_size: sequences per micro-batch, in the order of the data. null: 64, unless `tokens` is given.
        packing: concatenate the sequences of a micro-batch in one row instead of padding them to one width.
        tokens: capacity of a packed row in tokens, padding included. Sequences are distributed so that each data rank has about
            as many tokens, and fill rows by first-fit decreasing; pairs stay together. Adds the metrics `packing_efficiency`,
            `padding_fraction` and `data_imbalance`.
        share_prefixes: compute tokens that the sequences of a packed row share, such as a prompt, once (prefix trees). `tokens`
            counts them once, and the samples of a prompt go to one data rank. Adds the metrics `tokens_computed`,
            `tokens_trained`, `shared`, `groups_cut` and `tokens_repeated`.
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
    """AdamW (arXiv 1711.05101), its learning rate schedule and gradient clipping.

    Attributes:
        lr: peak learning rate.
        warmup_steps: updates of the phase over which the rate rises linearly.
        schedule: after the warm-up the rate stays ("constant"), or falls on a cosine to the end of the phase.
        final_fraction: rate at the end of "cosine", as a fraction of `lr`.
        betas: decay rates of the two moments.
        eps: added to the denominator.
        weight_decay: decoupled weight decay.
        clip: largest norm of the gradient; larger gradients are scaled down. null: no clipping.
        on_nonfinite: what happens if the gradient norm is not finite, or above `spike`: "error" ends the run, "skip" leaves out
            the update and counts it (`skipped_updates`). Either way the last checkpoint is good.
        max_skips: consecutive updates that "skip" leaves out; one more ends the run.
        spike: gradient norm above which `on_nonfinite` applies. null: any finite norm is accepted.
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
    """How completions are sampled.

    In RL, the old log-probs and those of the loss are of the same truncated distribution. A token outside of this distribution
    is masked (metric `dropped_tokens`). Log-probs that are compared with a frozen model are never truncated.

    Attributes:
        max_new_tokens: longest completion, in tokens.
        temperature: divides the logits before the softmax.
        top_k: sample among the k most likely tokens. null: among all.
        top_p: sample among the most likely tokens that together have probability p, of those that `top_k` leaves. null: all.
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
    """Mean reward of completions of `data.held_out`, before the first step, during the run and at its end.

    With several samples, rows also have mean@n and pass@k of all prompts and of each source (`experience.pass_at_k`).

    Attributes:
        samples: completions per held-out prompt.
        every: steps between evaluations; 0: before and after the phase only.
        passing: reward from which a completion counts as passing, for pass@k.
        show: prompts that are printed after each evaluation, with their first completion, its reward and the answer.
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


@dataclass(frozen=True)
class RunConfig:
    """Folder, seed, precision and checkpoints of a run.

    Attributes:
        dir: folder of metrics.jsonl, tensorboard/, checkpoints/ and curves.png.
        seed: seed for weight initialisation, data order and sampling.
        dtype: precision of parameters and activations. bfloat16 trains on float32 master weights.
        resume: "auto" continues from the folder's newest checkpoint. "never" starts over and replaces the folder's run; a Slurm
            job does so once and resumes when it is requeued. Files that no run made are never removed: they are an error.
        checkpoint_every: steps between checkpoints; 0 saves after the warm-up and at the end only.
        keep_checkpoints: number of newest checkpoints that are kept.
        keep_every: never delete checkpoints whose step in the phase is a multiple of this (0: none).
        timeout: seconds that a rank waits in one collective. After that the run ends and names the missing rank. Set it above
            the longest time by which ranks may differ, for instance in a slow reward function.
        loggers: tensorboard, wandb, mlflow, trackio, or names that your own module registers (`register_logger`, --import).
            They receive the rows of metrics.jsonl. null: tensorboard, if it is installed.
        init_from: a checkpoint folder (".../step_000100") with the initial weights; relative to the config file. Its checksums
            protect against accidents, not against people.
    """

    dir: str
    seed: int = 0
    dtype: Literal["float64", "float32", "bfloat16"] = "float32"
    resume: Literal["auto", "never"] = "auto"
    checkpoint_every: int = 0
    keep_checkpoints: int = 2
    keep_every: int = 0
    timeout: float = 600.0
    loggers: tuple[str, ...] | None = None
    init_from: str | None = None

    def __post_init__(self) -> None:
        at_least(self, checkpoint_every=0, keep_checkpoints=1, keep_every=0, seed=0, timeout=1)
        check_loggers(self.loggers or ())
        if not self.dir.strip():
            raise ValueError(f"dir = {self.dir!r} is empty; name the folder of the run, as in runs/grpo")
        if self.dir.startswith("~"):
            raise ValueError(f"dir = {self.dir!r} begins with a ~, which only a shell expands; write the whole path")
        for name, most in (("seed", 2**31 - 1), ("timeout", 30 * 86400)):
            if getattr(self, name) > most:
                raise ValueError(f"{name} = {getattr(self, name)} must be at most {most}")
        if self.keep_every and self.checkpoint_every and self.keep_every % self.checkpoint_every:
            raise ValueError(
                f"keep_every = {self.keep_every} must be a multiple of checkpoint_every = {self.checkpoint_every}: others "
                "are hardly ever saved"
            )


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
                "update = 'vllm' is incompatible with api = 'sglang', which vLLM does not serve; set api = 'openai'"
            )
