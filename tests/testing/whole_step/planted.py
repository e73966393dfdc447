"""Models and scripts with a fault each, and the scripts that are right; all of them run on one process alike."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.testing.whole_step.models import dense_config, provider

if TYPE_CHECKING:
    from megatron.core.models.gpt import GPTModel
    from megatron.core.transformer.transformer_config import TransformerConfig


_NOISE = torch.Generator().manual_seed(0)


def scaled_heads(config: TransformerConfig, **stage: Any) -> GPTModel:
    """Each head's output has a learned scale, cut over tensor ranks, and nobody marks it."""
    from parallel_rl.megatron import SelfAttentionCore

    model = provider(config, **stage)
    for core in (module for module in model.modules() if isinstance(module, SelfAttentionCore)):
        heads = config.num_attention_heads // config.tensor_model_parallel_size
        core.register_parameter("head_scale", torch.nn.Parameter(torch.ones(heads)))
        core.register_forward_hook(_scale)
    return model


def _scale(core: torch.nn.Module, args: object, out: Tensor) -> Tensor:
    return (out.unflatten(-1, (len(core.head_scale), -1)) * core.head_scale[:, None]).flatten(-2)


def plain_norms(config: TransformerConfig, **stage: Any) -> GPTModel:
    """First norms whose weights do not know sequence parallelism."""
    model = provider(config, **stage)
    for name, parameter in model.named_parameters():
        if "input_layernorm" in name:
            parameter.sequence_parallel = False
    return model


def dropped_experts(config: TransformerConfig, **stage: Any) -> GPTModel:
    """The last expert of each rank learns on the first expert rank alone."""
    from megatron.core import parallel_state

    model = provider(config, **stage)
    if parallel_state.get_expert_model_parallel_rank() > 0:
        for name, parameter in model.named_parameters():
            if "local_experts.1." in name:
                parameter.register_hook(torch.zeros_like)
    return model


def contiguous_positions(config: TransformerConfig, **stage: Any) -> GPTModel:
    """Rotary positions of contiguous rows on context ranks, whose rows are cut zigzag."""
    from megatron.core import parallel_state

    model = provider(config, **stage)
    rotary, size = model.rotary_pos_emb, config.context_parallel_size
    rank = parallel_state.get_context_parallel_rank()
    if size > 1:
        rotary.forward = lambda length, *_, **__: rotary.get_emb(length).chunk(size)[rank]
    return model


def detached_neighbours(config: TransformerConfig, **stage: Any) -> GPTModel:
    """Keys and values of other context ranks are gathered without a backward."""
    from parallel_rl.megatron import SelfAttentionCore

    model = provider(config, **stage)
    for core in (module for module in model.modules() if isinstance(module, SelfAttentionCore)):
        core.forward = partial(_detached, core, core.forward)
    return model


def _detached(
    core: torch.nn.Module, forward: Any, query: Tensor, key: Tensor, value: Tensor, *rest: Any, **more: Any
) -> Tensor:
    from parallel_rl.megatron import layers

    real = layers.tensor_parallel.gather_from_sequence_parallel_region

    def gather(local: Tensor, *_: object) -> Tensor:
        parts = [torch.empty_like(local) for _ in range(core.cp_group.size())]
        dist.all_gather(parts, local.detach().contiguous(), group=core.cp_group)
        parts[core.cp_group.rank()] = local
        return torch.cat(parts)

    layers.tensor_parallel.gather_from_sequence_parallel_region = gather
    try:
        return forward(query, key, value, *rest, **more)
    finally:
        layers.tensor_parallel.gather_from_sequence_parallel_region = real


def gathered_logits(config: TransformerConfig, **stage: Any) -> GPTModel:
    """Every tensor rank has all logits, and the cross-entropy takes them for its shard."""
    model = provider(config, **stage)
    if model.post_process:
        model.output_layer.gather_output = True
    return model


def no_context_sum() -> TransformerConfig:
    """A config whose own function sums gradients over data ranks and leaves context ranks out."""
    config = dense_config()
    config.finalize_model_grads_func = _over_data_ranks
    return config


