"""A model's sizes: the weights that are counted are those that the published models and ours have."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from parallel_rl.plan.models import model_of, read_model

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
# as the models' own cards and safetensors indices have them
PUBLISHED = [(LLAMA, 8_030_261_248), (QWEN2, 7_615_616_512), (QWEN3, 8_190_735_360), (MOE, 30_532_122_624)]


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
    tree = {
        "num_layers": 32, "hidden_size": 4096, "num_attention_heads": 32, "num_query_groups": 8, "ffn_hidden_size": 14336,
        "padded_vocab_size": 128256, "swiglu": True, "untie_embeddings_and_output_weights": True,
    }  # fmt: skip
    assert model_of(tree) == model_of(LLAMA)


def test_a_folder_and_its_file(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN2), encoding="utf-8")
    assert read_model(tmp_path) == read_model(tmp_path / "config.json") == model_of(QWEN2)


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
    with pytest.raises(ValueError, match="is not there"):
        read_model(tmp_path)
    for text, message in (("[1]", "holds list"), ("{", "is not JSON"), ("[" * 100_000, "is not JSON")):
        (tmp_path / "config.json").write_text(text, encoding="utf-8")
        with pytest.raises(ValueError, match=message):
            read_model(tmp_path)
