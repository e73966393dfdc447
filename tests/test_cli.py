"""The command: alone and under torchrun, and what it says where something does not fit."""

from __future__ import annotations

import contextlib
import gc
import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
import yaml

import parallel_rl
from parallel_rl.cli import main
from parallel_rl.cli.runs import importing
from parallel_rl.recipes import find_recipe
from parallel_rl.testing.pool import run_world
from parallel_rl.training.config.load import as_mapping, load_config
from tests import forked
from tests.forked import run_ranks
from tests.launch import UNCOMPILED
from tests.training.helpers import CONFIGS, ROOT, train_rows

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **UNCOMPILED}
GRPO = str(CONFIGS / "grpo_arithmetic.yaml")


def command(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "parallel_rl.cli", *arguments]
    return subprocess.run(line, env=ENVIRONMENT, cwd=cwd, capture_output=True, text=True, timeout=300)


@pytest.mark.slow
def test_a_run_from_the_shell(tmp_path: Path) -> None:
    """In a folder of its own: data paths start at the config's folder, the run's folder at the working one."""
    small = {
        "warmup": "null",
        "model.hidden": 16,
        "batch.micro_batch_size": 32,
        "evaluation": "{samples: 1}",
        "data.examples": "null",
    }
    rl = "{steps: 2, prompts: 4, group_size: 2, optimizer: {lr: 1e-3}, loss: {name: clipped_pg}}"
    overrides = [item for key, value in small.items() for item in (f"--{key}", str(value))]
    done = command("train", GRPO, *overrides, "--rl", rl, "--parallel", "{}", "--run.dir=here", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "held-out reward before: " in done.stdout and "after rl: " in done.stdout
    lines = done.stdout.splitlines()
    [heading] = [line for line in lines if "grad norm" in line]
    for column in (
        "rl step",
        "reward",
        "held-out",
        "loss",
        "KL",
        "entropy",
        "clip low",
        "clip high",
        "tokens/s",
        "left",
    ):
        assert column in heading
    rows = [line.split() for line in lines[lines.index(heading) + 1 :] if line.split()[0].endswith("/2")]
    assert [row[0] for row in rows] == ["1/2", "2/2"] and {len(row) for row in rows} == {11}
    folder = tmp_path / "here"
    logged = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in logged] == [1, 2]
    assert float(rows[1][3]) == pytest.approx(logged[1]["loss"], abs=1e-5)
    assert (folder / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert [path.name for path in (folder / "checkpoints").iterdir()] == ["step_000002"]
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard" / "rl"))
    events.Reload()
    assert [event.value for event in events.Scalars("loss")] == pytest.approx([row["loss"] for row in logged])
    assert [event.step for event in events.Scalars("loss")] == [1, 2]
    assert "group_size: 2" in events.Tensors("config/text_summary")[0].tensor_proto.string_val[0].decode()
    assert "Warning" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([GRPO], "the world has 1 ranks; parallel.tensor 2 × context 2 × pipeline 1 needs 4 or a multiple of it"),
        ([GRPO, "--rl.stepz", "3"], "unknown key rl.stepz = 3 in RLConfig; did you mean 'steps'?"),
        ([GRPO, "--parallel", "{}", "--data.train", "nowhere.jsonl"], "nowhere.jsonl does not exist"),
        (
            [GRPO, "--parallel", "{}", "--data.train", str(CONFIGS / "grpo_arithmetic.yaml")],
            "grpo_arithmetic.yaml, line 1: no JSON",
        ),
        (
            [GRPO, "--parallel", "{}", "--reward", "nobody:knows"],
            'a config imports nothing; register it by @register_reward("knows")',
        ),
        ([GRPO, "--parallel", "{}", "--model.max_positions", "8"], "model.max_positions = 8 is too few"),
        (["nowhere.yaml"], "nowhere.yaml does not exist"),
        ([GRPO, "stray"], "'stray' is not an override"),
        ([], "there is no config: write parallel-rl train CONFIG, or parallel-rl train --recipe NAME"),
        (["--recipe", "gpso"], "there is no recipe 'gpso'; did you mean 'gspo'?"),
        (["--recipe", "grpo", GRPO], "name a config file or a recipe"),
        (
            ["--recipe", "grpo", "--rl.advantages", "gae"],
            "rl: advantages.name = 'gae' reads values, which 'critic' gives",
        ),
        (["--recipe", "value"], "value.yaml is a loss without a run: it needs a policy whose returns it"),
        (["--recipe", "distillation"], "distillation needs the key 'teacher', which is missing"),
        (["--recipe", "grpo", "--rl.loss.name", "dpo", "--rl.loss.options", "{}"], "reads (chosen, rejected) pairs"),
        (
            ["--recipe", "grpo", "--rl.loss.name", "value", "--rl.loss.options", "{}"],
            "reads a scalar head, which the policy",
        ),
        (["--recipe", "grpo", "--rl.loss.name", "gpro"], "loss = 'gpro' is not valid; did you mean"),
        (
            ["--recipe", "dpo", "--preference.loss.name", "policy", "--preference.loss.options", "{}"],
            "reads 'advantages'",
        ),
    ],
)
def test_what_does_not_fit_is_said_in_one_line(arguments: list[str], message: str, tmp_path: Path) -> None:
    where = [] if {"stray", "nowhere.yaml"} & {*arguments} or not arguments else ["--run.dir", str(tmp_path)]
    [(status, said)] = run_world(1, refused, ["train", *arguments, *where])
    assert status == 2 and message in said and said.count("\n") == 1
    assert list(tmp_path.iterdir()) == []  # nothing was begun