def _over_data_ranks(models: list[torch.nn.Module], tokens: Tensor | None = None, **_: object) -> None:
    from megatron.core import parallel_state

    if tokens is not None:
        dist.all_reduce(tokens, group=parallel_state.get_data_parallel_group(with_context_parallel=True))
    for model in models:
        for parameter in model.parameters():
            dist.all_reduce(parameter.main_grad, group=parallel_state.get_data_parallel_group())
            parameter.main_grad /= 1 if tokens is None else tokens


def sums(loss_mask: Tensor, output: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Megatron-LM's callback: sum, tokens, log."""
    total, tokens = (output.flatten() * loss_mask.flatten()).sum(), loss_mask.sum().to(torch.int)
    return total, tokens, {"lm loss": torch.stack((total.detach(), tokens.to(total)))}


def local_mean(loss_mask: Tensor, output: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """A mean over the tokens that this rank and micro-batch hold."""
    loss = (output.flatten() * loss_mask.flatten()).sum() / loss_mask.sum().clamp(min=1)
    return loss, {"lm loss": loss.detach()}


def times_tensor_ranks(loss_mask: Tensor, output: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """A loss that is multiplied by the tensor parallel size."""
    from megatron.core import parallel_state

    total, tokens, log = sums(loss_mask, output)
    return total * parallel_state.get_tensor_model_parallel_world_size(), tokens, log


class SingleScale(torch.nn.Module):
    """A scale that computes in float32 alone."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(width, 1))

    def forward(self, x: Tensor) -> Tensor:
        """Scale each vector [..., width] by a learned function of it."""
        return x * (1 + torch.tanh(x.float() @ self.weight))


def single_precision(config: TransformerConfig, **stage: Any) -> GPTModel:
    """A model with modules that refuse float64; each is behind a norm, outside of cut sequences."""
    model = provider(config, **stage)
    for layer in model.decoder.layers:
        layer.input_layernorm.scale = SingleScale(config.hidden_size)
        layer.input_layernorm.register_forward_hook(_scale_in_single)
    return model


def random_single_precision(config: TransformerConfig, **stage: Any) -> GPTModel:
    """The same, with noise that no seed fixes."""
    model = single_precision(config, **stage)
    for layer in model.decoder.layers:
        layer.input_layernorm.register_forward_hook(_add_noise)
    return model


def _add_noise(norm: torch.nn.Module, args: object, out: Tensor) -> Tensor:
    return out + 0.3 * torch.randn(out.shape, generator=_NOISE, dtype=torch.float32).to(out)


def _scale_in_single(norm: torch.nn.Module, args: object, out: Tensor) -> Tensor:
    return norm.scale(out)


def third_twice(loss_mask: Tensor, output: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """The third of four micro-batches, known by its tokens, trains twice."""
    from parallel_rl.testing.whole_step.layouts import make_rows

    total, tokens, log = sums(loss_mask, output)
    third = make_rows(64)["token_mask"][4:6, 1:].sum()
    return total * (2 if len(loss_mask) == 2 and loss_mask.sum() == third else 1), tokens, log


def weight_twice(config: TransformerConfig, **stage: Any) -> GPTModel:
    """One weight's gradient counts twice in the third micro-batch."""
    model, calls = provider(config, **stage), itertools.count()
    weight = model.decoder.layers[0].mlp.linear_fc2.weight
    weight.register_hook(lambda gradient: gradient * (2 if next(calls) == 2 else 1))
    return model


def dropout(config: TransformerConfig, **stage: Any) -> GPTModel:
    """A model with a dropout of its own."""
    model = provider(config, **stage)
    for layer in model.decoder.layers:
        layer.mlp.noise = torch.nn.Dropout(0.1)
        layer.mlp.register_forward_hook(_drop)
    return model


def _drop(mlp: torch.nn.Module, args: object, out: tuple[Tensor, Tensor | None]) -> tuple[Tensor, Tensor | None]:
    return mlp.noise(out[0]), out[1]


def of_first_context_rank(data_iterator: Iterator[dict[str, Tensor]], model: torch.nn.Module) -> object:
    """A forward step whose loss mask is cut for context rank 0 on every rank."""
    return _forward_step(data_iterator, model, wrong=True)


def forward_step(data_iterator: Iterator[dict[str, Tensor]], model: torch.nn.Module) -> object:
    """A right forward step of a script."""
    return _forward_step(data_iterator, model, wrong=False)


def _forward_step(data_iterator: Iterator[dict[str, Tensor]], model: torch.nn.Module, *, wrong: bool) -> object:
    from megatron.core import parallel_state

    batch = next(data_iterator)
    size, rank = parallel_state.get_context_parallel_world_size(), parallel_state.get_context_parallel_rank()

    def cut(field: Tensor, rank: int) -> Tensor:
        parts = field.chunk(2 * size, dim=1)
        return torch.cat((parts[rank], parts[-1 - rank]), 1) if size > 1 else field

    tokens, positions, labels = (cut(batch[name], rank) for name in ("tokens", "position_ids", "labels"))
    mask = cut(batch["loss_mask"], 0 if wrong else rank)
    return model(tokens, positions, None, labels=labels), partial(sums, mask)


def half_frozen(config: TransformerConfig, **stage: Any) -> GPTModel:
    """Matrices of layers and the embedding do not train; each layer's norm is scaled by a random buffer."""
    model = provider(config, **stage)
    for name, parameter in model.named_parameters():
        parameter.requires_grad = "norm" in name or "output_layer" in name
    for layer in model.decoder.layers:
        layer.register_buffer("scale", torch.randn(config.hidden_size))
        layer.input_layernorm.register_forward_hook(partial(_scale_norm, layer))
    return model


def _scale_norm(layer: torch.nn.Module, norm: torch.nn.Module, args: object, out: Tensor) -> Tensor:
    return out * layer.scale


def biased_config() -> TransformerConfig:
    """A config with biases."""
    config = dense_config()
    config.add_bias_linear = True
    return config


def lost_biases(config: TransformerConfig, **stage: Any) -> GPTModel:
    """Biases after attention learn on the first tensor rank alone."""
    from megatron.core import parallel_state

    model = provider(config, **stage)
    if parallel_state.get_tensor_model_parallel_rank() > 0:
        for name, parameter in model.named_parameters():
            if "linear_proj.bias" in name:
                parameter.register_hook(torch.zeros_like)
    return model


def recomputed_otherwise(config: TransformerConfig, **stage: Any) -> GPTModel:
    """An MLP that scales its output where gradients are off."""
    model = provider(config, **stage)
    for layer in model.decoder.layers:
        layer.mlp.register_forward_hook(_scale_without_gradient)
    return model


def _scale_without_gradient(mlp: torch.nn.Module, args: object, out: tuple[Tensor, Tensor | None]) -> object:
    return out[0] * (1.0 if torch.is_grad_enabled() else 0.9), out[1]


def routers_times_ranks(config: TransformerConfig, **stage: Any) -> GPTModel:
    """Routers whose gradients are multiplied by the expert parallel size."""
    model, size = provider(config, **stage), config.expert_model_parallel_size
    for name, parameter in model.named_parameters():
        if ".router.weight" in name:
            parameter.register_hook(lambda gradient: gradient * size)
    return model


def frozen_under_tensor_ranks(config: TransformerConfig, **stage: Any) -> GPTModel:
    """One weight trains on one process alone."""
    model = provider(config, **stage)
    model.decoder.layers[0].mlp.linear_fc1.weight.requires_grad = config.tensor_model_parallel_size == 1
    return model


def bridge_provider() -> TransformerConfig:
    """A config that is a provider, as Megatron-Bridge's are."""
    from tests.testing.whole_step.bridge import BridgeProvider

    return BridgeProvider(**{field: value for field, value in vars(dense_config()).items() if field in _PASSED})


_PASSED = {
    "num_layers", "hidden_size", "num_attention_heads", "num_query_groups", "ffn_hidden_size", "kv_channels",
    "normalization", "gated_linear_unit", "activation_func", "add_bias_linear", "hidden_dropout", "attention_dropout",
}  # fmt: skip
