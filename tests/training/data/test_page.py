"""docs/data.md: each kind of data has a config that `check` accepts and that trains."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from parallel_rl.cli import main
from parallel_rl.testing.pool import run_world
from tests.training.helpers import ROOT, train_rows

PAGE = (ROOT / "docs" / "data.md").read_text(encoding="utf-8")
KINDS = PAGE.split("\n## A complete config for each kind of data\n")[1].split("\n## ")[0].split("\n### ")[1:]

SHORTER = {"train": ("rl", 2), "pairs": ("preference", 2), "answers": ("preference", 2)}  # the page's configs have 10


@pytest.mark.slow
def test_each_config_of_the_page_trains_on_its_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """In the order of the page, since the run that distills reads the checkpoint of SFT."""
    pytest.importorskip("megatron.core")
    monkeypatch.chdir(tmp_path)
    sources = set()
    for kind in KINDS:
        [(records, config)] = re.findall(r"^```json\n(.*?)^```\n+```yaml\n(.*?)^```", kind, re.M | re.S)
        [(source, file)] = [pair for pair in yaml.safe_load(config)["data"].items() if pair[1].endswith(".jsonl")]
        sources.add(source)
        Path(file).write_text(records)
        Path("run.yaml").write_text(config)
        assert records.count("\n") == 2
        assert main(["check", "run.yaml", "--world", "1"]) == 0, capfd.readouterr().err
        folder = yaml.safe_load(config)["run"]["dir"]
        arguments = [str(tmp_path / "run.yaml"), f"--run.dir={tmp_path / folder}"]
        section, steps = SHORTER.get(source, ("", 10))
        [rows] = run_world(1, train_rows, arguments + [f"--{section}.steps={steps}"] * bool(section))
        assert rows[-1]["step"] == steps, kind
    assert sources == {"train", "pairs", "answers", "examples", "solutions"}
