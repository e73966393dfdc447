"""What a file says of a run: the weights that the published models have, a layout, and what it says in vain."""

from __future__ import annotations

import json
import re
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch

from parallel_rl.plan.source import ModelShape, read_source, source_of

LLAMA = {
    "model_type": "llama", "num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8,
    "intermediate_size": 14336, "vocab_size": 128256, "tie_word_embeddings": False,
}  # fmt: skip
QWEN2 = {
    "model_type": "qwen2", "num_hidden_layers": 28, "hidden_size": 3584, "num_attention_heads": 28, "num_key_value_heads": 4,
    "intermediate_size": 18944, "vocab_size": 152064,
}  # fmt: skip
QWEN3 = {
    "model_type": "qwen3", "num_hidden_layers": 36, "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8,
    "head_dim": 128, "intermediate_size": 12288, "vocab_size": 151936,
}  # fmt: skip
MOE = {
    "model_type": "qwen3_moe", "num_hidden_layers": 48, "hidden_size": 2048, "num_attention_heads": 32,
    "num_key_value_heads": 4, "head_dim": 128, "intermediate_size": 6144, "vocab_size": 151936, "num_experts": 128,
    "moe_intermediate_size": 768, "num_experts_per_tok": 8,
}  # fmt: skip
MEGATRON = {
    "num_layers": 32, "hidden_size": 4096, "num_attention_heads": 32, "num_query_groups": 8, "ffn_hidden_size": 14336,
    "padded_vocab_size": 128256, "swiglu": True, "untie_embeddings_and_output_weights": True,
}  # fmt: skip
# as the models' own cards and safetensors indices have them
PUBLISHED = [(LLAMA, 8_030_261_248), (QWEN2, 7_615_616_512), (QWEN3, 8_190_735_360), (MOE, 30_532_122_624)]


def model_of(tree: dict) -> ModelShape:
    return source_of(tree).shape


@pytest.mark.parametrize(
    ("tree", "weights"), PUBLISHED, ids=lambda case: case["model_type"] if isinstance(case, dict) else ""
)
def test_the_weights_of_published_models(tree: dict, weights: int) -> None:
    """Biases of queries, norms of keys, experts and routers are each counted: the total is exact."""
    assert model_of(tree).parameters == weights


def test_a_mixture_multiplies_few_of_its_weights() -> None:
    """Qwen3-30B-A3B is called after the weights that a token meets."""
    assert 2.9e9 < model_of(MOE).active_parameters < 3.4e9


def test_megatrons_arguments() -> None:
    """The same Llama by Megatron's names."""
    assert model_of(MEGATRON) == model_of(LLAMA)
    assert source_of(MEGATRON).layout == {} and source_of(MEGATRON).unread == ()


@pytest.mark.parametrize(
    ("more", "change"),
    [
        ({"group_query_attention": False}, {"groups": 32}),
        ({"position_embedding_type": "learned_absolute", "max_position_embeddings": 8192}, {"positions": 8192}),
        ({"position_embedding_type": "rope", "max_position_embeddings": 8192}, {}),
        ({"num_experts": 8}, {"experts": 8, "expert_ffn": 14336, "experts_per_token": 2}),
        ({"moe_layer_freq": 1, "mtp_num_layers": None, "multi_latent_attention": False, "kv_lora_rank": 32}, {}),
        ({"tensor_model_parallel_size": 4, "expert_tensor_parallel_size": 4}, {}),
    ],
)
def test_megatrons_arguments_as_it_writes_them_down(more: dict, change: dict) -> None:
    """A run's own record holds each argument, most at values at which they change nothing."""
    assert model_of(MEGATRON | more) == replace(model_of(LLAMA), **change)


