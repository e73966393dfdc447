"""config.json of Hugging Face folders, as transformers 4 and 5 write it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from parallel_rl.config.architecture import FAMILIES, OTHER_CONVERTERS, Architecture, Experts
from parallel_rl.config.hf_attention import read_rope, window_obstacles
from parallel_rl.config.hf_keys import Keys, agreed
from parallel_rl.config.strict import nearest

CONFIG = "config.json"
_QWEN3_HEAD_DIM = 128  # what transformers assumes where config.json names none
_MAX_POSITIONS = {"llama": 2048, "mistral": 131072}  # of the others: 32768
_QUANTISED = ("quantization_config", "quantization", "compression_config")  # the two others are MLX's and older


def read_json(path: Path) -> dict[str, object]:
    """Read a JSON file that holds a mapping; ValueError for anything else."""
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror or error}") from None
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    if not isinstance(tree, dict):
        raise ValueError(f"{path} holds {type(tree).__name__}, not a mapping")
    return tree


@dataclass(frozen=True)
class HFModel:
    """A model's config.json: its architecture, and every entry as it was read."""

    architecture: Architecture
    config: Mapping[str, object]


def is_hf(folder: str | Path) -> bool:
    """Return whether a folder is one of Hugging Face's: it has a config.json."""
    return (Path(folder) / CONFIG).is_file()


def read_hf(folder: str | Path) -> HFModel:
    """Read a folder's config.json, on this rank alone; ValueError if missing, malformed or unsupported."""
    path = Path(folder) / CONFIG
    if not path.parent.is_dir():  # such as the Hub's name that a ported config has
        raise ValueError(
            f"{path.parent} is not a folder; nothing is fetched here, `hf download OWNER/NAME --local-dir FOLDER` makes one"
        )
    config = read_json(path)
    architecture = read_architecture(config, str(path))
    if architecture.obstacles:
        raise ValueError(f"{path}: {architecture.obstacles[0]} is not supported; {OTHER_CONVERTERS}")
    return HFModel(architecture, config)


def read_architecture(tree: Mapping[str, object], where: str = "config.json") -> Architecture:
    """Make an `Architecture` of config.json's entries.

    >>> sizes = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 96, "vocab_size": 61}
    >>> read_architecture({"model_type": "qwen3", **sizes, "rope_scaling": {"type": "yarn", "factor": 4.0}}).obstacles
    ("rope_type = 'yarn'",)

    Raises:
        ValueError: a family that is not known, a key that is missing or of another kind, two spellings of a key that differ.
    """
    keys = Keys(tree, where)
    family = str(tree.get("model_type"))
    if family not in FAMILIES:
        raise ValueError(
            f"{where}: model_type = {family!r} is not known; {nearest(family, FAMILIES)}; {OTHER_CONVERTERS}"
        )
    hidden, heads = keys.integer("hidden_size"), keys.integer("num_attention_heads")
    head_dim = _QWEN3_HEAD_DIM if family == "qwen3" else hidden // max(heads, 1)
    layers = keys.integer("num_hidden_layers")
    max_positions = keys.integer("max_position_embeddings", default=_MAX_POSITIONS.get(family, 32768))
    rope = read_rope(keys, max_positions)
    return Architecture(
        family,
        layers=layers,
        hidden=hidden,
        heads=heads,
        groups=keys.integer("num_key_value_heads", default=heads),
        head_dim=keys.integer("head_dim", default=head_dim),
        ffn=keys.integer("intermediate_size"),
        vocab=keys.integer("vocab_size"),
        tied=keys.flag("tie_word_embeddings"),
        norm_epsilon=keys.number("rms_norm_eps", 1e-6),
        max_positions=max_positions,
        rope_theta=rope.theta,
        rope_scaling=rope.scaling,
        qkv_bias=family == "qwen2" or keys.flag("attention_bias"),
        qk_norm=family.startswith("qwen3"),
        experts=_experts(keys) if family == "qwen3_moe" else None,
        aux_loss=keys.number("router_aux_loss_coef", 0.001) if family == "qwen3_moe" else 0.0,
        obstacles=(*rope.obstacles, *window_obstacles(keys, family, layers, max_positions), *_others(keys, family)),
    )


def _others(keys: Keys, family: str) -> list[str]:
    found = [f"{name} = true" for name in ("attention_bias", "mlp_bias") if keys.flag(name)]
    act = keys.tree.get("hidden_act", "silu")
    if act != "silu":
        found.append(f"hidden_act = {act!r}")
    found += [name for name in _QUANTISED if keys.tree.get(name) is not None]
    if keys.mapping("per_layer_config"):
        found.append("per_layer_config")
    if family == "qwen3_moe" and (
        keys.integer("decoder_sparse_step", default=1) != 1 or keys.tree.get("mlp_only_layers")
    ):
        found.append("dense layers among the experts (decoder_sparse_step, mlp_only_layers)")
    return found


def _experts(keys: Keys) -> Experts:
    spellings = ("num_experts", "num_local_experts")
    agreed(keys.where, {name: keys.tree.get(name) for name in spellings})
    return Experts(
        keys.integer(*spellings),
        keys.integer("moe_intermediate_size"),
        keys.integer("num_experts_per_tok"),
        keys.flag("norm_topk_prob"),
    )
