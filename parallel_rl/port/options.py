"""Another framework's config in our keys: read with its references, and converted by the framework that recognises it."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping
from pathlib import Path

from parallel_rl.config.yaml_files import parsed
from parallel_rl.hosts.ported import Ported, Tree
from parallel_rl.hosts.registry import FRAMEWORKS, part


def options_of(host_config: Mapping[str, object]) -> Ported:
    """Convert a resolved config of NeMo-RL or verl to our keys.

    >>> ported = options_of({"policy": {}, "dpo": {"reference_policy_kl_penalty": 0.1, "sft_average_log_probs": True}})
    >>> ported.config["preference"]["loss"]["options"]
    {'reference_policy_kl_penalty': 0.1}
    >>> ported.lines()[0]
    'dropped   dpo.sft_average_log_probs = True has no effect with sft_loss_weight = 0'

    Raises:
        ValueError: a config of neither; options that contradict each other there, too.
    """
    if not isinstance(host_config, Mapping):
        raise ValueError(f"a config must be a mapping, got {type(host_config).__name__}")
    ports = [part(framework.port) for framework in FRAMEWORKS.values() if framework.port]
    for port in ports:
        if port.recognises(host_config):
            ported: Ported = port.convert(host_config)
            return ported
    raise ValueError(
        f"the config has the sections {', '.join(map(str, host_config)) or 'none'}, which are of no framework known here; "
        f"supported are {' and '.join(port.SECTIONS for port in ports)}"
    )


_REFERENCE = re.compile(r"\$\{([.A-Za-z_][\w.]*)\}")
# a key and an optional default, which may be a reference
_SELECTED = re.compile(r"\$\{oc\.select:([.A-Za-z_][\w.]*)(?:,([^{}]*|\{\}|\s*\$\{.*\}\s*))?\}", re.DOTALL)
_INNER = re.compile(r"\$\{(?:(add|mul|div|max):)?([^{}:]*)\}")
_CALLS: Mapping[str, Callable[[float, float], float]] = {
    "add": operator.add, "mul": operator.mul, "div": operator.truediv, "max": max
}  # fmt: skip
# resolved references; None while one is being resolved
Known = dict[tuple[str, ...], tuple[object] | None]


def read_host_config(path: Path) -> Tree:
    """Read a YAML file, its `defaults` (NeMo-RL's way), and resolve references.

    Supported: ${a.b}, ${..b}, ${oc.select:a.b,c}, where c may be a reference, and of two numbers ${add:a,b}, ${mul:a,b},
    ${div:a,b}, ${max:a,b}. Other references (${oc.env:HOME}) stay as text. For verl pass a run's .hydra/config.yaml.

    Raises:
        ValueError: a missing or malformed file, circular `defaults`, a reference without target or to itself.
    """
    tree = _read(path, ())
    known: Known = {}
    return {key: _resolved(value, tree, (key,), known) for key, value in tree.items()}


def _read(path: Path, above: tuple[Path, ...]) -> Tree:
    path = path.resolve()
    if path in above:
        raise ValueError(f"{path}: its defaults lead back to itself")
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from None
    try:
        tree = parsed(text)
    except ValueError as error:
        raise ValueError(f"{path} is not YAML: {error}") from None
    if not isinstance(tree, dict):
        raise ValueError(f"{path} must hold a mapping, got {type(tree).__name__}")
    below = tree.pop("defaults", [])
    tree_below: Tree = {}
    for name in [below] if isinstance(below, str) else below or []:
        if isinstance(name, str) and name.endswith((".yaml", ".yml")):
            tree_below = _joined(tree_below, _read(path.parent / name, (*above, path)))
        elif name != "_self_":
            raise ValueError(
                f"{path}: defaults names {name!r}, a group that Hydra joins; give the joined config, which verl writes to "
                ".hydra/config.yaml, or `python -m verl.trainer.main_ppo --cfg job --resolve`"
            )
    return _joined(tree_below, tree)


def _joined(below: Mapping[str, object], above: Mapping[str, object]) -> Tree:
    out = dict(below)
    for key, value in above.items():
        old = out.get(key)
        out[key] = _joined(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return out


def _resolved(value: object, tree: Tree, place: tuple[str, ...], known: Known) -> object:
    if isinstance(value, Mapping):
        return {key: _resolved(item, tree, (*place, str(key)), known) for key, item in value.items()}
    if isinstance(value, list):
        return [_resolved(item, tree, (*place, "-"), known) for item in value]
    if not isinstance(value, str):
        return value
    selected = _SELECTED.fullmatch(value)
    if selected is not None and not _balances(selected[2] or ""):  # the text holds several references
        selected = None
    if selected is not None and not _holds(tree, _keys(selected[1], place)):
        return None if selected[2] is None else _resolved(parsed(selected[2]), tree, place, known)
    reference = _REFERENCE.fullmatch(value) or selected
    return _within(value, tree, place, known) if reference is None else _followed(reference[1], tree, place, known)


def _within(text: str, tree: Tree, place: tuple[str, ...], known: Known) -> object:
    """Resolve references and calls in a text, innermost first; unknown ones are kept."""
    is_reference, resolved = text.startswith("${"), text
    while (inner := _INNER.search(resolved)) is not None:
        if inner[1]:
            numbers = [_number(part) for part in inner[2].split(",")]
            operands = [x for x in numbers if x is not None]
            if len(operands) != 2 or len(numbers) != 2 or (inner[1] == "div" and operands[1] == 0):
                return text
            value: object = _CALLS[inner[1]](*operands)
        elif _REFERENCE.fullmatch(inner[0]) and _holds(tree, _keys(inner[2], place)):
            value = _followed(inner[2], tree, place, known)
        else:
            return text
        if isinstance(value, Mapping | list):
            return text
        resolved = f"{resolved[: inner.start()]}{value}{resolved[inner.end() :]}"
    number = _number(resolved) if is_reference else None
    return resolved if number is None else number


def _balances(text: str) -> bool:
    depth = 0
    for brace in re.findall(r"[{}]", text):
        depth += 1 if brace == "{" else -1
        if depth < 0:
            return False
    return depth == 0


def _keys(reference: str, place: tuple[str, ...]) -> list[str]:
    """Return a reference's absolute keys from `place`: one dot is its section, each more one level up."""
    name = reference.lstrip(".")
    dots = len(reference) - len(name)
    return [*(place[: len(place) - dots] if dots else ()), *name.split(".")]


def _number(text: str) -> int | float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return int(value) if value.is_integer() else value


def _holds(tree: Tree, keys: list[str]) -> bool:
    at: object = tree
    for key in keys:
        if not isinstance(at, Mapping) or key not in at:
            return False
        at = at[key]
    return True


def _followed(reference: str, tree: Tree, place: tuple[str, ...], known: Known) -> object:
    """Return the value of ${reference} at `place`."""
    keys = tuple(_keys(reference, place))
    at: object = tree
    for key in keys:
        if not isinstance(at, Mapping) or key not in at:
            raise ValueError(f"{'.'.join(place)} = ${{{reference}}}: there is no {'.'.join(keys)}")
        at = at[key]
    if keys not in known:
        known[keys] = None
        known[keys] = (_resolved(at, tree, keys, known),)
    entry = known[keys]
    if entry is None:
        raise ValueError(f"{'.'.join(place)} = ${{{reference}}} leads to itself")
    return entry[0]
