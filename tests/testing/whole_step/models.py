"""Model providers at full size, as users have them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from megatron.core.models.gpt import GPTModel
    from megatron.core.transformer.transformer_config import TransformerConfig


def dense_config() -> TransformerConfig:
    from megatron.core.transformer.transformer_config import TransformerConfig

    return TransformerConfig(
        num_layers=32, hidden_size=4096, num_attention_heads=32, num_query_groups=8, ffn_hidden_size=14336,
        kv_channels=128, normalization="RMSNorm", gated_linear_unit=True, activation_func=torch.nn.functional.silu,
        add_bias_linear=False, bf16=True, params_dtype=torch.bfloat16, hidden_dropout=0.0, attention_dropout=0.0,
    )  # fmt: skip


def experts_config() -> TransformerConfig:
    from megatron.core.transformer.transformer_config import TransformerConfig

    return TransformerConfig(
        num_layers=24, hidden_size=2048, num_attention_heads=16, num_query_groups=4, ffn_hidden_size=8192,
        normalization="RMSNorm", gated_linear_unit=True, activation_func=torch.nn.functional.silu, add_bias_linear=False,
        num_moe_experts=64, moe_ffn_hidden_size=1024, moe_router_topk=8, moe_aux_loss_coeff=0.01, moe_router_dtype="fp32",
        moe_token_dispatcher_type="alltoall", mtp_num_layers=1, mtp_loss_scaling_factor=0.1,
        hidden_dropout=0.0, attention_dropout=0.0,
    )  # fmt: skip


def provider(
    config: TransformerConfig,
    pre_process: bool = True,
    post_process: bool = True,
    vp_stage: int | None = None,
    vocab_size: int = 128256,
    max_sequence_length: int = 8192,
) -> GPTModel:
    """A model on layers that take every layout on a CPU."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build

    from parallel_rl.megatron import ShardedNorm, layer_spec
    from parallel_rl.megatron.model import _mtp_spec

    layers = [layer_spec(config)] * get_num_layers_to_build(config, vp_stage)
    return GPTModel(
        config, TransformerBlockSubmodules(layer_specs=layers, layer_norm=ShardedNorm), vocab_size, max_sequence_length,
        pre_process=pre_process, post_process=post_process, parallel_output=True,
        position_embedding_type="rope", mtp_block_spec=_mtp_spec(config, vp_stage), vp_stage=vp_stage,
    )  # fmt: skip
