"""A model that is built here is described as the family that it is one of, or refused by name."""

from __future__ import annotations

import pytest

from parallel_rl.config.architecture import Architecture, Experts, RopeScaling
from parallel_rl.config.hf_config import read_architecture
from parallel_rl.testing.pool import run_world
from tests.megatron.hf.cases import Layout, layout

pytest.importorskip("megatron.core")

LLAMA31 = Architecture("llama", 2, 64, 4, 2, 16, 96, 61, rope_theta=5e5, rope_scaling=RopeScaling(8.0), tied=True)
MOE = Architecture("qwen3_moe", 2, 64, 4, 2, 32, 96, 61, qk_norm=True, experts=Experts(4, 48, 2, False), aux_loss=0.01)


@pytest.mark.parametrize("model", [LLAMA31, MOE])
def test_what_is_written_is_read(model: Architecture) -> None:
    assert read_architecture(model.to_config()) == model


def test_built_models_are_described(tmp_path) -> None:
    """Sizes, rotary positions and the true vocabulary come back; what no family has is named."""
    run_world(1, _described)


def _described(rank: int) -> None:
    from parallel_rl import megatron as M
    from parallel_rl.megatron.hf import describe_model

    sizes = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "num_query_groups": 2, "ffn_hidden_size": 96}

    def describe(vocab_size: int = 61, positions: dict | None = None, **options: object) -> Architecture:
        config = M.build_config(**sizes, **options)
        return describe_model(
            M.build_model(config, vocab_size, 2048, vocab_multiple=8, **(positions or {}))
        ).architecture

    with layout(Layout()):
        found = describe(
            positions={"rotary_base": 5e5, "rope_scaling": RopeScaling(8.0), "tie_embeddings": True}, norm_epsilon=1e-6
        )
        assert found == LLAMA31
        assert describe(kv_channels=32, norm_epsilon=1e-6, qk_norm=True, experts=MOE.experts, aux_loss=0.01) == MOE
        assert describe(qkv_bias=True).family == "qwen2" and describe(qk_norm=True).family == "qwen3"
        refused = {
            "gated_linear_unit = False": {"gated": False},
            "add_bias_linear = True": {"bias": True},
            "normalization = 'LayerNorm'": {"normalization": "LayerNorm"},
            "'learned_absolute'": {"positions": {"position_embedding": "learned_absolute"}},
            "qkv_bias with qk_norm": {"qk_norm": True, "qkv_bias": True},
            "experts without qk_norm": {"experts": Experts(4, 48)},
        }
        for message, options in refused.items():
            with pytest.raises(ValueError, match=message):
                describe(**options)


def test_transformer_engines_names_have_a_place() -> None:
    """The fused spelling cannot be built without a GPU; its names lead to the same rows."""
    from parallel_rl.megatron.hf.folder import table
    from parallel_rl.megatron.weights import spelled_locally

    local = table(MOE)
    at = "decoder.layers.1."
    fused = {
        "self_attention.linear_qkv.layer_norm_weight": "model.layers.1.input_layernorm.weight",
        "mlp.linear_fc1.layer_norm_weight": "model.layers.1.post_attention_layernorm.weight",
        "mlp.experts.linear_fc1.weight3": "model.layers.1.mlp.experts.3.gate_proj.weight",
        "mlp.experts.linear_fc2.weight3": "model.layers.1.mlp.experts.3.down_proj.weight",
    }
    for name, theirs in fused.items():
        assert local[spelled_locally(at + name)].rows[0].name == theirs