def test_megatrons_layout() -> None:
    """Sizes and dtype are those of a `Layout`; what is left over is named."""
    sizes = {
        "tensor_model_parallel_size": 4, "context_parallel_size": 2, "pipeline_model_parallel_size": 8,
        "data_parallel_size": None,
        "sequence_parallel": True, "use_distributed_optimizer": False, "bf16": False, "fp16": True,
    }  # fmt: skip
    source = source_of(MEGATRON | sizes | {"lr": 1e-6, "num_kv_heads": 8})
    assert source.layout == {
        "tensor": 4, "context": 2, "pipeline": 8, "sequence_parallel": True, "distributed_optimizer": False,
        "dtype": torch.float16,
    }  # fmt: skip
    assert source.unread == ("lr", "num_kv_heads")
    assert source_of(MEGATRON | {"bf16": True}).layout == {"dtype": torch.bfloat16}
    assert source_of(MEGATRON | {"bf16": False}).layout == {"dtype": torch.float32}


@pytest.mark.parametrize(
    "more",
    [
        {"moe_shared_expert_intermediate_size": 512}, {"moe_layer_freq": [0, 1]}, {"multi_latent_attention": True},
        {"kv_lora_rank": 512}, {"mtp_num_layers": 1}, {"expert_model_parallel_size": 2}, {"expert_tensor_parallel_size": 2},
    ],
)  # fmt: skip
def test_what_would_not_be_counted_is_refused(more: dict) -> None:
    [(key, value)] = more.items()
    with pytest.raises(ValueError, match=re.escape(f"{key} = {value} is not supported")):
        source_of(MEGATRON | more)


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("num_quer_groups", "num_query_groups"), ("tensor_model_paralel_size", "tensor_model_parallel_size"),
        ("swigul", "swiglu"), ("moe_layer_frequ", "moe_layer_freq"), ("mpt_num_layers", "mtp_num_layers"),
    ],
)  # fmt: skip
def test_slips_are_refused(wrong: str, right: str) -> None:
    with pytest.raises(ValueError, match=f"unknown key {wrong} = 8; did you mean '{right}'"):
        source_of(MEGATRON | {wrong: 8})


def test_none_of_megatrons_own_arguments_is_a_slip() -> None:
    """All that its configs know, at what they are where nobody sets them."""
    config = pytest.importorskip("megatron.core.transformer.transformer_config")
    unset = {field.name: None for field in fields(config.MLATransformerConfig) if field.name not in MEGATRON}
    assert model_of(MEGATRON | unset) == model_of(LLAMA)


def test_what_a_family_asks_for_beside_its_sizes_is_named() -> None:
    assert source_of(MOE | {"mlp_only_layers": [0]}).unread == (
        "dense layers among the experts (decoder_sparse_step, mlp_only_layers)",
    )


def test_a_folder_and_its_file(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN2), encoding="utf-8")
    assert read_source(tmp_path) == read_source(tmp_path / "config.json") == source_of(QWEN2)


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"model_type": "qwen4", "num_hidden_layers": 2}, "model_type = 'qwen4' is not known; did you mean 'qwen3'"),
        ({key: value for key, value in LLAMA.items() if key != "vocab_size"}, "lacks vocab_size"),
        (LLAMA | {"hidden_size": "4096"}, "hidden_size = '4096' must be an integer"),
        (LLAMA | {"hidden_size": True}, "hidden_size = True must be an integer"),
        (LLAMA | {"num_key_value_heads": 5}, "heads = 32 is not divisible by key-value heads = 5"),
        (LLAMA | {"num_hidden_layers": 0}, "layers = 0 must be at least 1"),
        (LLAMA | {"tie_word_embeddings": 1}, "tie_word_embeddings = 1 must be true or false"),
        ({"layers": 2}, "has neither num_hidden_layers"),
    ],
)  # fmt: skip
def test_bad_sizes_are_named(tree: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message.replace("(", r"\(").replace("?", r"\?")):
        model_of(tree)


def test_bad_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="does not exist"):
        read_source(tmp_path)
    for text, message in (("[1]", "holds list"), ("{", "is not JSON"), ("[" * 100_000, "is not JSON")):
        (tmp_path / "config.json").write_text(text, encoding="utf-8")
        with pytest.raises(ValueError, match=message):
            read_source(tmp_path)
