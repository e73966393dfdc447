"""YAML files that extend each other, as plain mappings with absolute paths, and dotted overrides on them."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import yaml

from parallel_rl.config.shown import shown, without_private

Tree = dict[str, object]

# keys whose texts are paths, relative to the file's folder
_PATHS = (
    *(("data", source) for source in ("train", "held_out", "examples", "pairs", "answers", "solutions", "rollouts")),
    ("tokenizer", "hf"),
    ("model", "hf"),
    ("run", "init_from"),
    ("rl", "teacher"),
    ("distillation", "teacher"),
)


_DEEPEST, _MOST_NODES = 50, 100_000


class _Loader(yaml.SafeLoader):
    """Loader that rejects non-string and duplicate keys, and bounds depth and aliases."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.depth = 0
        self.sizes: dict[int, int] = {}  # of each node, aliases expanded

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        mark, alias = self.peek_event().start_mark, self.check_event(yaml.AliasEvent)
        self.depth += 1
        if self.depth > _DEEPEST:
            raise yaml.composer.ComposerError(None, None, f"nested deeper than {_DEEPEST} levels", mark)
        node = super().compose_node(parent, index)
        self.depth -= 1
        if node is None:
            return None
        if alias and id(node) not in self.sizes:
            raise yaml.composer.ComposerError(None, None, "an alias names what holds it", mark)
        parts = node.value if isinstance(node, yaml.SequenceNode) else []
        parts = [part for pair in node.value for part in pair] if isinstance(node, yaml.MappingNode) else parts
        self.sizes[id(node)] = 1 + sum(self.sizes[id(part)] for part in parts)
        if self.sizes[id(node)] > _MOST_NODES:
            raise yaml.composer.ComposerError(None, None, f"its aliases make more than {_MOST_NODES:,} values", mark)
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        seen = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise yaml.constructor.ConstructorError(None, None, "a key must be a text", key.start_mark)
            if key.tag != "tag:yaml.org,2002:merge" and key.value in seen and isinstance(key.value, str):
                raise yaml.constructor.ConstructorError(None, None, f"duplicate key {key.value!r}", key.start_mark)
            seen.add(key.value if isinstance(key.value, str) else None)
        return super().construct_mapping(node, deep)


def read_tree(path: Path) -> Tree:
    """Read a YAML file on top of the file that its key `extends` names, if any.

    Mappings are merged key by key, other values replaced. A mapping with another `name` replaces the whole one below it.
    Relative paths start at the folder of their file. ValueError: a missing or malformed file, circular `extends` or not a path.
    """
    tree: Tree = {}
    for _, layer in read_layers(path):
        tree = merged(tree, layer)
    return tree


def read_layers(path: Path) -> list[tuple[Path, Tree]]:
    """Read a YAML file and the files it extends, lowest first, each with its path; see `read_tree`."""
    return _read(path, ())


def merged(below: Mapping[str, object], above: Mapping[str, object]) -> Tree:
    """Merge `above` on top of `below`, see `read_tree`.

    >>> merged({"loss": {"name": "dpo", "beta": 0.1}, "steps": 5}, {"loss": {"beta": 0.2}})
    {'loss': {'name': 'dpo', 'beta': 0.2}, 'steps': 5}
    """
    out = dict(below)
    for key, value in above.items():
        old = out.get(key)
        if isinstance(old, Mapping) and isinstance(value, Mapping) and value.get("name") in (None, old.get("name")):
            value = merged(old, value)
        out[key] = value
    return out


def override(tree: Tree, arguments: Sequence[str]) -> None:
    """Set "--a.b", "value" or "--a.b=value" (YAML) in `tree`; paths start at the working folder.

    >>> tree = {"rl": {"steps": 5}}
    >>> override(tree, ["--rl.steps", "7", "--run.dir=here"])
    >>> tree
    {'rl': {'steps': 7}, 'run': {'dir': 'here'}}

    ValueError: an override without a value, or below a value.
    """
    for dotted, value in _pairs(arguments):
        keys = dotted.split(".")
        leaf: Tree = {keys[-1]: value}
        for path in _PATHS:
            if path[: len(keys)] == tuple(keys):  # a path, or a section with some
                _resolve(leaf, path[len(keys) - 1 :], Path.cwd())
        _set(tree, dotted, leaf[keys[-1]])


