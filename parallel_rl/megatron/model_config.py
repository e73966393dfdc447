"""The TransformerConfig of a layout, on GPUs or CPUs."""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Collection, Mapping
from functools import lru_cache
from typing import Literal, NamedTuple

import torch
from megatron.core import parallel_state
from megatron.core.transformer.transformer_config import TransformerConfig

from parallel_rl.agreement import describe
from parallel_rl.config.architecture import Experts
from parallel_rl.layout import CPLayout
from parallel_rl.megatron.capabilities import norms_can_be_recomputed
from parallel_rl.vocab.backends.choice import COMPILER

#: a config field of newer versions; on older ones an attribute that our layers read
CUT = "cp_partition_mode"
#: fields by which chance or other tokens change a token's result, with the value that turns them off
SAME_EVERYWHERE: Mapping[str, object] = {
    "hidden_dropout": 0,
    "attention_dropout": 0,
    "moe_expert_capacity_factor": None,
    "moe_expert_rank_capacity_factor": None,
    "moe_input_jitter_eps": None,
    "moe_router_force_biased": None,
    "moe_router_force_load_balancing": False,
}


class Layers(NamedTuple):
    engine: bool
    why: str


def choose_layers(package: bool, card: bool, dtype: torch.dtype) -> Layers:
    """Choose Transformer Engine's layers, or Megatron's local ones, by package, card and dtype.

    Under context parallelism the engine's attention supports bfloat16 and float16 only; its float32 products are TF32.

    >>> choose_layers(package=True, card=True, dtype=torch.float32)
    Layers(engine=False, why='Transformer Engine has no attention for float32 under context parallelism')
    """
    name = str(dtype).removeprefix("torch.")
    if not card:
        return Layers(False, "there is no GPU")
    if not package:
        return Layers(False, "Transformer Engine is not installed")
    if dtype not in (torch.bfloat16, torch.float16):
        return Layers(False, f"Transformer Engine has no attention for {name} under context parallelism")
    return Layers(True, f"{name} on a GPU")


def layers_here(dtype: torch.dtype) -> Layers:
    layers = choose_layers(importlib.util.find_spec("transformer_engine") is not None, torch.cuda.is_available(), dtype)
    fault = _import_fault() if layers.engine else None
    return layers if fault is None else Layers(False, f"Transformer Engine does not import: {fault}")


@lru_cache(maxsize=1)
def _import_fault() -> str | None:
    """Return why an installed Transformer Engine does not import, e.g. as it was built for another torch."""
    try:
        importlib.import_module("transformer_engine.pytorch")
    except Exception as error:
        return describe(error)
    return None


def has_transformer_engine(dtype: torch.dtype) -> bool:
    """Return whether a model of `dtype` uses Transformer Engine's layers on this machine.

    >>> has_transformer_engine(torch.float32)
    False
    """
    return layers_here(dtype).engine


