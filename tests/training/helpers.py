"""Runs of the trainer on the warm pool."""

from __future__ import annotations

import atexit
import contextlib
import functools
import io
import json
import random
import shutil
import tempfile
import time
import warnings
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch

from parallel_rl.config.yaml_files import read_tree
from parallel_rl.experience import register_reward
from parallel_rl.testing import pool

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "configs"
DATA = CONFIGS / "data"
LAYOUTS = {
    "one process": (1, {}, False),
    "TP 2": (2, {"tensor": 2}, False),
    "CP 2": (2, {"context": 2}, False),
    "TP 2 × CP 2 × SP packed": (4, {"tensor": 2, "context": 2, "sequence_parallel": True}, True),
    "PP 2": (2, {"pipeline": 2}, False),
}
Rows = list[dict[str, float | int | str]]
# first records of a data file that a run takes; to check those that ship takes as long as some steps
SHORT = {"held_out": 24, "rollouts": 640}
# of a run, not of what it computed
CLOCK = {"seconds", "tokens_per_second"}

pool.preload("megatron.core", "parallel_rl.training.trainer")


def run(config: str, **overrides: object) -> list[str]:
    """Command-line overrides; `__` stands for the dot."""
    data = {} if "data" in overrides else dict(short_data(CONFIGS / config))
    if overrides.get("evaluation") == "null":
        data.pop("data.held_out", None)
    given = {**data, **{key.replace("__", "."): value for key, value in overrides.items()}}
    return [str(CONFIGS / config), *(f"--{key}={value}" for key, value in given.items())]


@functools.cache
def short_data(config: Path) -> dict[str, Path]:
    """Return overrides that give a config the first records of its data; data/test_data.py reads all that ships."""
    data = read_tree(config).get("data") or {}
    assert isinstance(data, dict)
    texts = {name: str(value) for name, value in data.items()}
    files = {name: DATA / Path(text).name for name, text in texts.items() if text.endswith(".jsonl")}
    return {f"data.{name}": first_records(path, SHORT.get(name, 240)) for name, path in files.items()}


@functools.cache
def first_records(path: Path, count: int) -> Path:
    """Return a copy of the first lines of a file, which this process removes at its end."""
    folder = Path(tempfile.mkdtemp(prefix="first_records_"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    lines = path.read_text().splitlines(keepends=True)[:count]
    (folder / path.name).write_text("".join(lines))
    return folder / path.name


def recorded_grpo(folder: Path, parallel: object, packing: bool, dtype: str, steps: int, **more: object) -> list[str]:
    """GRPO with the reference KL on recorded rollouts, two updates a step, whose ratios meet their bounds."""
    return run(
        "grpo_arithmetic.yaml",
        run__dir=folder,
        run__dtype=dtype,
        parallel=parallel,
        batch__packing=packing,
        data={"rollouts": str(DATA / "arithmetic_rollouts.jsonl")},
        warmup="null",
        evaluation="null",
        model__hidden=32,
        model__position="rope",
        rl__steps=steps,
        rl__prompts=8,
        rl__group_size=4,
        rl__updates=2,
        rl__optimizer={"lr": 3e-3},
        rl__loss__options__ratio_clip_min=0.1,
        rl__loss__options__ratio_clip_max=0.1,
        **more,
    )


@register_reward("long_answers")
def long_answers(prompt: str, completion: str, answer: str) -> float:
    """A checker under which even an untrained policy's samples differ."""
    return len(completion) / 4


def cut(folder: Path, target: Path, number: int) -> None:
    """A copy of a finished run as if it had been killed after checkpoint `number`, one step later."""
    shutil.copytree(folder, target)
    for path in (target / "checkpoints").iterdir():
        if int(path.name[5:]) > number:
            shutil.rmtree(path)
    lines = (target / "metrics.jsonl").read_text().splitlines(keepends=True)
    (target / "metrics.jsonl").write_text("".join(lines[: number + 1]) + '{"phase": "r')


def train_rows(rank: int, arguments: list[str]) -> Rows:
    """Trains on this rank of the pool; the rows without what the clock says.

    Draws no picture, as where matplotlib is missing: it takes as long as the few steps of a test.
    """
    from parallel_rl.training import trainer
    from parallel_rl.training.config.load import load_config

    warnings.simplefilter("ignore")
    with mock.patch.object(trainer, "draw_curves", lambda *_: False):
        result = trainer.train(load_config(arguments[0], arguments[1:]))
    return [{key: value for key, value in row.items() if key not in CLOCK} for row in result.rows]


def screen_of_run(rank: int, arguments: list[str]) -> str:
    """Train on this rank; return what it printed."""
    screen = io.StringIO()
    with contextlib.redirect_stdout(screen):
        train_rows(rank, arguments)
    return screen.getvalue()


def run_command(rank: int, words: list[str]) -> tuple[int, str, str]:
    """Return status, output and errors of the command on this rank of the pool, whose world stays."""
    from parallel_rl.cli import main
    from parallel_rl.training.models import engine

    out, errors = io.StringIO(), io.StringIO()
    with (
        mock.patch.object(engine, "end_world", lambda: None),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(errors),
    ):
        return main(words), out.getvalue(), errors.getvalue()


def assert_near(rows: Rows, expected: Rows, rel: float = 1e-8, abs: float = 1e-12, where: str = "") -> None:
    """Rows of two runs have the same columns and phases, and numbers that are the same up to rounding."""
    assert [row["phase"] for row in rows] == [row["phase"] for row in expected], where
    for row, other in zip(rows, expected, strict=True):
        assert {**row, "phase": 0} == pytest.approx({**other, "phase": 0}, rel=rel, abs=abs), where


def logged_rows(folder: Path) -> Rows:
    """The rows of metrics.jsonl without what the clock says; every line must be whole."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [{key: value for key, value in json.loads(line).items() if key not in CLOCK} for line in lines]


@register_reward("sevens")
def sevens(prompt: str, completion: str, answer: str) -> float:
    """A checker that a policy can learn in a few steps: the share of sevens."""
    return completion.count("7") / max(len(completion), 1)


@register_reward("stuck_on_odd")
def stuck_on_odd(prompt: str, completion: str, answer: str) -> float:
    while completion[-1:] in {*"13579"}:
        with contextlib.suppress(Exception):
            time.sleep(60)
    return len(completion) / 8


@register_reward("no_zeros")
def no_zeros(prompt: str, completion: str, answer: str) -> float:
    """A checker that fails on the answer 00, and gives 1 else."""
    if answer == "00":
        raise KeyError(prompt)
    return 1.0


@register_reward("agreeing")
def agreeing(prompt: str, completion: str, answer: str) -> float:
    """A checker that the samples of a prompt often agree on."""
    return float(len(completion) >= 3)


@register_reward("chance")
def chance(prompt: str, completion: str, answer: str) -> float:
    """A checker that draws from every random state that user code may draw from."""
    return random.random() + float(np.random.random()) + float(torch.rand(()))