def refused(rank: int, arguments: list[str]) -> tuple[int, str]:
    """The command's exit status and what it says, in a process that has Megatron loaded."""
    keep = dist.destroy_process_group
    dist.destroy_process_group = lambda group=None: None  # the world is the pool's, not the command's
    screen = io.StringIO()
    try:
        with contextlib.redirect_stderr(screen):
            return main(arguments), screen.getvalue()
    finally:
        dist.destroy_process_group = keep


def _unreadable(rank: int, arguments: list[str], file: str) -> tuple[int, str]:
    """As `refused`, where `file` may not be read; modes do not bind root."""
    keep = Path.open

    def locked(path: Path, *given: Any, **more: Any) -> Any:
        if str(path) == file:
            raise PermissionError(13, "Permission denied", file)
        return keep(path, *given, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "open", locked)
        return refused(rank, arguments)


@pytest.mark.parametrize("name", ["data", "check"])
def test_a_file_that_may_not_be_read_is_said_in_one_line(name: str, tmp_path: Path) -> None:
    (file := tmp_path / "locked.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')
    given = [
        name,
        str(CONFIGS / "sft_arithmetic.yaml"),
        "--data.examples",
        str(file),
        "--run.dir",
        str(tmp_path / "run"),
    ]
    given += ["--world", "1"] if name == "check" else ["--steps", "1"]
    [(status, said)] = run_world(1, _unreadable, [*given, "--parallel", "{}"], str(file))
    assert status == 2 and "Permission denied" in said and str(file) in said and said.count("\n") == 1


@pytest.mark.slow
def test_a_world_that_does_not_match_is_an_error_on_every_rank(tmp_path: Path) -> None:
    wanted = [
        f"parallel-rl: error (rank {rank}): the world has 2 ranks; parallel.tensor 2 × context 2" for rank in range(2)
    ]
    # not by torchrun, which on a busy machine ends a rank before it has printed, since another has failed
    done = run_ranks(tmp_path, forked.command, ["train", GRPO, "--run.dir", str(tmp_path / "run")])
    assert 0 not in done.statuses and all(text in done.stderr for text in wanted), done.stderr
    assert not (tmp_path / "run").exists()


def test_a_recipe_is_found_and_refused_before_any_work(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipes"]) == 0
    listed = capsys.readouterr().out.splitlines()
    assert len(listed) > 40 and any(line.startswith("gspo ") and "GSPO: group sequence" in line for line in listed)
    marked = [line.split()[0] for line in listed if line.endswith("(load_recipe only: `train` lacks its data)")]
    assert marked == ["self_distillation", "trajectory_mean", "turn_gspo", "value"]
    assert main(["recipes", "GSPO"]) == 0
    page = capsys.readouterr().out
    assert all(
        text in page for text in ("GSPO: group sequence", "Paper: arXiv 2507.18071", "ratio_level: sequence-mean")
    )
    assert main(["recipes", "all"]) == 2


def test_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out == f"parallel-rl {parallel_rl.__version__}\n"


def test_a_reader_that_leaves_early() -> None:
    line = f"set -o pipefail; {sys.executable} -u -m parallel_rl.cli recipes | head -1"
    done = subprocess.run(["bash", "-c", line], env=ENVIRONMENT, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr, done.stdout.count("\n")) == (0, "", 1)


@pytest.mark.slow
def test_a_tool_whose_reader_left_does_not_end_well(tmp_path: Path) -> None:
    port = f"{sys.executable} -m parallel_rl.cli port {tmp_path / 'nemo_rl.yaml'} 2>/dev/null | true; exit $PIPESTATUS"
    (tmp_path / "nemo_rl.yaml").write_text("policy: {}\ngrpo: {}\n")
    done = subprocess.run(["bash", "-c", port], env=ENVIRONMENT, cwd=ROOT, capture_output=True, timeout=60)
    assert (done.returncode, done.stdout) == (141, b"")  # nothing was said, so neither that all is well


@pytest.mark.slow
def test_without_megatron_the_command_says_what_to_install() -> None:
    """Three commands in a row in one process, which imports torch once."""
    lines = ["train --recipe grpo", "check --recipe grpo --world 1", "data --recipe grpo"]
    code = "import sys; sys.modules['megatron'] = None\nfrom parallel_rl.cli import main\n"
    code += "print([main(line.split()) for line in sys.argv[1:]])"
    run = [sys.executable, "-c", code, *lines]
    done = subprocess.run(run, env=ENVIRONMENT, cwd=ROOT, capture_output=True, text=True, timeout=60)
    needs = "needs megatron-core: pip install 'megatron-core>=0.15,<0.20' psutil"
    assert done.stdout == "[2, 2, 2]\n"
    assert done.stderr.splitlines() == [
        f"parallel-rl: error: `parallel-rl {line.split()[0]}` {needs}" for line in lines
    ]


def test_check_says_what_it_checked_and_finds_what_a_start_would(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    grpo = ["check", "--recipe", "grpo", "--world", "8", "--run.dir"]
    good, empty = [*grpo, str(tmp_path / "new" / "run")], [*grpo, str(tmp_path)]
    cases = {
        "ok: rl, 8 ranks, TP 1 × CP 2 × PP 1 × DP 4, float32, writes to ": [*good, "--parallel.context", "2"],
        "reward = 'exact_mach' is not valid; did you mean 'exact_match'?": [*empty, "--reward", "exact_mach"],
        "tokenizer.alphabet = '0123456789=#' lacks '+' of the data": [
            *empty,
            "--tokenizer.alphabet",
            "0123456789=#",
        ],
        f"cannot be made: {tmp_path}/file is not a folder": [*grpo, str(tmp_path / "file" / "run")],
        "run.dir = '/proc/run' cannot be written: /proc: ": [*grpo, "/proc/run"],
        "unknown key steps = 3 in TrainConfig; did you mean 'warmup.steps' or 'rl.steps'?": [*empty, "--steps", "3"],
        "'rl.steps=3' is not an override; write --rl.steps=3": [*grpo[:-1], "rl.steps=3"],
    }
    [said] = run_world(1, all_said, list(cases.values()))
    for (message, arguments), (status, text) in zip(cases.items(), said, strict=True):
        assert message in text and text.count("\n") == 1, text
        assert status == (0 if message.startswith("ok") else 2), arguments
    assert [path.name for path in tmp_path.iterdir()] == ["file"]  # nothing was made


def all_said(rank: int, commands: list[list[str]]) -> list[tuple[int, str]]:
    said = []
    for arguments in commands:
        screen = io.StringIO()
        with contextlib.redirect_stderr(screen), contextlib.redirect_stdout(screen):
            said.append((main(arguments), screen.getvalue()))
    return said


def test_a_run_for_many_ranks_started_as_one_process_says_how_to_start_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", GRPO]) == 2
    hint = (
        "needs 4 or a multiple of it: start it by torchrun --nproc-per-node 4, or as one process with --parallel '{}'"
    )
    assert hint in capsys.readouterr().err


@pytest.mark.slow
def test_data_parallel_ranks(tmp_path: Path) -> None:
    """The command on two ranks of a job; under torchrun itself: cluster/test_preemption.py."""
    small = [
        "--batch.micro_batch_size",
        "8",
        "--model.hidden",
        "16",
        "--sft.steps",
        "3",
        "--sft.batch_size",
        "8",
        "--evaluation.every",
        "0",
    ]
    config = [str(CONFIGS / "sft_arithmetic.yaml"), *small, "--run.dtype", "float64", "--run.dir"]
    [one] = run_world(1, train_rows, [*config, str(tmp_path / "one")])
    done = run_ranks(tmp_path, forked.command, ["train", *config, str(tmp_path / "two")])
    assert done.statuses == [0, 0], done.stderr
    two = [json.loads(line) for line in (tmp_path / "two" / "metrics.jsonl").read_text().splitlines()]
    for row, other in zip(one, two, strict=True):
        for key in ("loss", "grad_norm"):
            assert row[key] == pytest.approx(other[key], rel=1e-8)
    assert one[-1]["held_out_reward"] == two[-1]["held_out_reward"]


def test_the_collector_rests_while_torch_and_megatron_are_imported() -> None:
    """A rank's start took a second more; and where an import fails, too, the collector goes on."""
    with pytest.raises(ImportError), importing():
        assert not gc.isenabled()
        raise ImportError
    assert gc.isenabled()


def test_help_and_the_package_do_without_megatron() -> None:
    code = "import sys, parallel_rl, parallel_rl.cli, parallel_rl.training.config.load as c\n"
    code += f"c.load_config({GRPO!r})\ntry:\n    parallel_rl.cli.main(['--help'])\nexcept SystemExit:\n    pass\n"
    code += "print([m for m in ('megatron', 'triton', 'tensorboard', 'matplotlib') if m in sys.modules])"
    found = subprocess.run(
        [sys.executable, "-c", code], env=ENVIRONMENT, capture_output=True, text=True, timeout=120, check=True
    )
    assert "train by a YAML config" in found.stdout and found.stdout.splitlines()[-1] == "[]"


def test_a_key_is_described(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--help", "rl.optimizer.lr"]) == 0
    assert capsys.readouterr().out.splitlines()[:3] == ["rl.optimizer.lr", "  values: number", "  default: required"]
    assert main(["train", "-h", "rl.server"]) == 0
    text = capsys.readouterr().out
    assert "update_every (integer; default 1): steps between" in text and "  timeout (number; default 600.0): " in text
    for key, lines in {
        "rl.server.url": ["default: required", "the least loaded gets the request"],
        "rl.overlong": [
            "name: dapo, stop_properly",
            "max_length (integer; default required; with name: dapo): largest number of",
        ],
        "rl.overlong.buffer": ["values: integer", "with name: dapo"],
        "rl.advantages.kl_coefficient": ["default: 0.0", "subtracted from the reward"],
        "rl.advantages.lam": ["with name: gae"],
        "data.train": ["values: section or text or list of text or null", "dataset (text; default required): a folder"],
        "sampling": ["How completions are sampled.", "top_p (number or null; default null): sample among"],
        "reward": ["default: exact_match", "headers (mapping; default {}): sent"],
        "sft.batch_size": ["sequences per step"],
    }.items():
        assert main(["train", "--help", key]) == 0
        text = capsys.readouterr().out
        assert text.startswith(f"{key}\n  values: ") and all(line in text for line in lines), text
    for key, message in (
        ("sampling.top_k.most", "sampling.top_k has no keys of its own here; its value is integer or `null`"),
        ("rl.overlong.bufer", "there is no key 'bufer' in rl.overlong; did you mean 'buffer'?"),
        ("", "there is no key ''; valid: batch, data, "),
        ("rl.stps", "there is no key 'stps' in rl; did you mean 'steps'?"),
        (
            "rl.loss.options.kind",
            "rl.loss.options has no keys of its own here; docs/reference/losses lists its options",
        ),
    ):
        assert main(["train", "--help", key]) == 2 and message in capsys.readouterr().err


def test_the_whole_config_names_the_source_of_each_value(capsys: pytest.CaptureFixture[str]) -> None:
    """What is printed is the run's config, and can be run itself."""
    given = ["--rl.steps", "3", "--evaluation=null", "--reward=math"]
    assert main(["train", "--recipe", "grpo", *given, "--print-config"]) == 0
    text = capsys.readouterr().out
    assert yaml.safe_load(text) == as_mapping(load_config(str(find_recipe("grpo")), given))
    for line in (
        "  steps: 3  # command line",
        "evaluation: null  # command line",
        "reward: math  # command line",
        "  layers: 2  # arithmetic.yaml",
        "  seed: 0  # default",
    ):
        assert line in text.splitlines()
    assert main(["train", "--recipe", "grpo", "--rl.stps=3", "--print-config"]) == 2
