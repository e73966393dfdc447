"""What a new user gets wrong on the command line: one line that says what is wrong, the value, and what would be right."""

from __future__ import annotations

from pathlib import Path

import pytest

from parallel_rl.cli import main
from tests.training.helpers import CONFIGS

GRPO = str(CONFIGS / "grpo_arithmetic.yaml")
FILES: dict[str, bytes] = {
    "empty.yaml": b"",
    "text.yaml": b"hello\n",
    "list.yaml": b"- a\n",
    "twice.yaml": b"rl:\n  steps: 3\nrun: {dir: a}\nrl:\n  prompts: 4\n",
    "twice_below.yaml": b"rl: {steps: 3, steps: 4}\n",
    "latin.yaml": b"run: {dir: \xe9}\n",
    "mine.jsonl": b'{"prompt": "1+1=", "reply": "2"}\n',
    "broken_reward.py": b"1 / 0\n",
    "leaving.py": b"raise SystemExit(0)\n",
}


def checked(*arguments: str) -> list[str]:
    return ["check", "--world", "4", *arguments]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["check", "--world", "0", GRPO], "--world 0 is not valid; at least 1 is needed"),  # a ZeroDivisionError
        (["check", "--world", "-4", GRPO], "--world -4 is not valid; at least 1 is needed"),  # ok: -4 ranks, DP -1
        (["train", GRPO, "--gate", "-1"], "--gate -1 is not valid; seconds above 0 are needed"),
        (["train", GRPO, "--gate", "nan"], "--gate nan is not valid; seconds above 0 are needed"),
        (["data"], "there is no config: write parallel-rl data CONFIG, or parallel-rl data --recipe NAME"),  # train
        (checked(), "write parallel-rl check CONFIG, or parallel-rl check --recipe NAME"),
        (["submit", "--nodes", "2", "--gpus-per-node", "2"], "write parallel-rl submit CONFIG, or"),
        (["export", "there", "out", "--import", "no_module_of_mine"], "no_module_of_mine"),  # refused as no option
        # the file
        (checked("folder"), "/folder is a folder; a config file is needed"),  # "does not exist"
        (checked("."), " is a folder; a config file is needed"),
        (checked("empty.yaml"), "empty.yaml holds nothing; a mapping of sections is needed"),  # "holds NoneType"
        (checked("text.yaml"), "text.yaml holds a text; a mapping of sections is needed"),
        (checked("list.yaml"), "list.yaml holds a list; a mapping of sections is needed"),
        (checked("twice.yaml"), "twice.yaml is not valid YAML: duplicate key 'rl'"),  # the first was lost
        (checked("twice_below.yaml"), "duplicate key 'steps'"),
        (checked("latin.yaml"), "latin.yaml is not valid YAML: no UTF-8 (invalid continuation byte at byte 11)"),  # no file
        (["data", "mine.jsonl"], "mine.jsonl holds data; name a config, and pass the data as --data.train mine.jsonl"),
        (checked("twice.yaml"), "duplicate key 'rl' (line "),  # three lines
        (["check", "grpo", "--world", "4"], "the config file grpo does not exist; for the recipe write --recipe grpo"),
        (["check", "--recipe", "gpro", "--world", "4"], "there is no recipe 'gpro'; did you mean 'grpo'?"),  # 'gspo'
        (["export", "nowhere", "out"], "nowhere is not a run's checkpoint, such as runs/grpo/checkpoints/step_000100: the "),
        (["sample", "folder", "--prompt", "1"], "folder is not a run's checkpoint, such as runs/grpo/checkpoints/step_000100"),
        # overrides
        (checked(GRPO, "--data.train=*.nothing"), "*.nothing"),  # no valid YAML: an alias
        (checked(GRPO, "--tokenizer.alphabet= "), "tokenizer.alphabet = ' ' lacks"),  # None
        (checked(GRPO, "--rl..steps=3"), "the override --rl..steps lacks a name before, between or after its dots"),
        (checked(GRPO, "--.rl=3"), "the override --.rl lacks a name"),
        (checked(GRPO, "--rl.", "3"), "the override --rl. lacks a name"),
        (checked(GRPO, "--=3"), "the override -- lacks a name"),  # "ambiguous option: could match --help, --version"
        (checked(GRPO, "--run.dir=3"), "run.dir = 3 is not valid; a value of type str is needed; in YAML a text that reads"),
        (checked(GRPO, "--tokenizer.alphabet=01"), "in YAML a text that reads like a value of another kind stands in quotes"),
        (checked(GRPO, "--parallel={tensor: 2, tensor: 4}"), "is not valid YAML: duplicate key 'tensor'"),
        (checked(GRPO, "--run.dir="), "run.dir = None"),
        (checked(GRPO, "--run.dir=''"), "run: dir = '' is empty; name the folder of the run, as in runs/grpo"),
        (checked(GRPO, "--run.dir=~/mine"), "run: dir = '~/mine' begins with a ~, which only a shell expands; write the whole"),
        # numbers that are none
        (checked(GRPO, "--rl.optimizer.lr=.inf"), "rl.optimizer: lr = inf must be a finite number above 0"),
        (checked(GRPO, "--rl.optimizer.lr=.nan"), "rl.optimizer: lr = nan must be a finite number above 0"),
        (checked(GRPO, "--rl.optimizer.clip=.nan"), "rl.optimizer: clip = nan must be a finite number above 0"),
        (checked(GRPO, "--rl.optimizer.weight_decay=.nan"), "rl.optimizer: weight_decay = nan must be at least 0"),
        (checked(GRPO, "--run.timeout=.nan"), "run: timeout = nan must be at least 1"),
        (checked(GRPO, "--run.timeout=1e12"), "run: timeout = 1000000000000.0 must be at most 2592000"),
        (checked(GRPO, "--run.seed=9999999999"), "run: seed = 9999999999 must be at most 2147483647"),
        (checked(GRPO, f"--rl.steps=1{'0' * 400}"), "0... is not valid; an integer of 64 bits is needed"),
        (checked(GRPO, f"--rl.optimizer.lr=1{'0' * 400}"), "is not valid; a value of type float is needed"),  # a traceback
        # what is found later
        (checked(GRPO, "--run.dir=loop/run"), "run.dir = 'loop/run' cannot be made: "),  # RuntimeError: Symlink loop
        (checked(GRPO, f"--run.dir={'x' * 300}"), "xxx' cannot be made: File name too long"),  # the key was not named
        (checked(GRPO, "--reward=.:x"), "reward = '.:x' is not valid: a config imports nothing"),  # a traceback
        (checked(GRPO, "--reward=broken_reward:f"), "pass --import broken_reward"),  # it was imported
        (["data", GRPO, "--import=broken_reward"], "--import broken_reward failed: ZeroDivisionError: division by zero"),
        (["data", GRPO, "--import=leaving"], "--import leaving failed: SystemExit: 0"),  # status 0
        (checked(GRPO, "--import=os; x"), "--import os; x is not a module's name, such as my_rewards"),
        (checked(GRPO, "--reward=best"), "reward = 'best' is not valid; valid: "),
        (checked(GRPO, "--reward=http://"), "url = 'http://' names no host"),
        (checked(GRPO, "--reward=ftp://x"), "a server's URL starts with http:// or https://"),  # "No module named 'ftp'"
        (checked(GRPO, "--reward={url: x}"), "url = 'x' must start with http:// or https://"),
        (checked(GRPO, "--model.ffn_hidden=3"), "model.ffn_hidden = 3 is not divisible by parallel.tensor = 2"),
        (checked(GRPO, "--sampling.max_new_tokens=99"), "model.max_positions = 64 is too few; the sequence takes "),  # ok
        (checked(GRPO, "--batch.micro_batch_size=null", "--batch.tokens=7"), "tokens = 7 must be at least 8"),  # ok
        (["submit", GRPO, "--nodes", "2", "--gpus-per-node", "2", "--time", ""], "--time has no value; leave it out"),
        (["submit", GRPO, "--nodes", "2", "--gpus-per-node", "2", "--qos="], "--qos has no value; leave it out"),
        (checked(GRPO, "--data.train=/dev/null"), "data.train: /dev/null is not a file"),  # "does not exist"
        (
            checked(str(CONFIGS / "sft_arithmetic.yaml"), "--data.examples=mine.jsonl"),
            "mine.jsonl, line 1: unknown field 'reply'; valid: prompt",  # "did you mean 'prompt'?", which is there
        ),
    ],
)  # fmt: skip
def test_what_is_wrong_is_one_line(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name, text in FILES.items():
        (tmp_path / name).write_bytes(text)
    (tmp_path / "folder").mkdir()
    (tmp_path / "loop").symlink_to("loop")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert main(arguments) == 2
    said = capsys.readouterr().err
    assert said.startswith("parallel-rl: error: ") and message in said and said.count("\n") == 1
