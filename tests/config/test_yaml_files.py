"""YAML that a stranger wrote to fill the memory, to end in a traceback or to run code: one line of error, at once."""

from __future__ import annotations

import itertools
import time
from pathlib import Path

import pytest

from parallel_rl.config.yaml_files import override, read_tree
from parallel_rl.training.data.datasets import braces

_NINE = "abcdefghi"
_BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{new}: &{new} [{', '.join([f'*{old}'] * 9)}]\n" for old, new in itertools.pairwise(_NINE)
)
_MERGES = "a: &a {k: 1}\n" + "".join(
    f"{new}: &{new} {{<<: [{', '.join([f'*{old}'] * 9)}]}}\n" for old, new in itertools.pairwise(_NINE)
)
HOSTILE = {
    "a list that holds itself": ("a: &a [1, *a]", "an alias names what holds it"),
    "a mapping that holds itself": ("a: &a {b: {c: *a}}", "an alias names what holds it"),
    "aliases of aliases": (_BOMB, "its aliases make more than 100,000 values"),
    "merges of merges": (_MERGES, "its aliases make more than 100,000 values"),
    "brackets": ("a: " + "[" * 200_000, "nested deeper than 50 levels"),
    "braces": ("a: " + "{a: " * 3000, "nested deeper than 50 levels"),
    "UTF-16": ("a: 1".encode("utf-16"), "no UTF-8"),
    "a NUL": (b"run: {dir: a\x00}", "#x0000"),
    "5,000 digits": ("a: " + "9" * 5000, "(4300"),
    "a list for a key": ("[1, 2]: 3", "a key must be a text"),
    "a day that is none": ("a: 2001-02-30", "day is out of range"),
    "a call": ("a: !!python/object/apply:os.system [id]", "could not determine a constructor"),
    "a false timestamp": ("a: !!timestamp x", "is not valid YAML"),
    "a false boolean": ("a: !!bool x", "is not valid YAML"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_yaml_is_one_error(tmp_path: Path, name: str) -> None:
    content, words = HOSTILE[name]
    path, began = tmp_path / "config.yaml", time.process_time()
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError, match="is not valid YAML") as refusal:
        read_tree(path)
    assert words in str(refusal.value) and len(str(refusal.value)) < 500
    if isinstance(content, str) and name != "merges of merges":
        with pytest.raises(ValueError, match="is not valid YAML"):
            override({}, ["--rl.steps", content.removeprefix("a: ") if "&" not in content else content])
    assert time.process_time() - began < 20


def test_anchors_and_merges_are_taken(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("rl: {optimizer: &adam {lr: 1.0e-3}}\nwarmup: {optimizer: {<<: *adam, betas: [0.9, 0.99]}}\n")
    assert read_tree(path)["warmup"] == {"optimizer": {"lr": 1e-3, "betas": [0.9, 0.99]}}


def test_braces_that_name_more_files_than_anybody_has() -> None:
    for pattern in ("{0..99999999}.jsonl", "{0..9}" * 9, "{0..9}{a,b" + ",c" * 200_000 + "}", "{0.." + "9" * 50 + "}"):
        with pytest.raises(ValueError, match="name more than 1,000,000 files"):
            braces(pattern)


@pytest.mark.parametrize("text", [" lead", "#abc", "a #b", " ", "*.jsonl", "@x", "%"])
def test_a_plain_text_of_an_override_is_kept_as_it_is(text: str) -> None:
    """YAML would eat the blank, take what follows # for a comment, and look for an anchor behind *."""
    tree: dict[str, object] = {}
    override(tree, ["--run.dir", text, "--rl.steps", "3", "--evaluation", "null"])
    assert tree == {"run": {"dir": text}, "rl": {"steps": 3}, "evaluation": None}