def default_ffn_hidden_size(hidden_size: int, gated: bool) -> int:
    """Return the default MLP width: 4 × hidden, or 8/3 × hidden rounded up to a multiple of 8 if gated."""
    return -(-8 * hidden_size // 24) * 8 if gated else 4 * hidden_size


def build_config(
    *,
    num_layers: int,
    hidden_size: int,
    num_attention_heads: int,
    num_query_groups: int | None = None,
    ffn_hidden_size: int | None = None,
    kv_channels: int | None = None,
    dtype: torch.dtype = torch.float32,
    sequence_parallel: bool = False,
    calculate_per_token_loss: bool = True,
    normalization: Literal["RMSNorm", "LayerNorm"] = "RMSNorm",
    gated: bool = True,
    bias: bool = False,
    qkv_bias: bool = False,
    qk_norm: bool = False,
    experts: Experts | None = None,
    aux_loss: float = 0.0,
    norm_epsilon: float = 1e-5,
    init_std: float = 0.02,
    recompute: bool = False,
    deterministic: bool = False,
    dropout: float = 0.0,
    virtual_pp: int | None = None,
    cp_layout: CPLayout = "zigzag",
    overrides: Mapping[str, object] | None = None,
) -> TransformerConfig:
    """Make Megatron's config of a Llama-like decoder for the layout of `initialize`, also on CPUs.

    >>> build_config(num_layers=2, hidden_size=64, num_attention_heads=4).ffn_hidden_size
    176

    Args:
        num_layers, hidden_size, num_attention_heads, num_query_groups, ffn_hidden_size, kv_channels: Megatron's names; the
            feed-forward width defaults to 4·D (gated: 8·D/3 rounded up to 8).
        dtype: of parameters and activations; bfloat16 and float16 need `wrap_model`.
        sequence_parallel: shard activations between tensor-parallel regions; no effect on one tensor rank.
        calculate_per_token_loss: Megatron's flag; `megatron_loss_func` obeys the law with either.
        gated: SwiGLU instead of GELU. bias: biases in the linear layers. qkv_bias: only of queries, keys and values.
        experts: a mixture of experts in place of every MLP. aux_loss: coefficient of the loss that balances them.
        recompute: full activation recomputation, layer by layer. deterministic: Megatron's `deterministic_mode`.
        dropout: must be 0, or the law does not hold.
        cp_layout: how context ranks cut rows (newer Megatron: `cp_partition_mode`); "contiguous" needs attention and
            positions that support it: `SelfAttentionCore` with learned positions, or a newer Megatron.
        overrides: further fields of TransformerConfig by name.

    Raises:
        ValueError: dropout above 0; experts that drop or sample tokens; FP8 on layers without it; sizes that the layout does
            not divide; an unknown field in `overrides`.
    """
    tp = parallel_state.get_tensor_model_parallel_world_size()
    pp = parallel_state.get_pipeline_model_parallel_world_size()
    groups = num_attention_heads if num_query_groups is None else num_query_groups
    ffn = ffn_hidden_size or default_ffn_hidden_size(hidden_size, gated)
    fields: dict[str, object] = {
        "num_layers": num_layers,
        "hidden_size": hidden_size,
        "num_attention_heads": num_attention_heads,
        "num_query_groups": groups,
        "ffn_hidden_size": ffn,
        "kv_channels": kv_channels or hidden_size // num_attention_heads,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        "fp16": dtype == torch.float16,
        "sequence_parallel": sequence_parallel and tp > 1,
        "calculate_per_token_loss": calculate_per_token_loss,
        "normalization": normalization,
        "layernorm_epsilon": norm_epsilon,
        "gated_linear_unit": gated,
        "activation_func": torch.nn.functional.silu if gated else torch.nn.functional.gelu,
        "add_bias_linear": bias,
        "add_qkv_bias": qkv_bias,
        "qk_layernorm": qk_norm,
        "init_method_std": init_std,
        "hidden_dropout": dropout,
        "attention_dropout": dropout,
        "tensor_model_parallel_size": tp,
        "context_parallel_size": parallel_state.get_context_parallel_world_size(),
        "pipeline_model_parallel_size": pp,
        "virtual_pipeline_model_parallel_size": virtual_pp,
        "variable_seq_lengths": pp > 1,  # stages exchange shapes, which vary for packed rows and rollouts
        # batched sends would mix activations and gradients if an interleaved stage's neighbours are one rank
        "overlap_p2p_comm": virtual_pp is not None,
        "batch_p2p_comm": virtual_pp is None,
        "batch_p2p_sync": torch.cuda.is_available(),
        "use_cpu_initialization": not torch.cuda.is_available(),
        "deterministic_mode": deterministic,
        "recompute_granularity": "full" if recompute else None,
        "recompute_method": "uniform" if recompute else None,
        "recompute_num_layers": 1 if recompute else None,
        **_expert_fields(experts, aux_loss, dtype),
        **_fusions(gated or (bias and experts is None), dtype),
        **(overrides or {}),
    }
    if fields.get("num_moe_experts") is None:
        fields["expert_model_parallel_size"] = 1  # e.g. for a dense teacher of a model with experts
    has_layout = CUT in TransformerConfig.__dataclass_fields__
    if has_layout:
        fields[CUT] = cp_layout
    _check_fields(fields, tp, pp, virtual_pp)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="full scope is deprecated")  # of Megatron's own default
        config = TransformerConfig(**fields)
    if not has_layout:
        setattr(config, CUT, cp_layout)
    return config


def _expert_fields(experts: Experts | None, aux_loss: float, dtype: torch.dtype) -> dict[str, object]:
    sizes: dict[str, object] = {
        "expert_model_parallel_size": parallel_state.get_expert_model_parallel_world_size(),
        "expert_tensor_parallel_size": parallel_state.get_expert_tensor_parallel_world_size(),
        "moe_token_dispatcher_type": "alltoall",  # the only one with variable lengths; unused by dense models
    }
    if experts is None:
        return sizes
    return {
        **sizes,
        "num_moe_experts": experts.number,
        "moe_grouped_gemm": has_transformer_engine(dtype),  # all experts in one call; Megatron's local layers cannot
        "moe_ffn_hidden_size": experts.ffn_hidden,
        "moe_router_topk": experts.per_token,
        "moe_router_pre_softmax": not experts.normalised,  # a softmax over all experts, or over those of the token
        "moe_router_dtype": "fp32" if dtype.itemsize < 4 else None,
        "moe_aux_loss_coeff": aux_loss,
    }


