"""config.yaml and those before it, where what stands in the folder is no config."""

from __future__ import annotations

from pathlib import Path

import pytest

from parallel_rl.training.checkpointing.resume import remove_configs, write_config


@pytest.mark.parametrize(
    ("before", "words"),
    [
        ("a: [1", "it is not valid YAML"),
        ("[" * 5000, "it is not valid YAML"),
        ("\0", "it is not valid YAML"),
        ("just a text", "all of it: just a text -> "),
        ("", "all of it: null -> "),
        ("rl: 3", "rl: 3 -> {steps: 2"),
        ("rl: {steps: 2, gone: 1, off: 1}\nrun: {}", "rl.gone: 1 -> (absent)"),
    ],
)
def test_a_config_that_someone_has_changed_is_kept_as_it_was(before: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(before)
    lines = write_config(tmp_path, {"rl": {"steps": 2, "off": True}, "run": {}})
    assert any(words in line for line in lines)
    assert (tmp_path / "config.1.yaml").read_text().split("\n", 1)[1] == before
    assert write_config(tmp_path, {"rl": {"steps": 2, "off": True}, "run": {}}) == []
    remove_configs(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["config.yaml"]


def test_many_differences_are_cut_off(tmp_path: Path) -> None:
    write_config(tmp_path, {str(number): 0 for number in range(100)})
    lines = write_config(tmp_path, {str(number): 1 for number in range(100)})
    assert len(lines) == 42 and lines[-1] == "  and 60 more"
