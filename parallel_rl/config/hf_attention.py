"""Rotary positions and sliding windows of config.json, in transformers 4's keys and in 5's.

Two keys that set one value must agree: transformers prefers one of them in silence.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from parallel_rl.config.architecture import RopeScaling
from parallel_rl.config.hf_keys import Keys, agreed

_THETA, _WINDOW, _MAX_WINDOW_LAYERS = 10000.0, 4096, 28  # transformers' defaults
_ORIGINAL = "original_max_position_embeddings"


class Rope(NamedTuple):
    """Base and scaling of rotary positions, and what of them is not supported."""

    theta: float
    scaling: RopeScaling | None
    obstacles: tuple[str, ...]


def read_rope(keys: Keys, max_positions: int) -> Rope:
    """Read `rope_scaling`, or else `rope_parameters`; transformers has the same order.

    >>> read_rope(Keys({"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}}, "config.json"), 2048)
    Rope(theta=500000.0, scaling=None, obstacles=("rope_type = 'linear'",))

    Raises:
        ValueError: both are there and differ in effect, or a key inside differs from the same key outside.
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
    """List what hides a token from a later one.

    A sliding window below the longest sequence does, or another kind of layer.

    A mistral slides in every layer, a qwen3_moe with `use_sliding_window`. A qwen2 or qwen3 with it slides in the layers that
    `layer_types` lists, or from `max_window_layers` on; transformers reads the first where both are there.

    Raises:
        ValueError: `layer_types` is no list of one text per layer.
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
