"""config.json of Hugging Face folders, as transformers 4 and 5 write it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from parallel_rl.config.architecture import FAMILIES, OTHER_CONVERTERS, Architecture, Experts, RopeScaling
from parallel_rl.config.strict import nearest

CONFIG = "config.json"
_WINDOW, _QWEN3_HEAD_DIM = 4096, 128  # what transformers assumes where config.json names none


class Keys:
    """Typed look-ups that say which file lacks a key, or holds what in it; `asked` are the keys looked up so far."""

    def __init__(self, tree: Mapping[str, object], where: str) -> None:
        self.tree, self.where = tree, where
        self.asked: set[str] = set()

    def _get(self, name: str) -> object:
        self.asked.add(name)
        return self.tree.get(name)

    def integer(self, *names: str, default: int | None = None) -> int:
        """The integer under the first of `names` that is there and not null."""
        for name, value in [(name, self._get(name)) for name in names]:
            if value is not None:
                if isinstance(value, bool) or not isinstance(value, int):
                    raise ValueError(f"{self.where}: {name} = {value!r} must be an integer")
                return value
        if default is None:
            raise ValueError(f"{self.where} lacks {names[0]}")
        return default

    def number(self, name: str, default: float) -> float:
        """The number under `name`."""
        value = self._get(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError(f"{self.where}: {name} = {value!r} must be a number")
        return float(value)

    def flag(self, name: str, default: bool = False) -> bool:
        """The boolean under `name`."""
        value = self._get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise ValueError(f"{self.where}: {name} = {value!r} must be true or false")
        return value

    def text(self, name: str, default: str) -> str:
        """The text under `name`."""
        value = self._get(name)
        if value is None:
            return default
        if not isinstance(value, str):
            raise ValueError(f"{self.where}: {name} = {value!r} must be a text")
        return value

    def mapping(self, name: str) -> Mapping[str, object]:
        """The mapping under `name`, empty where it is not there."""
        value = self._get(name)
        if value is not None and not isinstance(value, Mapping):
            raise ValueError(f"{self.where}: {name} = {value!r} must be a mapping")
        return value or {}


def read_json(path: Path) -> dict[str, object]:
    """Read a JSON file that holds a mapping.

    Raises:
        ValueError: no such file, or it holds anything else.
    """
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
    """Whether a folder is one of Hugging Face's: it has a config.json."""
    return (Path(folder) / CONFIG).is_file()


def read_hf(folder: str | Path) -> HFModel:
    """Read a folder's config.json, on this rank alone.

    Raises:
        ValueError: it is missing or malformed, or describes a model that is not supported.
    """
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
        ValueError: a family that is not known, a key that is missing or of another kind.
    """
    keys = Keys(tree, where)
    family = str(tree.get("model_type"))
    if family not in FAMILIES:
        raise ValueError(
            f"{where}: model_type = {family!r} is not known; {nearest(family, FAMILIES)}; {OTHER_CONVERTERS}"
        )
    hidden, heads = keys.integer("hidden_size"), keys.integer("num_attention_heads")
    head_dim = _QWEN3_HEAD_DIM if family.startswith("qwen3") else hidden // max(heads, 1)
    theta, scaling, rope_obstacles = _rope(keys)
    max_positions = keys.integer("max_position_embeddings", default=2048)
    return Architecture(
        family,
        layers=keys.integer("num_hidden_layers"),
        hidden=hidden,
        heads=heads,
        groups=keys.integer("num_key_value_heads", default=heads),
        head_dim=keys.integer("head_dim", default=head_dim),
        ffn=keys.integer("intermediate_size"),
        vocab=keys.integer("vocab_size"),
        tied=keys.flag("tie_word_embeddings"),
        norm_epsilon=keys.number("rms_norm_eps", 1e-6),
        max_positions=max_positions,
        rope_theta=theta,
        rope_scaling=scaling,
        qkv_bias=family == "qwen2" or keys.flag("attention_bias"),
        qk_norm=family.startswith("qwen3"),
        experts=_experts(keys) if family == "qwen3_moe" else None,
        aux_loss=keys.number("router_aux_loss_coef", 0.001) if family == "qwen3_moe" else 0.0,
        obstacles=(*rope_obstacles, *_windows(keys, family, max_positions), *_others(keys, family)),
    )


def _rope(keys: Keys) -> tuple[float, RopeScaling | None, list[str]]:
    """Base, scaling and obstacles; transformers 5 keeps all under rope_parameters, 4 has two keys and once wrote `type`."""
    rope = keys.mapping("rope_parameters") or keys.mapping("rope_scaling")
    inside, outside = Keys(rope, f"{keys.where}: rope"), keys.number("rope_theta", 10000.0)
    theta = inside.number("rope_theta", outside)
    kind = rope.get("rope_type", rope.get("type")) or "default"
    obstacles = []
    for name, part in (("partial_rotary_factor", inside), ("partial_rotary_factor", keys)):
        if part.number(name, 1.0) != 1.0:
            obstacles.append(f"{name} = {part.tree[name]}")
    if kind == "default":
        return theta, None, obstacles
    if kind != "llama3":
        return theta, None, [*obstacles, f"rope_type = {kind!r}"]
    scaling = RopeScaling(
        factor=inside.number("factor", 8.0),
        low_freq_factor=inside.number("low_freq_factor", 1.0),
        high_freq_factor=inside.number("high_freq_factor", 4.0),
        original_max_position_embeddings=inside.integer("original_max_position_embeddings", default=8192),
    )
    return theta, scaling, obstacles


def _windows(keys: Keys, family: str, max_positions: int) -> list[str]:
    """Sliding windows that hide a token from another."""
    kinds = keys.tree.get("layer_types") or ()
    mixed = [kind for kind in kinds if kind != "full_attention"] if isinstance(kinds, list) else []
    active = family == "mistral" or (
        keys.flag("use_sliding_window")
        and keys.integer("max_window_layers", default=0) < keys.integer("num_hidden_layers")
    )
    window = keys.tree.get("sliding_window", _WINDOW) if active else None
    if window is not None and not (isinstance(window, int) and window >= max_positions):
        return [f"sliding_window = {window} below max_position_embeddings = {max_positions}"]
    return [f"layer_types with {mixed[0]!r}"] if mixed and not active else []


def _others(keys: Keys, family: str) -> list[str]:
    found = [f"{name} = true" for name in ("attention_bias", "mlp_bias") if keys.flag(name)]
    act = keys.tree.get("hidden_act", "silu")
    if act != "silu":
        found.append(f"hidden_act = {act!r}")
    if keys.tree.get("quantization_config") is not None:
        found.append("quantization_config")
    if family == "qwen3_moe" and (
        keys.integer("decoder_sparse_step", default=1) != 1 or keys.tree.get("mlp_only_layers")
    ):
        found.append("dense layers among the experts (decoder_sparse_step, mlp_only_layers)")
    return found


def _experts(keys: Keys) -> Experts:
    return Experts(
        keys.integer("num_experts", "num_local_experts"),
        keys.integer("moe_intermediate_size"),
        keys.integer("num_experts_per_tok"),
        keys.flag("norm_topk_prob"),
    )
