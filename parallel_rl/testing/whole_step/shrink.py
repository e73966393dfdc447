"""Shrink a model's config to test size, and adapt it to one layout."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

import torch
from megatron.core.transformer.transformer_config import TransformerConfig

from parallel_rl.testing.whole_step.layouts import StepLayout
from parallel_rl.testing.whole_step.ranks import Inapplicable

VOCABULARY = 64
_CAPS = {  # the largest size of each field; `shrink` caps heads, groups, layers and experts
    "hidden_size": 32, "ffn_hidden_size": 48, "kv_channels": 8, "moe_ffn_hidden_size": 16, "q_lora_rank": 16,
    "moe_shared_expert_intermediate_size": 16, "kv_lora_rank": 16, "qk_head_dim": 8, "qk_pos_emb_head_dim": 8,
    "v_head_dim": 8, "mtp_num_layers": 2, "moe_router_num_groups": 2, "moe_router_group_topk": 1, "moe_router_topk": 2,
    "vocab_size": VOCABULARY, "seq_length": 64, "make_vocab_size_divisible_by": 8, "dsa_indexer_n_heads": 2,
    "dsa_indexer_head_dim": 8, "dsa_indexer_topk": 4,
}  # fmt: skip
_PER_LAYER = ("moe_layer_freq", "window_attn_skip_freq", "no_rope_freq", "linear_attention_freq")
_OFF: dict[str, object] = {  # randomness, low precision, kernels that a CPU lacks, and splits of another depth
    "hidden_dropout": 0.0, "attention_dropout": 0.0, "bf16": False, "fp16": False, "fp8": None, "fp4": None,
    "fp8_param": False, "fp4_param": False, "enable_autocast": False, "moe_input_jitter_eps": None,
    "moe_expert_capacity_factor": None, "moe_router_force_load_balancing": False,
    "num_layers_in_first_pipeline_stage": None, "num_layers_in_last_pipeline_stage": None,
    "pipeline_model_parallel_layout": None, "account_for_embedding_in_pipeline_split": False,
    "account_for_loss_in_pipeline_split": False, "recompute_granularity": None, "recompute_method": None,
    "recompute_num_layers": None, "recompute_modules": None, "cpu_offloading": False, "enable_cuda_graph": False,
    "external_cuda_graph": False, "cuda_graph_impl": "none", "overlap_moe_expert_parallel_comm": False,
    "delay_wgrad_compute": False, "tp_comm_overlap": False, "init_model_with_meta_device": False,
    "hierarchical_context_parallel_sizes": None, "hybrid_context_parallel": False, "mtp_standalone": False,
    "no_sync_func": None, "grad_sync_func": None, "param_sync_func": None, "grad_scale_func": None, "timers": None,
}  # fmt: skip
_NAMED = {  # fields that change what a run computes
    "hidden_dropout", "attention_dropout", "bf16", "fp16", "fp8", "fp4", "moe_expert_capacity_factor",
    "moe_input_jitter_eps", "overlap_moe_expert_parallel_comm",
}  # fmt: skip
_OFF_ON_CPU: dict[str, object] = {
    "use_cpu_initialization": True, "bias_activation_fusion": False, "bias_dropout_fusion": False,
    "masked_softmax_fusion": False, "apply_rope_fusion": False, "persist_layer_norm": False,
    "gradient_accumulation_fusion": False, "cross_entropy_loss_fusion": False, "moe_permute_fusion": False,
    "moe_router_fusion": False, "moe_grouped_gemm": False, "batch_p2p_sync": False, "fused_single_qkv_rope": False,
    "memory_efficient_layer_norm": False, "moe_shared_expert_overlap": False, "deterministic_mode": False,
}  # fmt: skip


def shrink(config: TransformerConfig, layers: int) -> tuple[TransformerConfig, list[str]]:
    """Return the config at test size, and a note on each field kept or turned off; ValueError if refused."""
    notes: list[str] = []
    values = vars(config)
    changes: dict[str, object] = {"num_layers": layers}
    for name, cap in _CAPS.items():
        value = values.get(name)
        if isinstance(value, int) and value > cap:
            changes[name] = cap
    heads, groups = int(config.num_attention_heads), int(config.num_query_groups or config.num_attention_heads)
    changes["num_attention_heads"] = min(heads, 4)
    changes["num_query_groups"] = min(heads, 4) if groups == heads else min(groups, 2)
    if config.num_moe_experts:
        changes["num_moe_experts"] = min(int(config.num_moe_experts), 4)
    for name in _PER_LAYER:
        value = values.get(name)
        if isinstance(value, list) and value:
            places = [round(i * (len(value) - 1) / max(layers - 1, 1)) for i in range(layers)]
            changes[name] = [value[place] for place in places]
    for name, off in _OFF.items():
        if name in values and values[name] != off:
            changes[name] = off
            if name in _NAMED:
                notes.append(f"{name} = {values[name]} is turned off")
    if getattr(config, "heterogeneous_block_specs", False):
        raise ValueError(
            "heterogeneous_block_specs = True describes each layer and cannot shrink; pass a smaller config"
        )
    try:
        return _replaced(config, changes), notes
    except ValueError as error:
        raise ValueError(f"the config cannot shrink: {error}") from error


def for_layout(config: TransformerConfig, layout: StepLayout, dtype: torch.dtype) -> TransformerConfig:
    """Return a shrunk config for one layout; Inapplicable if the layout or Megatron refuses it."""
    sizes = {"num_attention_heads": layout.tp, "num_query_groups": layout.tp, "num_layers": layout.pp * layout.vp}
    if config.num_moe_experts:
        sizes["num_moe_experts"] = layout.ep
    for name, parts in sizes.items():
        value = getattr(config, name)
        if value % parts:
            raise Inapplicable(f"{layout.name}: {name} = {value} at test size is not divisible by {parts}")
    on_gpu = torch.cuda.is_available()
    changes: dict[str, object] = {
        "tensor_model_parallel_size": layout.tp,
        "context_parallel_size": layout.cp,
        "pipeline_model_parallel_size": layout.pp,
        "virtual_pipeline_model_parallel_size": layout.vp if layout.vp > 1 else None,
        "expert_model_parallel_size": layout.ep if config.num_moe_experts else 1,
        "expert_tensor_parallel_size": layout.tp if layout.etp is None else layout.etp,
        "sequence_parallel": layout.sp,
        "calculate_per_token_loss": layout.per_token,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "microbatch_group_size_per_vp_stage": layout.pp,
        "overlap_p2p_comm": layout.vp > 1,
        "batch_p2p_comm": layout.vp == 1,
        **({} if on_gpu else _OFF_ON_CPU),
    }
    if layout.recompute:
        changes |= {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    if not (layout.recompute and layout.tp > 1 and not layout.sp):
        changes["distribute_saved_activations"] = False
    if layout.pp == 1 or config.moe_token_dispatcher_type != "alltoall":
        changes["variable_seq_lengths"] = False
    if config.moe_token_dispatcher_type == "flex" and not on_gpu:
        changes["moe_token_dispatcher_type"] = "alltoall"
    if config.moe_router_dtype is not None and dtype == torch.float64:
        changes["moe_router_dtype"] = "fp64"
    if not layout.balance:
        zero = [0.0] * len(config.moe_aux_loss_coeff) if isinstance(config.moe_aux_loss_coeff, list) else 0.0
        changes |= {"moe_aux_loss_coeff": zero, "moe_z_loss_coeff": None}
    try:
        return _replaced(config, changes)
    except ValueError as error:
        raise Inapplicable(f"{layout.name}: the config refuses it: {error}") from error


def adds_balance(config: TransformerConfig) -> bool:
    """Return whether routers add auxiliary losses."""
    coefficients = config.moe_aux_loss_coeff
    listed = coefficients if isinstance(coefficients, list) else [coefficients]
    return bool(config.num_moe_experts) and (any(listed) or bool(config.moe_z_loss_coeff))


def layers_for(layouts: list[StepLayout]) -> int:
    """Return the least number of layers, at least two, that every layout divides."""
    return max(2, math.lcm(*(layout.pp * layout.vp for layout in layouts)))


def _replaced(config: TransformerConfig, changes: Mapping[str, object]) -> TransformerConfig:
    fields = {field.name for field in dataclasses.fields(config) if field.init}
    known = {name: value for name, value in changes.items() if name in fields}
    try:
        changed = dataclasses.replace(config, **known)
    except (AssertionError, TypeError, ValueError) as error:
        text = ", ".join(f"{name} = {value}" for name, value in known.items() if value is not None and name in _CAPS)
        sizes = f" (with {text})" if text else ""
        raise ValueError(f"{type(error).__name__}: {error}{sizes}") from error
    for name, value in vars(
        config
    ).items():  # attributes that are no fields, such as cp_partition_mode on older versions
        if name not in vars(changed):
            setattr(changed, name, value)
    return changed
