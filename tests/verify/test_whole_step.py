"""`parallel-rl verify --model`: docs/verify_step.md as it stands, bad input, and the ranks of a job."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from parallel_rl.cli import main
from tests.forked import command, run_ranks

pytest.importorskip("megatron.core")
ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "verify_step.md"
RIGHT = "tests.testing.whole_step.models"
PLANTED = "tests.testing.whole_step.planted"
COMMAND = ["verify", "--through", "megatron", "--model"]


@pytest.mark.slow
def test_the_page_shows_what_the_command_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The model with the fault and the same model without it, by the page's own code and command."""
    text = PAGE.read_text(encoding="utf-8")
    code, mark = re.findall(r"^```python\n(.*?)^```", text, re.M | re.S)
    line, wrong = re.findall(r"^```\nparallel-rl (verify .*?)\n(.*?)^```", text, re.M | re.S)[0]
    made = "        self.head_scale = torch.nn.Parameter(torch.ones(heads))\n"
    (tmp_path / "my_model.py").write_text(code)
    imported = "from megatron.core.tensor_parallel import set_tensor_model_parallel_attributes\n"
    (tmp_path / "my_marked_model.py").write_text(imported + code.replace(made, made + mark))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert main(line.split()) == 1
    said = capsys.readouterr().out
    assert _without_noise(said).startswith(_without_noise(wrong)), said
    assert main([word.replace("my_model", "my_marked_model") for word in line.split()]) == 0
    assert "the step is that of one process on 4 layouts" in capsys.readouterr().out


def _without_noise(text: str) -> str:
    """The text without seconds, and with numbers of one digit where rounding differs."""
    text = re.sub(r"\(\d+ s\)", "(s)", text)
    text = re.sub(r"\b\de[-+](\d\d)\b", lambda one: "small" if int(one[1]) > 9 or one[0] == "0e+00" else one[0], text)
    return re.sub(r" +", " ", re.sub(r"× 0\.99\d+", "× 0.99", text))


def test_a_script_by_its_callback_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    more = ["--model-config", f"{RIGHT}:dense_config", "--loss-callback", f"{PLANTED}:local_mean"]
    assert main([*COMMAND, f"{RIGHT}:provider", *more, "--layouts", "dp=2", "--json", "-"]) == 1
    [found] = json.loads(capsys.readouterr().out)["models"]
    assert not found["ok"] and [row["layout"] for row in found["layouts"]] == ["padded.mb4", "dp2.padded.mb4"]
    assert found["findings"][0]["factor"] == pytest.approx(2.05)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["none"], "--model none is not MODULE:OBJECT"),
        (["no_such_module:provider"], "no_such_module cannot be imported"),
        ([f"{RIGHT}:providr"], "did you mean 'provider'?"),
        ([f"{RIGHT}:provider"], "has no `config`; name it by --model-config"),
        ([f"{RIGHT}:provider", "--loss", "nll"], "--loss has no effect with --model"),
        (
            [f"{RIGHT}:provider", "--model-config", f"{RIGHT}:dense_config", "--layouts", "sp=yes"],
            "sp=yes is not valid",
        ),
        (
            [f"{RIGHT}:provider", "--model-config", f"{RIGHT}:dense_config", "--layouts", "tp=16"],
            "cannot be cut|8 at most",
        ),
        (
            [f"{RIGHT}:provider", "--model-config", f"{RIGHT}:dense_config", "--layouts", "vp=2"],
            "vp = 2 needs pp above 1",
        ),
    ],
)
def test_bad_input_is_an_error_in_one_line(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*COMMAND, *arguments]) == 2
    error = capsys.readouterr().err
    assert re.search(said, error) and error.startswith("parallel-rl: error") and error.count("\n") == 1, error


def test_parts_of_a_script_need_a_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "--loss", "nll", "--loss-callback", "a:b"]) == 2
    assert "--loss-callback has no effect without --model" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("callback", "layouts", "status", "said"),
    [
        ("planted:sums", ["tp=1,2", "cp=1,2"], 0, "the step is that of one process on 3 layouts"),
        (
            "broken:breaks_a_tensor_rank",
            ["tp=2", "packing=padded,packed"],
            1,
            r"rank 1: KeyError: 'loss' at .*\(breaks_a_tensor_rank\)",
        ),
    ],
)
def test_the_ranks_of_a_job(callback: str, layouts: list[str], status: int, said: str, tmp_path: Path) -> None:
    """One process's run is then each data rank's, with the same rows on all of them; a failure leaves the rest out."""
    more = ["--model-config", f"{RIGHT}:dense_config", "--loss-callback", f"tests.testing.whole_step.{callback}"]
    words = [*COMMAND, f"{RIGHT}:provider", *more, "--timeout", "15", "--layouts", *layouts]
    done = run_ranks(tmp_path, command, words)
    assert done.statuses == [status, status], done.stderr
    assert re.search(said, done.stdout), done.stdout + done.stderr
    assert "left out" in done.stdout or status == 0
