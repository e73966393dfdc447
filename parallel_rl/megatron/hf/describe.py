"""The config.json of a Megatron model."""

from __future__ import annotations

import torch
from megatron.core.models.gpt import GPTModel

from parallel_rl.config.architecture import OTHER_CONVERTERS, Architecture, Experts
from parallel_rl.config.hf_config import HFModel
from parallel_rl.megatron.model import unwrap

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
    """Describe a model: as the folder that it was built from, else by its family.

    >>> describe_model(model).architecture.family
    'llama'

    Raises:
        ValueError: a model of no family; names the reason.
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
