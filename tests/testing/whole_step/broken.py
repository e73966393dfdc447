"""Providers and scripts that end, fail, or return what no step can use."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.testing.whole_step.models import dense_config, provider
from tests.testing.whole_step.planted import forward_step, sums

if TYPE_CHECKING:
    from megatron.core.models.gpt import GPTModel
    from megatron.core.transformer.transformer_config import TransformerConfig


def breaks_a_tensor_rank(loss_mask: Tensor, output: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """A callback with an error on the second tensor rank, for which the first waits."""
    from megatron.core import parallel_state

    if parallel_state.get_tensor_model_parallel_rank() == 1:
        raise KeyError("loss")
    return sums(loss_mask, output)


def returns_none(loss_mask: Tensor, output: Tensor) -> None:
    """A callback that forgets to return."""


def returns_four(loss_mask: Tensor, output: Tensor) -> tuple[object, ...]:
    """A callback with a value too many."""
    return (*sums(loss_mask, output), 1)


def detaches(loss_mask: Tensor, output: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """A callback whose loss trains nothing."""
    total, tokens, log = sums(loss_mask, output)
    return total.detach(), tokens, log


def loops(loss_mask: Tensor, output: Tensor) -> None:
    """A callback without an end."""
    while True:
        time.sleep(0.01)


def leaves(data_iterator: Iterator[dict[str, Tensor]], model: torch.nn.Module) -> object:
    """A script that ends its second rank."""
    if dist.get_rank() == 1:
        raise SystemExit(3)
    return forward_step(data_iterator, model)


def raises_on_one(config: TransformerConfig, **stage: Any) -> GPTModel:
    """A provider with an error on its second rank."""
    if dist.get_rank() == 1:
        raise KeyError("hidden")
    return provider(config, **stage)


def raises_on_all(data_iterator: Iterator[dict[str, Tensor]], model: torch.nn.Module) -> object:
    """A script with an error on every rank of several."""
    if dist.get_world_size() > 1:
        raise ValueError("this text supports nothing")
    return forward_step(data_iterator, model)


def no_model(config: TransformerConfig) -> None:
    """A provider that forgets to return."""


def two_models(config: TransformerConfig) -> list[GPTModel]:
    """A policy and a critic."""
    return [provider(config), provider(config)]


def linear(config: TransformerConfig) -> torch.nn.Module:
    """A model that is no GPTModel."""
    return torch.nn.Linear(4, 4)


def breaks(config: TransformerConfig) -> GPTModel:
    """A provider that reads a field that is not there."""
    return {}["hidden"]


def without_stages(config: TransformerConfig, vocab_size: int) -> GPTModel:
    """A provider of whole models."""
    return provider(config, vocab_size=vocab_size)


def megatrons_layers(config: TransformerConfig, pre_process: bool, post_process: bool, vocab_size: int) -> GPTModel:
    """Megatron's local attention, which takes neither packed rows nor context ranks."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    layers = get_gpt_layer_local_spec(normalization="RMSNorm")
    return GPTModel(config, layers, vocab_size, 64, pre_process, post_process, position_embedding_type="rope")


def heterogeneous() -> TransformerConfig:
    """A config that describes each layer for itself."""
    config = dense_config()
    config.heterogeneous_block_specs = True
    return config


def engine(config: TransformerConfig) -> object:
    """A provider of Transformer Engine's layers."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec

    return GPTModel(config, get_gpt_layer_with_transformer_engine_spec(), 64, 64)
