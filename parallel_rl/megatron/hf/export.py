"""Megatron models as whole tensors under Hugging Face's names, and their config.json."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import Parameter

from parallel_rl.config.architecture import OTHER_CONVERTERS, Architecture, Experts
from parallel_rl.config.hf_config import HFModel
from parallel_rl.megatron.hf.folder import Source, table
from parallel_rl.megatron.model import gather_parameters, unwrap
from parallel_rl.megatron.weights import (
    EMBEDDING,
    cut_of,
    global_parameters,
    shift_expert,
    spelled_locally,
    whole_tensor,
)

# fields of TransformerConfig that no family here supports, with the value that they must have
_ABSENT = {
    "normalization": "RMSNorm",
    "gated_linear_unit": True,
    "add_bias_linear": False,
    "layernorm_zero_centered_gamma": False,
    "multi_latent_attention": False,
    "mtp_num_layers": None,
    "window_size": None,
    "moe_shared_expert_intermediate_size": None,
    "moe_layer_freq": 1,
    "moe_router_score_function": "softmax",
    "moe_router_topk_scaling_factor": None,
    "moe_router_enable_expert_bias": False,
}


def describe_model(model: torch.nn.Module) -> HFModel:
    """Describe a model: as the folder that it was built from, else by its family, else ValueError.

    >>> describe_model(model).architecture.family
    'llama'
    """
    bare = unwrap(model)
    known: HFModel | None = getattr(bare, "hf", None)
    if known is not None:
        return known
    architecture = _architecture(bare)
    return HFModel(architecture, architecture.to_config())


def _architecture(model: GPTModel) -> Architecture:
    config = model.config
    wrong = [
        f"{name} = {getattr(config, name)!r}"
        for name, value in _ABSENT.items()
        if (getattr(config, name, value) or None) != (value or None)
    ]
    if model.position_embedding_type != "rope" or model.rotary_percent != 1.0:
        wrong.append(
            f"position_embedding = {model.position_embedding_type!r} with rotary_percent = {model.rotary_percent}"
        )
    if config.add_qkv_bias and config.qk_layernorm:
        wrong.append("qkv_bias with qk_norm")
    if config.num_moe_experts and not config.qk_layernorm:
        wrong.append("experts without qk_norm")
    if wrong:
        raise ValueError(
            f"the model is none of Hugging Face's llama, qwen2, qwen3 and qwen3_moe: it has {wrong[0]}; {OTHER_CONVERTERS}"
        )
    experts = None
    if config.num_moe_experts:
        experts = Experts(
            config.num_moe_experts,
            config.moe_ffn_hidden_size,
            config.moe_router_topk,
            normalised=not config.moe_router_pre_softmax,
        )
    if config.qk_layernorm:
        family = "qwen3" if experts is None else "qwen3_moe"
    else:
        family = "qwen2" if config.add_qkv_bias else "llama"
    return Architecture(
        family,
        layers=config.num_layers,
        hidden=config.hidden_size,
        heads=config.num_attention_heads,
        groups=config.num_query_groups,
        head_dim=config.kv_channels,
        ffn=config.ffn_hidden_size,
        vocab=model.true_vocab_size,
        tied=model.share_embeddings_and_output_weights,
        norm_epsilon=config.layernorm_epsilon,
        max_positions=model.max_sequence_length,
        rope_theta=float(model.rotary_base),
        rope_scaling=model.rope_scaling,
        qkv_bias=config.add_qkv_bias,
        qk_norm=config.qk_layernorm,
        experts=experts,
        aux_loss=config.moe_aux_loss_coeff if experts else 0.0,
    )


Models = torch.nn.Module | Sequence[torch.nn.Module]


@dataclass(frozen=True)
class Held:
    """A parameter of this rank by its local-layer name; `experts`: of its layer, per expert rank, or 0."""

    name: str
    parameter: Parameter
    experts: int = 0

    def on(self, owner: int, rank: int) -> str:
        """Return the name of the parameter in this place on expert rank `owner`; this one is on `rank`."""
        return shift_expert(self.name, (owner - rank) * self.experts)


def export_tensors(model: Models) -> Iterator[tuple[str, Tensor]]:
    """Iterate over (Hugging Face name, whole tensor) of the whole model, alike on every rank of the world.

    No rank holds more than one whole parameter. A tensor may be the model's memory: use or copy it before training continues.
    All ranks iterate to the end. Suits an engine's weight transfer (vLLM's `WeightSource`). ValueError for a model of no HF
    family.

    >>> [name for name, _ in export_tensors(model)][:3]
    ['model.embed_tokens.weight', 'model.layers.0.input_layernorm.weight', 'model.layers.0.self_attn.o_proj.weight']

    Args:
        model: a model, wrapped or not, or the chunks of this rank.
    """
    held, sources = held_parameters(model)
    gather_parameters(model)
    group = parallel_state.get_pipeline_model_parallel_group()
    experts = parallel_state.get_expert_model_parallel_group()
    steps = [
        (owner, entry, entry.on(owner, experts.rank()))
        for entry in held
        for owner in (range(experts.size()) if entry.experts else [experts.rank()])
    ]
    listing = [(name, entry.parameter.dtype) for _, entry, name in steps]
    stages = [listing] * group.size()
    if group.size() > 1:
        dist.all_gather_object(stages, listing, group=group)
    for stage, names in enumerate(stages):
        for index, (name, dtype) in enumerate(names):
            if stage == group.rank():
                owner, entry, _ = steps[index]
                parts = split(sources[name], _whole(entry, owner, experts))
            else:
                device, shapes = held[0].parameter.device, sources[name].shapes()
                parts = {part: torch.empty(shape, dtype=dtype, device=device) for part, shape in shapes.items()}
            for part, tensor in parts.items():
                yield part, _broadcast(tensor, stage, group)


def held_parameters(model: Models) -> tuple[list[Held], dict[str, Source]]:
    """List this rank's parameters and the model's sources; ValueError for a model of no HF family."""
    chunks = [unwrap(chunk) for chunk in ([model] if isinstance(model, torch.nn.Module) else model)]
    sources = table(describe_model(chunks[0]).architecture, scalar_head=chunks[0].scalar_head)
    per_rank = (chunks[0].config.num_moe_experts or 0) // parallel_state.get_expert_model_parallel_world_size()
    held = []
    for chunk in chunks:
        for name, parameter in global_parameters([chunk]):
            if name == EMBEDDING and not chunk.pre_process:
                continue
            local = spelled_locally(name)
            if local not in sources:
                raise ValueError(f"the model's parameter {name} has no counterpart in a Hugging Face folder")
            of_expert = shift_expert(local, 1) != local
            held.append(Held(local, parameter, per_rank if of_expert else 0))
    return held, sources


def split(source: Source, whole: Tensor) -> dict[str, Tensor]:
    """Cut a whole parameter into Hugging Face's tensors, without vocabulary padding."""
    if len(source.rows) == 1:
        [piece] = source.rows
        return {piece.name: whole[: piece.stop]}
    parts = {name: whole.new_empty(shape) for name, shape in source.shapes().items()}
    at = 0
    for piece in source.rows:
        rows = piece.stop - piece.start
        parts[piece.name][piece.start : piece.stop].copy_(whole[at : at + rows])
        at += rows
    return parts


def _whole(entry: Held, owner: int, experts: ProcessGroup) -> Tensor:
    """Return a whole parameter, or its counterpart on expert rank `owner`."""
    parameter = entry.parameter
    if not entry.experts:
        return whole_tensor(parameter)
    here = owner == experts.rank()
    whole = whole_tensor(parameter) if here else parameter.new_empty(cut_of(parameter).shape)
    return _broadcast(whole, owner, experts)


def _broadcast(tensor: Tensor, source: int, group: ProcessGroup) -> Tensor:
    if group.size() > 1:
        tensor = tensor.detach().contiguous()
        dist.broadcast(tensor, dist.get_global_rank(group, source), group=group)
    return tensor
