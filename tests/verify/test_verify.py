"""`parallel-rl verify`: what it says, how it exits, what it writes; on this machine and inside torchrun."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from parallel_rl.cli import main
from parallel_rl.hosts.registry import FRAMEWORKS, part
from parallel_rl.verify.words import of_words
from tests.forked import command, run_ranks
from tests.launch import UNCOMPILED

ROOT = Path(__file__).parents[2]
LAYOUTS = ["--layouts", "dp=1,2", "packing=packed"]


def test_a_right_loss_passes_and_a_wrong_one_does_not(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page, file = tmp_path / "law.html", tmp_path / "law.json"
    losses = ["--loss", "nll", "--loss", "tests.testing.planted:LocalTokens"]
    assert main(["verify", *losses, *LAYOUTS, "--json", str(file), "--html", str(page)]) == 1
    said = capsys.readouterr().out
    assert "1 of 2 losses obey the law" in said and "data: local denominator" in said
    assert re.findall(r"^(\d/2 .*) \(\d+\.\d s\)$", said, re.M) == ["1/2 nll: ok", "2/2 LocalTokens: local denominator"]
    assert "divide a sum by the global count" in said
    found = json.loads(file.read_text())
    assert [one["ok"] for one in found["losses"]] == [True, False] and not found["ok"]
    [finding] = found["losses"][1]["findings"]
    assert (finding["fault"], finding["axis"]) == ("local denominator", "data")
    html = page.read_text()
    assert "local denominator" in html and "http" not in html.replace("http-equiv", "") and "<script" not in html


def test_options_and_json_on_the_standard_output(capsys: pytest.CaptureFixture[str]) -> None:
    options = '{"aggregation": "seq-mean-token-mean"}'
    assert main(["verify", "--loss", "nll", "--options", options, *LAYOUTS, "--json", "-"]) == 0
    [one] = json.loads(capsys.readouterr().out)["losses"]
    assert one["ok"] and len(one["layouts"]) == 2


def test_the_loss_of_a_config(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("megatron.core")
    assert main(["verify", "--config", str(ROOT / "configs/grpo_arithmetic.yaml"), *LAYOUTS]) == 0
    assert "1 of 1 losses obey the law" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--loss", "nlll"], "'nlll'"),
        (["--loss", "no_such_module:Loss"], "no_such_module cannot be imported"),
        (["--loss", "tests.testing.exits:Loss"], "cannot be imported: SystemExit: 0"),
        (["--loss", "tests.testing.planted:Nothing"], "has no 'Nothing'"),
        (["--loss", "tests.testing.planted:LocalToken"], "did you mean 'LocalTokens'?"),
        (["--loss", "tests.testing.broken_losses:not_a_loss"], "3 is not a loss"),
        (["--loss", "tests.testing.broken_losses:objective"], 'by @register_objective("objective", '),
        (
            ["--loss", "tests.testing.broken_losses:objective", "--fields", "advantages"],
            "objective(logprobs, batch) does not",
        ),
        (["--loss", "nll", "--options", "{"], "is not JSON"),
        (["--loss", "nll", "--options", '{"agregation": 1}'], "aggregation"),
        (["--loss", "nll", "--layouts", "tp=16"], "this machine starts 8 at most"),
        (["--loss", "nll", "--layouts", "pp=2"], "add --through megatron"),
        (["--loss", "nll", "--layouts", "tp=0"], "positive number"),
        (["--loss", "nll", "--timeout", "0"], "--timeout 0"),
        (["--loss", "nll", "--timeout", "inf"], "--timeout inf"),
        (["--loss", "nll", "--html", "/"], "/ is a folder"),
        (["--loss", "nll", "--html", "/no/such/folder/x.html"], "there is no folder"),
        (["--config", "none.yaml"], "none.yaml"),
        (["surplus"], "'surplus'"),
    ],
)
def test_bad_input_is_an_error_in_one_line(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", *arguments]) == 2
    error = capsys.readouterr().err
    assert said in error and error.startswith("parallel-rl: error") and error.count("\n") == 1


@pytest.mark.slow
def test_a_rank_that_dies_is_a_report_and_leaves_nothing(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "parallel_rl.cli", "verify", "--loss", "tests.testing.broken_losses:Dies"]
    marker = f"VERIFY_TEST={tmp_path}"
    env = {**os.environ, "PYTHONPATH": str(ROOT), "VERIFY_TEST": str(tmp_path), **UNCOMPILED}
    done = subprocess.run([*command, *LAYOUTS], cwd=ROOT, env=env, text=True, capture_output=True, timeout=240)
    assert done.returncode == 1 and "exit code 7" in done.stdout, done.stderr
    deadline = time.monotonic() + 10
    while _with_environment(marker) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert _with_environment(marker) == []


def _with_environment(marker: str) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if marker.encode() in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
            except OSError:
                continue
    return found


@pytest.mark.slow
def test_inside_torchrun() -> None:
    """The job's own ranks and groups; the job's status is that of the ranks, and its output has the report."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **UNCOMPILED}
    words = [*launcher, "-m", "parallel_rl.cli", "verify", "--loss", "nll", "--layouts", "cp=2", "tp=1"]
    done = subprocess.run(words, cwd=ROOT, env=env, text=True, capture_output=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert "1 of 1 losses obey the law" in done.stdout
    assert "no valid token" not in done.stderr  # its own batches have empty rows on purpose


@pytest.mark.slow
def test_on_the_megatron_groups_of_a_job(tmp_path: Path) -> None:
    """Every rank exits alike, and not before the report is out."""
    words = ["verify", "--loss", "tests.testing.planted:ContextAveraged", "--layouts", "cp=2", "tp=1"]
    done = run_ranks(tmp_path, command, [*words, "--through", "megatron"])
    assert done.statuses == [1, 1], done.stderr
    assert "gradient averaged over context ranks" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    ("loss", "said"),
    [
        ("ExitsOnOneRank", "rank 1: SystemExit: 0"),  # that status 0 is no success
        ("Hangs", "Hangs on one process"),  # the collective's timeout, or on a busy machine the bound behind it
        ("HangsAlone", "HangsAlone on one process did not come back in 12 s"),
    ],
)
def test_a_job_ends_in_time(loss: str, said: str, tmp_path: Path) -> None:
    """Collectives of every group end with the timeout, and a rank that none waits for ends itself."""
    words = ["verify", "--loss", f"tests.testing.broken_losses:{loss}", "--timeout", "12", "--layouts", "dp=2"]
    done = run_ranks(tmp_path, command, words)
    assert done.statuses == [1, 1] and said in done.stdout + done.stderr, done


