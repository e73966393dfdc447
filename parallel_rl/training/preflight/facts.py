"""Facts of a run from its config: the parts chosen on this machine, and model and layout for `parallel-rl plan`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from operator import attrgetter
from typing import NamedTuple

import torch
import torch.distributed as dist

from parallel_rl.groups import job_backend
from parallel_rl.megatron.model_config import default_ffn_hidden_size, layers_here
from parallel_rl.plan.source import ModelShape, Source
from parallel_rl.testing.whole_step.known_faults import RunFacts
from parallel_rl.training.config.load import load_config
from parallel_rl.training.config.sections import DTYPES
from parallel_rl.training.config.train import TrainConfig
from parallel_rl.training.data.checking import settle_alphabet
from parallel_rl.training.data.datasets import Datasets, find_data
from parallel_rl.training.data.reading import read_datasets
from parallel_rl.training.models.engine import adam_package
from parallel_rl.training.preflight.check import length_check
from parallel_rl.training.preflight.dry_run import read_steps, readings
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


# field of the plan's layout: config key
_KEYS = {
    "tensor": "parallel.tensor",
    "context": "parallel.context",
    "pipeline": "parallel.pipeline",
    "data": "parallel.data",
    "sequence_parallel": "parallel.sequence_parallel",
    "distributed_optimizer": "parallel.use_distributed_optimizer",
    "dtype": "run.dtype",
}


def planned(path: str, overrides: Mapping[str, object] | None = None) -> Source:
    """Read the sizes and the layout of a run's config; `overrides` replace fields of the layout.

    ValueError if the config is not valid, or has a feature that the plan does not count.
    """
    over = [f"--{_KEYS[name]}={str(value).removeprefix('torch.').lower()}" for name, value in (overrides or {}).items()]
    config = load_config(path, over)
    parallel = config.parallel
    if parallel.expert > 1:
        raise ValueError(f"parallel.expert = {parallel.expert} is not supported: the plan knows no expert ranks")
    if parallel.expert_tensor not in (None, parallel.tensor):
        raise ValueError(f"parallel.expert_tensor = {parallel.expert_tensor} is not supported unless it is tensor's")
    if config.run.dtype == "float64":
        raise ValueError("run.dtype = 'float64' is not supported; give --dtype")
    layout = {name: value for name, key in _KEYS.items() if (value := attrgetter(key)(config)) is not None}
    dtype = getattr(torch, config.run.dtype)
    return Source(model_shape(config), {**layout, "dtype": dtype}, data=_of_data(config))


def _of_data(config: TrainConfig) -> tuple[str, ...]:
    """Describe the data of a run that drops or cuts records, and the first steps of a run on prefix trees."""
    fits, shares = config.data.too_long == config.data.invalid == "error", config.batch.share_prefixes
    if fits and not shares:
        return ()
    files = find_data(config.data)
    config = settle_alphabet(config, files)
    data = read_datasets(config, config.tokenizer.build(), files, length_check(config))
    return (*([] if fits else data.describe()), *(_trees(config, data) if shares else ()))


def _trees(config: TrainConfig, data: Datasets) -> Iterator[str]:
    """Describe the rows of each phase's first step."""
    for reading in readings(config):
        for done in read_steps(config, data, reading, 1, config.parallel.data or 1):
            assert done.trees is not None
            yield (
                f"{done.phase} step 1: {done.tokens:,} tokens, {done.trees.describe(done.tokens)}; a data rank has up to "
                f"{done.trees.rows:,} micro-batches, {done.filled:.1%} full"
            )


def model_shape(config: TrainConfig) -> ModelShape:
    """Return the sizes of a run's policy, with the vocabulary padded as by the trainer."""
    model, unit = config.model, config.model.vocab_multiple * config.parallel.tensor
    tokens = settle_alphabet(config, find_data(config.data)).tokenizer.build().vocabulary
    vocabulary_size = model.vocabulary(tokens).size
    return ModelShape(
        layers=model.layers,
        hidden=model.hidden,
        heads=model.heads,
        groups=model.query_groups or model.heads,
        head_dim=model.head_dim or model.hidden // model.heads,
        ffn=model.ffn_hidden or default_ffn_hidden_size(model.hidden, model.gated),
        vocab=-(-vocabulary_size // unit) * unit,
        gated=model.gated,
        tied=model.tie_embeddings,
        qkv_bias=model.qkv_bias,
        qk_norm=model.qk_norm,
        positions=model.max_positions if model.position == "learned_absolute" else 0,
    ).with_experts(model.experts)