def parsed(text: str) -> object:
    """Read a YAML text; ValueError if malformed, too deep or too large, also for PyYAML's other errors."""
    try:
        return yaml.load(text, _Loader)  # nosec B506 # a SafeLoader
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        at = f" (line {mark.line + 1}, column {mark.column + 1})" if mark else ""
        raise ValueError(f"{error.problem or error.context}{at}") from error
    except (yaml.YAMLError, ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        raise ValueError(str(error)) from error


def _read(path: Path, seen: tuple[Path, ...]) -> list[tuple[Path, Tree]]:
    if path.is_dir():
        raise ValueError(f"{path.absolute()} is a folder; a config file is needed" + _because(seen))
    if not path.exists():
        raise ValueError(f"the config file {path.absolute()} does not exist" + _because(seen))
    if path.suffix in (".jsonl", ".parquet"):
        raise ValueError(f"{path} holds data; name a config, and pass the data as --data.train {path}")
    try:
        tree = parsed(path.read_text(encoding="utf-8"))
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not valid YAML: no UTF-8 ({error.reason} at byte {error.start})") from None
    except ValueError as error:
        raise ValueError(f"{path} is not valid YAML: {error}") from None
    if not isinstance(tree, dict):
        kind = {type(None): "nothing", str: "a text", list: "a list"}.get(
            type(tree), f"a value of type {type(tree).__name__}"
        )
        raise ValueError(f"{path} holds {kind}; a mapping of sections is needed")
    for keys in _PATHS:
        _resolve(tree, keys, path.parent.resolve())
    base = tree.pop("extends", None)
    if base is None:
        return [(path, tree)]
    if not isinstance(base, str):
        raise ValueError(f"{path}: extends = {base!r} is not valid; the path of a YAML file is needed")
    chain = (*seen, path.resolve())
    below = (path.parent / base).resolve()
    if below in chain:
        raise ValueError(
            f"{path}: extends = {base!r} closes a circle: {' -> '.join(item.name for item in (*chain, below))}"
        )
    return [*_read(below, chain), (path, tree)]


def _because(seen: tuple[Path, ...]) -> str:
    return f"; {seen[-1]} extends it" if seen else ""


def _resolve(tree: Tree, keys: Sequence[str], folder: Path) -> None:
    for key in keys[:-1]:
        below = tree.get(key)
        if not isinstance(below, dict):
            return
        tree = below
    value = tree.get(keys[-1])
    if isinstance(value, str):
        tree[keys[-1]] = os.path.normpath(folder / value)
    elif isinstance(value, list):
        tree[keys[-1]] = [os.path.normpath(folder / item) if isinstance(item, str) else item for item in value]
    elif isinstance(value, dict) and "dataset" in value:
        name = value["dataset"]  # of the hub, unless it is there
        if isinstance(name, str) and (folder / name).exists():
            value["dataset"] = os.path.normpath(folder / name)
    elif isinstance(value, dict):
        for key in value:
            _resolve(value, (key,), folder)


def _pairs(arguments: Sequence[str]) -> list[tuple[str, object]]:
    pairs: list[tuple[str, object]] = []
    items = list(arguments)
    while items:
        name = items.pop(0)
        if not name.startswith("--") or len(name) == 2:
            instead = f"--{name}" if "=" in name else "--section.key value"
            raise ValueError(f"{shown(name)} is not an override; write {without_private(instead)}")
        name, equals, text = name[2:].partition("=")
        if not equals:
            if not items or items[0].startswith("--"):
                raise ValueError(f"the override --{name} has no value; write --{name} value")
            text = items.pop(0)
        if not all(name.split(".")):
            raise ValueError(f"the override --{name} lacks a name before, between or after its dots")
        try:
            pairs.append((name, _value(text)))
        except ValueError as error:
            problem = getattr(error.__cause__, "problem", "") or ""
            why = f": {problem}" if "duplicate key" in problem else ""
            raise ValueError(f"the value of --{name}, {shown(text)}, is not valid YAML{why}") from None
    return pairs


def _value(text: str) -> object:
    """Read a YAML value; a plain text keeps its blanks and its "#"."""
    if text[:1] in ("*", "%", "@", "`"):  # an alias of nothing, or reserved: a text such as *.jsonl
        return text
    value = parsed(text)
    plain = text.lstrip()[:1] not in ("'", '"', "|", ">", "!", "&")
    return text if plain and (isinstance(value, str) or (value is None and ("#" in text or text.isspace()))) else value


def _set(tree: Tree, dotted: str, value: object) -> None:
    *parents, last = dotted.split(".")
    for depth, parent in enumerate(parents):
        below = tree.get(parent)
        if below is None:
            below = tree[parent] = {}
        if not isinstance(below, dict):
            raise ValueError(f"--{dotted}: {'.'.join(parents[: depth + 1])} = {shown(below)} is a value, not a section")
        tree = below
    tree[last] = value