def test_layouts_are_every_combination() -> None:
    found = of_words(["tp=1,2", "cp=1,2", "cp_layout=zigzag,contiguous"])
    assert [(one.tp, one.cp, one.cp_layout) for one in found] == [
        (tp, *context) for tp in (1, 2) for context in ((1, "zigzag"), (2, "zigzag"), (2, "contiguous"))
    ]


HOSTED = [
    *((host, "policy", "{}") for host in ("nemo_rl", "verl", "slime", "trl", "skyrl", "torchtitan")),
    ("transformers", "nll", "{}"),
    ("verl", "policy", '{"ratio_level": "sequence-mean", "aggregation": "constant-length", "max_length": 7}'),
    ("slime", "policy", '{"ratio_level": "sequence-mean", "aggregation": "seq-mean-token-mean"}'),
    ("nemo_rl", "dpo", "{}"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("host", "loss", "options"), HOSTED)
def test_through_a_host(host: str, loss: str, options: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A host's adapter and its counterpart, which multiplies what the host does, give the loss of one process."""
    arguments = [
        "--loss",
        loss,
        "--options",
        options,
        "--through",
        host,
        "--layouts",
        "dp=2",
        "micro=3",
        "packing=padded",
    ]
    assert main(["verify", *arguments, "--json", "-"]) == 0
    [report] = json.loads(capsys.readouterr().out)["losses"]
    assert report["ok"] and len(report["layouts"]) == 1


def test_every_framework_has_its_parts() -> None:
    for name, framework in FRAMEWORKS.items():
        assert framework.law.startswith(name) and callable(part(framework.law).through)
        if framework.port is not None:
            port = part(framework.port)
            assert port.SECTIONS and not port.recognises({}) and callable(port.convert)


def test_a_fault_shows_through_a_host(capsys: pytest.CaptureFixture[str]) -> None:
    """The adapters hide nothing: a statistic of the micro-batch is found behind verl's call."""
    layouts = ["--layouts", "dp=2", "packing=padded"]
    assert main(["verify", "--loss", "tests.testing.planted:Whitened", "--through", "verl", *layouts]) == 1
    assert "Whitened through verl breaks the law" in capsys.readouterr().out


def test_hosts_that_cannot_be_fed(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, said in (
        (["--loss", "kto", "--through", "verl"], "which verl has no call for"),
        (["--through", "slime"], "--through slime needs --loss or --config"),
        (["--loss", "nll", "--through", "trl"], "takes the losses of GRPOTrainer"),
        (
            ["--loss", "tests.testing.planted:LocalTokens", "--through", "slime"],
            "is divided by neither the step's tokens",
        ),
    ):
        assert main(["verify", *arguments]) == 2
        assert said in capsys.readouterr().err


class _Pipe(io.RawIOBase):
    """A file that keeps what each write brings."""

    def __init__(self) -> None:
        self.chunks: list[str] = []

    def writable(self) -> bool:
        return True

    def write(self, data: Any, /) -> int:
        self.chunks.append(bytes(data).decode())
        return len(self.chunks[-1].encode())


@pytest.mark.slow
def test_a_line_comes_as_each_loss_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Through the buffer of a pipe, long before the table: a bare `verify` was silent for 40 s."""
    pipe = _Pipe()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BufferedWriter(pipe), encoding="utf-8"))
    assert main(["verify", "--loss", "nll", "--loss", "tests.testing.planted:LocalTokens", *LAYOUTS]) == 1
    assert re.fullmatch(r"1/2 nll: ok \(\d+\.\d s\)\n", pipe.chunks[0])
    assert re.fullmatch(r"2/2 LocalTokens: .*\n", pipe.chunks[1])
