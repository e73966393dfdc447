"""Reports of ports: nothing is left out, and each key is named once."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from parallel_rl.cli import main
from parallel_rl.port.options import options_of
from parallel_rl.port.report import KINDS
from tests.port.test_nemo_rl import NEMO
from tests.port.test_port import NEMO_PPO, VERL, VERL_PPO


def leaves(tree: object, path: str = "") -> list[str]:
    if not isinstance(tree, dict) or not tree:
        return [path]
    return [leaf for key, item in tree.items() for leaf in leaves(item, f"{path}.{key}" if path else key)]


@pytest.mark.parametrize("config", [NEMO, NEMO_PPO, VERL, VERL_PPO])
def test_every_key_is_named_once(config: dict, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(config))
    report = tmp_path / "report.jsonl"
    assert main(["port", str(tmp_path / "run.yaml"), "--report", str(report)]) == 0
    rows = [json.loads(line) for line in report.read_text().splitlines()]
    assert {*rows[0]} == {"key", "value", "kind", "ours", "why"} and {row["kind"] for row in rows} <= {*KINDS}
    for leaf in leaves(config):
        [row] = [row for row in rows if f"{leaf}.".startswith(f"{row['key']}.")]
        assert row["why"] or row["ours"]
    said = capsys.readouterr().err.splitlines()
    assert said[-1].startswith(f"{len(leaves(config))} keys: ")
    for row in rows:
        assert any(f" {row['key']}" in line for line in said)


def test_a_report_that_cannot_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(NEMO))
    assert main(["port", str(tmp_path / "run.yaml"), "--report", str(tmp_path / "none" / "r")]) == 2
    assert "--report" in capsys.readouterr().err


def test_a_carried_key_stands_in_ours() -> None:
    """ "carried" is said of a key whose value our config has, and of no other."""
    for config in (NEMO, NEMO_PPO, VERL, VERL_PPO):
        ported = options_of(config)
        for row in ported.rows:
            at: object = ported.config
            for name in row.ours.split(".") if row.kind == "carried" else ():
                assert isinstance(at, dict) and name in at, row
                at = at[name]


def test_null_where_a_run_needs_a_value_is_the_users_to_set() -> None:
    nulls = {
        "actor_rollout_ref": {"model": {"path": None, "tokenizer_path": None}},
        "data": {"train_files": None}, "trainer": {"test_freq": -1},
    }  # fmt: skip
    kinds = {row.key: row.kind for row in options_of(nulls).rows}
    assert {kinds[f"actor_rollout_ref.model.{key}"] for key in ("path", "tokenizer_path")} == {"yours"}
    assert kinds["data.train_files"] == "yours"
    assert {row.ours: row.kind for row in options_of({"grpo": {}, "policy": {"model_name": None}}).rows}[
        "model.hf"
    ] == "yours"


def test_the_best_checkpoint_of_a_run_without_checkpoints() -> None:
    best = {"enabled": False, "metric_name": "val:accuracy", "higher_is_better": True}
    rows = options_of({"grpo": {}, "policy": {}, "checkpointing": best}).rows
    assert {row.kind for row in rows if row.key.endswith(("metric_name", "better"))} == {"no_effect"}
