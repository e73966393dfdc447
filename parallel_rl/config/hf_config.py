"""config.json of Hugging Face folders, as transformers 4 and 5 write it.

Two keys that set one value must agree: transformers prefers one of them in silence.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, TypeVar

from parallel_rl.config.architecture import FAMILIES, OTHER_CONVERTERS, Architecture, Experts, RopeScaling
from parallel_rl.config.strict import nearest

T = TypeVar("T")


def agreed(where: str, values: Mapping[str, T | None]) -> T | None:
    """Return the value of a key that may stand under several names; null counts as absent.

    >>> agreed("config.json", {"num_experts": None, "num_local_experts": 8})
    8

    ValueError if values differ: which of them transformers takes depends on its version.
    """
    present = {name: value for name, value in values.items() if value is not None}
    for (first, value), (second, other) in zip(present.items(), list(present.items())[1:], strict=False):
        if value != other:
            raise ValueError(
                f"{where}: {first} = {value!r} and {second} = {other!r} differ; keep the one that is right"
            )
    return next(iter(present.values()), None)


class Keys:
    """Typed look-ups whose errors name file and key; `asked` collects the keys looked up."""

    def __init__(self, tree: Mapping[str, object], where: str) -> None:
        self.tree, self.where = tree, where
        self.asked: set[str] = set()

    def _get(self, name: str) -> object:
        self.asked.add(name)
        return self.tree.get(name)

    def integer(self, *names: str, default: int | None = None) -> int:
        """Return the integer under the first of `names` that is present and not null."""
        for name, value in [(name, self._get(name)) for name in names]:
            if value is not None:
                if isinstance(value, bool) or not isinstance(value, int):
                    raise ValueError(f"{self.where}: {name} = {value!r} must be an integer")
                return value
        if default is None:
            raise ValueError(f"{self.where} lacks {names[0]}")
        return default

    def number(self, name: str, default: float | None = None) -> float:
        value = self._get(name)
        if value is None and default is not None:
            return default
        if value is None:
            raise ValueError(f"{self.where} lacks {name}")
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError(f"{self.where}: {name} = {value!r} must be a number")
        return float(value)

    def flag(self, name: str, default: bool = False) -> bool:
        value = self._get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise ValueError(f"{self.where}: {name} = {value!r} must be true or false")
        return value

    def text(self, name: str, default: str) -> str:
        value = self._get(name)
        if value is None:
            return default
        if not isinstance(value, str):
            raise ValueError(f"{self.where}: {name} = {value!r} must be a text")
        return value

    def mapping(self, name: str) -> Mapping[str, object]:
        """Return the mapping under `name`, empty if absent."""
        value = self._get(name)
        if value is not None and not isinstance(value, Mapping):
            raise ValueError(f"{self.where}: {name} = {value!r} must be a mapping")
        return value or {}


_THETA, _WINDOW, _MAX_WINDOW_LAYERS = 10000.0, 4096, 28  # transformers' defaults
_ORIGINAL = "original_max_position_embeddings"


class Rope(NamedTuple):
    """Base and scaling of rotary positions, and their unsupported settings."""

    theta: float
    scaling: RopeScaling | None
    obstacles: tuple[str, ...]


def read_rope(keys: Keys, max_positions: int) -> Rope:
    """Read `rope_scaling`, else `rope_parameters`, as transformers does.

    >>> read_rope(Keys({"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}}, "config.json"), 2048)
    Rope(theta=500000.0, scaling=None, obstacles=("rope_type = 'linear'",))

    ValueError: both differ in effect, or a key inside differs from the same key outside.
    """
    sections = {name: keys.mapping(name) for name in ("rope_scaling", "rope_parameters")}
    ropes = {name: _section(keys, name, section, max_positions) for name, section in sections.items() if section}
    if len(set(ropes.values())) > 1:
        raise ValueError(
            f"{keys.where}: rope_scaling = {dict(sections['rope_scaling'])} and rope_parameters = "
            f"{dict(sections['rope_parameters'])} differ, and transformers reads rope_scaling alone; keep the one that is "
            "right, with its rope_theta"
        )
    return next(iter(ropes.values()), None) or _section(keys, "rope_parameters", {}, max_positions)


def _section(keys: Keys, name: str, section: Mapping[str, object], max_positions: int) -> Rope:
    inside = Keys(section, f"{keys.where}: {name}")

    def number(key: str, default: float) -> float:
        places = {f"{name}.{key}": inside, key: keys}
        value = agreed(
            keys.where, {place: part.number(key) for place, part in places.items() if part.tree.get(key) is not None}
        )
        return default if value is None else value

    theta = number("rope_theta", _THETA)
    kind = agreed(inside.where, {key: section.get(key) for key in ("rope_type", "type")}) or "default"
    obstacles = [f"{key} = {dict(value)}" for key, value in section.items() if isinstance(value, Mapping)]
    for part in (inside, keys):
        if part.number("partial_rotary_factor", 1.0) != 1.0:
            obstacles.append(f"partial_rotary_factor = {part.tree['partial_rotary_factor']}")
    if kind == "default":
        if inside.number("factor", 1.0) != 1.0:
            obstacles.append(f"{name} with a factor and no rope_type")
        return Rope(theta, None, tuple(obstacles))
    if kind != "llama3":
        return Rope(theta, None, (*obstacles, f"rope_type = {kind!r}"))
    scaling = RopeScaling(
        factor=inside.number("factor"),
        low_freq_factor=inside.number("low_freq_factor"),
        high_freq_factor=inside.number("high_freq_factor"),
        original_max_position_embeddings=int(number(_ORIGINAL, max_positions)),
    )
    return Rope(theta, scaling, tuple(obstacles))


def window_obstacles(keys: Keys, family: str, layers: int, max_positions: int) -> list[str]:
    """List the settings that hide earlier tokens: a sliding window, or another kind of layer.

    mistral slides in every layer, qwen3_moe with `use_sliding_window`. qwen2 and qwen3 then slide in the layers of
    `layer_types`, else from `max_window_layers` on, as in transformers. ValueError: `layer_types` is not one text per layer.
    """
    kinds = keys.tree.get("layer_types")
    if kinds is not None and not (isinstance(kinds, list) and len(kinds) == layers):
        raise ValueError(f"{keys.where}: layer_types = {kinds!r} must be a list of num_hidden_layers = {layers} texts")
    others = {str(kind) for kind in kinds or () if kind not in ("full_attention", "attention")}
    first = keys.integer("max_window_layers", default=_MAX_WINDOW_LAYERS if kinds is None else layers)
    if family in ("qwen2", "qwen3"):
        slides = keys.flag("use_sliding_window") and (bool(others) or first < layers)
    else:
        slides = family == "mistral" or (family == "qwen3_moe" and keys.flag("use_sliding_window"))
    window = keys.tree.get("sliding_window", _WINDOW) if slides else None
    if window is not None and not (isinstance(window, int) and window >= max_positions):
        return [f"sliding_window = {window} below max_position_embeddings = {max_positions}"]
    return [f"layer_types with {kind!r}" for kind in sorted(others) if not slides or kind != "sliding_attention"]


CONFIG = "config.json"
_QWEN3_HEAD_DIM = 128  # what transformers assumes where config.json names none
_MAX_POSITIONS = {"llama": 2048, "mistral": 131072}  # of the others: 32768
_QUANTISED = ("quantization_config", "quantization", "compression_config")  # the last two: MLX's and an older name


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
    """Return whether a folder has a config.json, as Hugging Face's have."""
    return (Path(folder) / CONFIG).is_file()


def read_hf(folder: str | Path) -> HFModel:
    """Read a folder's config.json, on this rank alone; ValueError if missing, malformed or unsupported."""
    path = Path(folder) / CONFIG
    if not path.parent.is_dir():  # such as a name on the Hub, from a ported config
        raise ValueError(
            f"{path.parent} is not a folder, and nothing is downloaded; run `hf download OWNER/NAME --local-dir FOLDER`, and "
            "name FOLDER"
        )
    config = read_json(path)
    architecture = read_architecture(config, str(path))
    if architecture.obstacles:
        raise ValueError(f"{path}: {architecture.obstacles[0]} is not supported; {OTHER_CONVERTERS}")
    return HFModel(architecture, config)


def read_architecture(tree: Mapping[str, object], where: str = "config.json") -> Architecture:
    """Build an `Architecture` from config.json's entries.

    >>> sizes = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 96, "vocab_size": 61}
    >>> read_architecture({"model_type": "qwen3", **sizes, "rope_scaling": {"type": "yarn", "factor": 4.0}}).obstacles
    ("rope_type = 'yarn'",)

    ValueError: an unknown family, a missing or mistyped key, two spellings of a key that differ.
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
    others = [f"{name} = true" for name in ("attention_bias", "mlp_bias") if keys.flag(name)]
    act = keys.tree.get("hidden_act", "silu")
    if act != "silu":
        others.append(f"hidden_act = {act!r}")
    others += [name for name in _QUANTISED if keys.tree.get(name) is not None]
    if keys.mapping("per_layer_config"):
        others.append("per_layer_config")
    if family == "qwen3_moe" and (
        keys.integer("decoder_sparse_step", default=1) != 1 or keys.tree.get("mlp_only_layers")
    ):
        others.append("dense layers among the experts (decoder_sparse_step, mlp_only_layers)")
    return others


def _experts(keys: Keys) -> Experts:
    spellings = ("num_experts", "num_local_experts")
    agreed(keys.where, {name: keys.tree.get(name) for name in spellings})
    return Experts(
        keys.integer(*spellings),
        keys.integer("moe_intermediate_size"),
        keys.integer("num_experts_per_tok"),
        keys.flag("norm_topk_prob"),
    )