def _fusions(activation: bool, dtype: torch.dtype) -> dict[str, object]:
    on_gpu, engine = torch.cuda.is_available(), has_transformer_engine(dtype)
    return {
        # torch compiles it; Megatron refuses it for plain GELU without bias or with grouped experts
        "bias_activation_fusion": on_gpu and COMPILER is not None and activation,
        "bias_dropout_fusion": False,  # without dropout a plain sum, compiled again in each mode
        "masked_softmax_fusion": False,  # only read by Megatron's own core attention
        "apply_rope_fusion": engine,
        "gradient_accumulation_fusion": False,
        "persist_layer_norm": engine,
    }


def layout_dependence(fields: Mapping[str, object], names: Collection[str] = SAME_EVERYWHERE) -> str:
    """Describe the first of these fields that makes numbers depend on the layout; "" without any."""
    for name in names:
        required = SAME_EVERYWHERE[name]
        if (value := fields.get(name, required)) != required:
            return f"{name} = {value} must be {required}: with it the numbers depend on the layout"
    if fields.get("moe_router_load_balancing_type") == "sinkhorn":
        return (
            "moe_router_load_balancing_type = 'sinkhorn' balances the tokens that a rank holds at a time: with it the numbers "
            "depend on the layout; use 'aux_loss', 'seq_aux_loss', 'global_aux_loss' or 'none'"
        )
    return ""


def _check_fields(fields: Mapping[str, object], tp: int, pp: int, virtual_pp: int | None) -> None:
    unknown = sorted(set(fields) - set(TransformerConfig.__dataclass_fields__))
    if unknown:
        raise ValueError(f"overrides has unknown fields {unknown}; TransformerConfig does not have them")
    if dependence := layout_dependence(fields):
        raise ValueError(dependence)
    modules = fields.get("recompute_modules")
    if isinstance(modules, list) and "layernorm" in modules and not norms_can_be_recomputed():
        raise ValueError(f"recompute_modules = {modules} needs Transformer Engine for 'layernorm'; leave that out")
    ranks: tuple[object, str] = (tp, "tensor parallel ranks")
    parts_of: dict[str, tuple[object, str]] = {
        "num_layers": (pp * (virtual_pp or 1), "pipeline stages"),
        "num_attention_heads": ranks,
        "num_query_groups": ranks,
    }
    if fields.get("num_moe_experts") is None:
        parts_of["ffn_hidden_size"] = ranks
    else:
        parts_of["num_moe_experts"] = (fields["expert_model_parallel_size"], "expert parallel ranks")
        parts_of["moe_ffn_hidden_size"] = (fields["expert_tensor_parallel_size"], "expert tensor parallel ranks")
    sizes = {name: value for name in parts_of if isinstance(value := fields.get(name), int)}
    for name, value in sizes.items():
        parts, what = parts_of[name]
        assert isinstance(parts, int)
        if name == "num_query_groups" and 0 < value < tp:
            continue  # Megatron repeats them
        if value < 1 or value % parts:
            raise ValueError(f"{name} = {value} is not divisible by {parts} {what}")
    heads, groups = sizes["num_attention_heads"], sizes["num_query_groups"]
    if heads % groups:
        raise ValueError(f"num_attention_heads = {heads} is not divisible by num_query_groups = {groups}")
    _check_quantized(fields)


def _check_quantized(fields: Mapping[str, object]) -> None:
    dtype = fields["params_dtype"]
    assert isinstance(dtype, torch.dtype)
    for name in ("fp8", "fp4"):
        kind = fields.get(name)
        if kind and not has_transformer_engine(dtype):
            why = layers_here(dtype).why
            raise ValueError(
                f"{name} = {kind!r} has no effect on Megatron's local layers, which are taken because {why}"
            )
        if fields.get(f"{name}_param"):
            raise ValueError(
                f"{name}_param = True is not supported: Megatron's optimizer would start from Transformer Engine's random "
                f"weights, not from those loaded since; leave it out, {name} alone casts them in each step"
            )
