"""The section `model`: a folder says the sizes, and what contradicts it or has no effect is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from parallel_rl.config.architecture import Experts, RopeScaling
from parallel_rl.config.strict import configure
from parallel_rl.training.config.model import ModelConfig, check_model_layout
from parallel_rl.training.config.sections import ParallelConfig
from parallel_rl.training.tokenizer.protocol import Vocabulary
from tests.megatron.hf.golden import INDEX

EXPERTS = {"number": 4, "ffn_hidden": 48}


def folder(name: str, path: Path) -> str:
    """config.json alone."""
    import json

    (path / "config.json").write_text(json.dumps(INDEX[name]["config"]["4"]))
    return str(path)


def test_a_folder_says_the_sizes(tmp_path: Path) -> None:
    model = configure(ModelConfig, {"hf": folder("llama31", tmp_path), "max_positions": 128, "fused_head": True})
    assert (model.layers, model.query_groups, model.head_dim, model.vocab_size) == (2, 2, 16, 61)
    assert model.rope_scaling == RopeScaling(8.0) and model.position == "rope" and model.gated
    assert model.max_positions == 128 and ModelConfig(hf=str(tmp_path)).max_positions == 131072
    # what a run writes down is read again
    from dataclasses import asdict

    assert configure(ModelConfig, asdict(model)) == model


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layers": 3}, "layers = 3 contradicts hf = .*, whose config.json means 2; leave it out"),
        ({"head_dim": 8}, "head_dim = 8 contradicts"),
        ({"init_std": 0.1}, "init_std = 0.1 has no effect with hf"),
        ({"max_positions": 1000}, "max_positions = 1000 is above the 512"),
        ({"hf": "nowhere/else"}, "nowhere/else is not a folder, and nothing is downloaded"),  # a name of the Hub
    ],
)
def test_what_contradicts_a_folder(change: dict, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        configure(ModelConfig, {"hf": folder("qwen3", tmp_path), **change}, "model")


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"rope_base": 5e5}, "rope_base = 500000.0 has no effect with position = 'learned_absolute'"),
        ({"rope_scaling": {"factor": 8}}, "rope_scaling = .* has no effect with position"),
        ({"aux_loss": 0.01}, "aux_loss = 0.01 has no effect without experts"),
        ({"heads": 3}, "hidden = 64 is not divisible by heads = 3; set head_dim"),
        ({"query_groups": 3}, "heads = 4 is not divisible by query_groups = 3"),
        ({"norm_epsilon": 0}, "norm_epsilon = 0.0 must be a finite number above 0"),
        ({"experts": {**EXPERTS, "per_token": 5}}, "model.experts: per_token = 5 is more than number = 4"),
        ({"experts": {**EXPERTS, "numbre": 5}}, "unknown key model.experts.numbre = 5"),
        (
            {"rope_scaling": {"factor": 8, "high_freq_factor": 1}},
            "high_freq_factor = 1.0 must be above low_freq_factor",
        ),
    ],
)
def test_what_has_no_effect(sizes: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        configure(ModelConfig, sizes, "model")


@pytest.mark.parametrize(
    ("model", "parallel", "message"),
    [
        ({}, {"expert": 2}, "parallel.expert = 2 has no effect without model.experts"),
        (
            {"experts": Experts(4, 48)},
            {"expert": 3},
            "model.experts.number = 4 is not divisible by parallel.expert = 3",
        ),
        ({"experts": Experts(4, 48)}, {"tensor": 2}, "with model.experts needs parallel.sequence_parallel = true"),
        ({"heads": 6, "hidden": 96, "query_groups": 2}, {"tensor": 3}, "query_groups = 2 is not divisible by .* = 3"),
    ],
)
def test_layouts_that_do_not_fit(model: dict, parallel: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_model_layout(ModelConfig(**model), ParallelConfig(**parallel))


def test_groups_that_several_ranks_share() -> None:
    check_model_layout(ModelConfig(heads=8, query_groups=2), ParallelConfig(tensor=4))


def test_the_vocabulary_is_the_models(tmp_path: Path) -> None:
    """Engines draw from all words of the model; a tokenizer may know fewer, never more."""
    model = ModelConfig(hf=folder("qwen3", tmp_path))
    assert model.vocabulary(Vocabulary(15, frozenset({2}))) == Vocabulary(61, frozenset({2}))
    with pytest.raises(ValueError, match="61, is too small for the tokenizer, which has 62"):
        model.vocabulary(Vocabulary(62, frozenset({2})))
