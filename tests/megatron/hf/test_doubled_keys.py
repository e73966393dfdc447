"""Keys of config.json that transformers 5 moved, renamed or doubled: taken as transformers takes them, or refused by name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from parallel_rl.config.architecture import Architecture, RopeScaling
from parallel_rl.config.hf_config import read_architecture
from parallel_rl.testing.pool import run_world
from tests.megatron.hf.cases import Layout, layout
from tests.megatron.hf.golden import write_folder

SIZES = {
    "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 96,
    "vocab_size": 61, "max_position_embeddings": 512,
}  # fmt: skip
EXPERTS = {"moe_intermediate_size": 48, "num_experts_per_tok": 2}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
DEFAULT = {"rope_type": "default", "rope_theta": 1e6}
ORIGINAL = "original_max_position_embeddings"
SLIDING, FULL = "sliding_attention", "full_attention"


def read(family: str, **changes: object) -> Architecture:
    return read_architecture({"model_type": family, **SIZES, **changes})


@pytest.mark.parametrize(
    ("family", "changes", "part"),
    [
        # a model card's YaRN beside what transformers 5 saved; transformers reads rope_scaling alone
        ("qwen3", {"rope_parameters": DEFAULT, "rope_scaling": YARN}, "differ, and transformers reads rope_scaling alone"),
        ("llama", {"rope_parameters": {**LLAMA3, "rope_theta": 5e5}, "rope_scaling": LLAMA3}, "with its rope_theta"),
        ("llama", {"rope_parameters": DEFAULT, "rope_scaling": {"rope_type": "default"}}, "with its rope_theta"),
        ("llama", {"rope_parameters": {**LLAMA3, "factor": 2.0}, "rope_scaling": LLAMA3}, "rope_scaling = {"),
        ("qwen2", {"rope_parameters": DEFAULT, "rope_theta": 1e4}, "rope_parameters.rope_theta = 1000000.0 and rope_theta = 1"),
        ("qwen2", {"rope_scaling": {"rope_theta": 1e6}, "rope_theta": 1e4}, "rope_scaling.rope_theta = 1000000.0 and rope_th"),
        ("llama", {"rope_scaling": {**LLAMA3, ORIGINAL: 8192}, ORIGINAL: 4096}, "rope_scaling.original_max_position_embeddin"),
        ("llama", {"rope_scaling": {"rope_type": "default", "type": "yarn"}}, "rope_type = 'default' and type = 'yarn' differ"),
        ("llama", {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "rope_scaling lacks low_freq_factor"),
        ("qwen3_moe", {"num_experts": 4, "num_local_experts": 8, **EXPERTS}, "num_experts = 4 and num_local_experts = 8 diff"),
        ("qwen3", {"layer_types": [FULL]}, "must be a list of num_hidden_layers = 2 texts"),
    ],
)  # fmt: skip
def test_two_places_that_differ_are_refused(family: str, changes: dict[str, object], part: str) -> None:
    with pytest.raises(ValueError) as raised:
        read(family, **changes)
    assert part in str(raised.value)


@pytest.mark.parametrize(
    ("family", "changes", "obstacles"),
    [
        ("qwen3", {"rope_scaling": {"rope_type": None, "type": "yarn", "factor": 4.0}}, ("rope_type = 'yarn'",)),
        ("qwen3", {"rope_scaling": {"factor": 4.0}}, ("rope_scaling with a factor and no rope_type",)),
        ("qwen3", {"rope_parameters": {FULL: DEFAULT}}, (f"{FULL} = {DEFAULT}",)),
        ("llama", {"per_layer_config": {"0": {"head_dim": 8}}}, ("per_layer_config",)),
        ("llama", {"compression_config": {"quant_method": "fp8"}}, ("compression_config",)),
        ("llama", {"quantization": {"bits": 4}, "quantization_config": {"bits": 4}}, ("quantization_config", "quantization")),
        # a qwen3_moe has no max_window_layers: each of its layers slides
        (
            "qwen3_moe",
            {"use_sliding_window": True, "sliding_window": 128, "max_window_layers": 28, "num_experts": 4, **EXPERTS},
            ("sliding_window = 128 below max_position_embeddings = 512",),
        ),
        (
            "qwen2",
            {"use_sliding_window": True, "sliding_window": 128, "layer_types": [FULL, SLIDING]},
            ("sliding_window = 128 below max_position_embeddings = 512",),
        ),
        ("qwen2", {"layer_types": [FULL, SLIDING]}, (f"layer_types with '{SLIDING}'",)),
        ("llama", {"layer_types": [FULL, "linear_attention"]}, ("layer_types with 'linear_attention'",)),
        ("mistral", {"max_position_embeddings": None}, ("sliding_window = 4096 below max_position_embeddings = 131072",)),
        # and what transformers does not slide is taken
        ("qwen2", {"use_sliding_window": True, "sliding_window": 9, "layer_types": [FULL] * 2}, ()),
        ("qwen3", {"use_sliding_window": True, "sliding_window": 9}, ()),
        ("qwen3", {"use_sliding_window": False, "sliding_window": 9, "max_window_layers": 0}, ()),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 512, "max_window_layers": 1}, ()),
    ],
)  # fmt: skip
def test_what_is_not_supported_is_named(family: str, changes: dict[str, object], obstacles: tuple[str, ...]) -> None:
    assert read(family, **changes).obstacles == obstacles


def test_two_places_that_agree_are_one() -> None:
    scaled = {**LLAMA3, ORIGINAL: 8192, "rope_theta": 5e5}
    right = read("llama", rope_parameters=scaled)
    assert (right.rope_theta, right.rope_scaling) == (5e5, RopeScaling(8.0))
    assert read("llama", rope_parameters=scaled, rope_scaling=scaled, rope_theta=5e5) == right
    assert read("llama", rope_parameters=scaled, rope_scaling=None) == right
    assert read("llama", rope_scaling={**LLAMA3, ORIGINAL: 8192}, rope_theta=500000, rope_parameters={}) == right
    assert read("llama", rope_scaling={**LLAMA3, "type": "llama3"}, rope_theta=5e5, **{ORIGINAL: 8192}) == right
    # without it, transformers 5 takes the model's own limit
    assert read("llama", rope_scaling=LLAMA3).rope_scaling == RopeScaling(8.0, original_max_position_embeddings=512)
    moe = read("qwen3_moe", num_local_experts=4, num_experts=4, **EXPERTS)
    assert moe.experts is not None and moe.experts.number == 4 and moe.head_dim == 16  # 128 only for a qwen3


def test_one_dtype_is_written(tmp_path: Path) -> None:
    """A folder that named both kept the old one beside the new: versions of transformers read another one of the two."""
    pytest.importorskip("megatron.core")
    folder = write_folder("qwen3", tmp_path / "model", dtype="bfloat16", torch_dtype="bfloat16")
    run_world(1, _rewritten, str(folder), str(tmp_path / "out"))
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert {key: value for key, value in config.items() if "dtype" in key} == {"dtype": "float32"}


def _rewritten(rank: int, folder: str, out: str) -> None:
    from parallel_rl.megatron.hf import load_hf, save_hf

    with layout(Layout()):
        save_hf(load_hf(folder), out)
