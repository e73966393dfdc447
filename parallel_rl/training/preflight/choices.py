"""Choices of a run on this machine and their reasons: layers, attention, statistics, backend, optimizer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.distributed as dist

from parallel_rl.groups import job_backend
from parallel_rl.megatron.model_config import layers_here
from parallel_rl.testing.whole_step.known_faults import RunFacts
from parallel_rl.training.config.sections import DTYPES
from parallel_rl.training.config.train import TrainConfig
from parallel_rl.training.models.engine import adam_package
from parallel_rl.vocab.backends.choice import runs_on_triton


class Choice(NamedTuple):
    """A part of the run: the choice, its reason, and a better choice; empty if there is none."""

    part: str
    text: str
    advice: str = ""


def choices(config: TrainConfig) -> Iterator[Choice]:
    """List the run's parts on this machine."""
    cuda, name = torch.cuda.is_available(), config.run.dtype
    dtype = DTYPES[name]
    layers = layers_here(dtype)
    if layers.engine:
        attention = " with SelfAttentionCore, which takes prefix trees" * config.batch.share_prefixes
        yield Choice("layers and attention", f"Transformer Engine's{attention}, for {layers.why}")
    else:
        better = "its attention in plain PyTorch is much slower; run.dtype = bfloat16 with Transformer Engine"
        text = f"Megatron's local ones with SelfAttentionCore: {layers.why}"
        yield Choice("layers and attention", text, better if cuda else "")
    probe = torch.empty(0, dtype=dtype, device="cuda" if cuda else "cpu")
    kernels = runs_on_triton(probe, "auto")
    yield Choice("token statistics", "Triton's kernels" if kernels else "PyTorch: " + _why_no_triton(cuda, name))
    head = "hidden states, logits never whole" if config.model.fused_head else "whole logits (model.fused_head = false)"
    yield Choice("losses read", head)
    backend = dist.get_backend() if dist.is_initialized() else job_backend()
    why = "" if backend == "nccl" else ": PARALLEL_RL_BACKEND sets it" if cuda else ": there is no GPU"
    yield Choice("process groups", backend + why)
    yield Choice("optimizer", f"Megatron's, with Adam of {_adam(dtype)}")


def run_facts(config: TrainConfig) -> RunFacts:
    """Return the facts that decide which faults of megatron-core a run reaches; it has no MTP or sinks."""
    sizes, balanced = config.parallel, config.model.experts is not None and config.model.aux_loss > 0
    return RunFacts(
        sizes.tensor, sizes.context, sizes.sequence_parallel, balanced=balanced, packed=config.batch.packing,
        recompute=config.model.recompute is not None,
    )  # fmt: skip


def _why_no_triton(cuda: bool, dtype: str) -> str:
    if not cuda:
        return "there is no GPU"
    return "float64" if dtype == "float64" else "Triton or a C compiler is not installed"


def _adam(dtype: torch.dtype) -> str:
    package, other = adam_package(dtype), adam_package(torch.float32)
    return package if package == other else f"{package}: {other}'s takes no {str(dtype).removeprefix('torch.')}"
