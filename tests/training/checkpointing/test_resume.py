"""Checkpoints: a run that was stopped continues the same curve, on any layout; a failed save leaves nothing behind."""

from __future__ import annotations

import contextlib
import io
import random
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from parallel_rl.testing.pool import WorldError, run_world
from parallel_rl.training.config.load import load_config
from parallel_rl.training.preflight.check import check_run
from tests.training.checkpointing.saves import flip, largest_file, shard_of
from tests.training.helpers import DATA, assert_near, cut, logged_rows, run, train_rows

SMALL = {
    "model__hidden": 32,
    "reward": "long_answers",
    "batch__micro_batch_size": 16,
    "evaluation": "{samples: 1, every: 2}",
    "run__loggers": "[]",
    "warmup": "{steps: 2, batch_size: 16, optimizer: {lr: 3e-3, warmup_steps: 2}}",
    "rl__steps": 3,
    "rl__prompts": 4,
    "rl__group_size": 4,
    "rl__updates": 2,
    "run__keep_checkpoints": 20,
    "run__checkpoint_every": 1,
}


def arguments(folder: Path, dtype: str, parallel: object = "{}", **more: object) -> list[str]:
    return run("grpo_arithmetic.yaml", run__dir=folder, run__dtype=dtype, parallel=parallel, **{**SMALL, **more})


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run in float32 with a checkpoint after every step, which no test changes."""
    folder = tmp_path_factory.mktemp("finished")
    run_world(1, train_rows, arguments(folder, "float32"))
    return folder


@pytest.mark.parametrize(
    ("dtype", "numbers"),
    [
        ("float64", (4,)),  # within RL
        # with master weights: within the warm-up and between the phases
        pytest.param("bfloat16", (1, 2, 4), marks=pytest.mark.slow),
    ],
)
def test_a_stopped_run_continues_the_same_curve(dtype: str, numbers: tuple[int, ...], tmp_path: Path) -> None:
    whole = tmp_path / "whole"
    [rows] = run_world(1, train_rows, arguments(whole, dtype))
    assert len(rows) == 5 and logged_rows(whole) == rows
    for number in numbers:
        stopped = tmp_path / f"stopped{number}"
        cut(whole, stopped, number)
        [later] = run_world(1, train_rows, arguments(stopped, dtype))
        assert later == rows[number:]
        assert logged_rows(stopped) == rows
    if dtype == "bfloat16":
        return
    damaged = tmp_path / "stopped4" / "checkpoints" / "step_000005"
    flip(shard_of(damaged))  # the one before is taken, and its rows are made again
    assert run_world(1, train_rows, arguments(tmp_path / "stopped4", dtype)) == [rows[4:]]
    assert logged_rows(tmp_path / "stopped4") == rows
    assert damaged.with_name("step_000005.damaged").is_dir()
    # a finished run has nothing left to do
    assert run_world(1, train_rows, arguments(whole, dtype)) == [[]]


RECORDED = {
    "warmup": "null",
    "data__examples": "null",
    "data__train": "null",
    "data__rollouts": DATA / "arithmetic_rollouts.jsonl",
    "reward": "exact_match",
}
RESHARDED = {
    "one process": (1, "{}"),
    "TP 2 × PP 2 × SP": (4, "{tensor: 2, pipeline: 2, sequence_parallel: true}"),
}


@pytest.mark.slow
def test_a_float32_run_stays_on_its_curve_at_other_layouts(tmp_path: Path) -> None:
    """Within 1e-5 of the uninterrupted run, on recorded rollouts: a draw could fall otherwise for a last bit."""
    whole = tmp_path / "whole"
    [rows, _] = run_world(2, train_rows, arguments(whole, "float32", "{tensor: 2}", **RECORDED))
    assert len(rows) == 3 and len({row["loss"] for row in rows}) == 3
    for name, (world, layout) in RESHARDED.items():
        cut(whole, tmp_path / name, 1)
        for later in run_world(world, train_rows, arguments(tmp_path / name, "float32", layout, **RECORDED)):
            assert_near(later, rows[1:], rel=1e-5, abs=1e-6)


KL_AND_CRITIC = {
    "evaluation": "null",
    "data__held_out": "null",
    "rl__advantages": "{name: gae, kl_coefficient: 0.05, kl_form: return}",
    "rl__reward_kl": "k1",
    "rl__kl_controller": "{target: 0.001, horizon: 100}",
    "rl__critic": "{optimizer: {lr: 1e-3}}",
    "rl__steps": 3,
    "rl__updates": 1,
    "warmup__steps": 1,
}
LAYOUTS = {
    "TP 2": (2, "{tensor: 2, sequence_parallel: true}"),
    "CP 2": (2, "{context: 2}"),
    "PP 2": (2, "{pipeline: 2}"),
    "DP 2": (2, "{}"),
    "one process": (1, "{}"),
}


@pytest.mark.slow
def test_random_states_and_the_kl_controller_go_on(tmp_path: Path) -> None:
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    more = {**KL_AND_CRITIC, "reward": "chance"}
    rows = run_world(2, train_rows, arguments(whole, "float32", **more))
    coefficients = [row["kl_coefficient"] for row in rows[0][1:]]
    assert coefficients[0] == 0.05 and len(set(coefficients)) == 3
    for number in (1, 3):  # at the start of RL and within it
        cut(whole, stopped / str(number), number)
        later = run_world(2, train_rows, arguments(stopped / str(number), "float32", **more))
        assert later == [part[number:] for part in rows]
        assert logged_rows(stopped / str(number)) == rows[0]


@pytest.mark.slow
def test_each_dimension_may_change_with_a_critic_and_a_reference(tmp_path: Path) -> None:
    """From one process to each layout in turn, a step on each, and back."""

    def train(folder: Path, steps: int, world: int, layout: str) -> list[list[dict]]:
        more = {**KL_AND_CRITIC, "rl__steps": steps, "rl__optimizer": "{lr: 1e-3}"}
        return run_world(world, train_rows, arguments(folder, "float64", layout, **more))

    [expected] = train(tmp_path / "alone", 1 + len(LAYOUTS), 1, "{}")
    cut(tmp_path / "alone", tmp_path / "changed", 2)  # a step of warm-up and one of RL
    for steps, (name, (world, layout)) in enumerate(LAYOUTS.items(), 2):
        for [row] in train(tmp_path / "changed", steps, world, layout):
            assert row["phase"] == "rl" and "critic_loss" in row and "kl_coefficient" in row
            assert_near([row], [expected[steps]], where=name)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"rl__advantages": "{name: grpo}", "rl__reward_kl": "null"}, "kl_controller has no effect"),
        ({"rl__kl_controller": "{target: 0.1, horizon: 2}"}, "horizon = 2 is too short for prompts × group_size = 16"),
        ({"rl__kl_controller": "{target: 0}"}, "target = 0"),
    ],
)
def test_a_kl_controller_that_could_do_nothing_is_refused(change: dict[str, object], words: str) -> None:
    more = {**KL_AND_CRITIC, "rl__critic": "null", "rl__advantages": "{name: grpo, kl_coefficient: 0.1}", **change}
    given = arguments(Path("nowhere"), "float32", **more)
    with pytest.raises(ValueError, match=words):
        load_config(given[0], given[1:])


@pytest.mark.slow
def test_init_from_starts_with_those_weights(tmp_path: Path, finished: Path) -> None:
    weights = finished / "checkpoints" / "step_000002"
    more = {"warmup": "null", "data__examples": "null", "run__init_from": weights, "run__seed": 0}
    [rows] = run_world(1, train_rows, arguments(tmp_path, "float32", **more))
    assert rows == logged_rows(finished)[2:]


def test_beside_a_gpu_the_host_s_generator_begins_with_the_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Megatron seeds the GPU's alone; on the host it has seeded torch's already, which must stay."""
    from parallel_rl.training.checkpointing.checkpoint import begin_random_state

    def drawn(seed: int, rank: int) -> float:
        torch.rand(3)
        begin_random_state(seed, rank)
        return float(torch.rand(()))

    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        assert drawn(1, 0) != drawn(1, 0)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        assert drawn(1, 0) == drawn(1, 0)
        assert len({drawn(1, 0), drawn(2, 0), drawn(1, 1)}) == 3
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])


def _said(rank: int, runs: list[list[str]]) -> list[str]:
    """What the first rank prints of each of these starts."""
    found = []
    for given in runs:
        with contextlib.redirect_stdout(io.StringIO()) as out:
            train_rows(rank, given)
        found.append(out.getvalue())
    return found


@pytest.mark.slow
def test_another_config_is_said_and_the_old_one_kept(tmp_path: Path) -> None:
    """A resume takes what it is given; only this tells that the curve is of two lrs. Starting anew leaves no older config."""
    mine = tmp_path / "config.7.yaml"
    mine.write_text("a user's")
    starts = (
        {"rl__steps": 1},
        {"rl__steps": 1},  # the same
        {
            "rl__steps": 2,
            "rl__optimizer__lr": 1e-4,
            "rl__loss__options__ratio_clip_min": 0.1,
            "sampling__temperature": 0.5,
        },
        {"rl__steps": 2, "rl__advantages": "{name: rloo}"},
        {"rl__steps": 1, "run__resume": "never"},
    )
    given = [arguments(tmp_path, "float32", **{"warmup": "null", "rl__optimizer__lr": 3e-3, **more}) for more in starts]  # type: ignore[arg-type]
    given = [[*one, "--evaluation=null", "--data.held_out=null", "--data.examples=null"] for one in given]
    said, other = run_world(2, _said, given[:4])
    assert not any("config has changed" in text for text in [*other, *said[:2]])
    assert ["nothing is left to do: " in text for text in said] == [False, True, False, True]
    done = [check_run(load_config(one[0], one[1:]), 2) for one in (given[3], given[2], given[4])]
    assert ["nothing is left to do: " in text for text in done] == [
        True,
        True,
        False,
    ]  # `check` and `submit`, before the queue
    for words in (
        "the old one is kept as config.8.yaml",
        "rl.optimizer.lr: 0.003 -> 0.0001",
        "rl.loss.options.ratio_clip_min: 0.2 -> 0.1",
        "sampling.temperature: 1.0 -> 0.5",
    ):
        assert words in said[2]
    assert "config.9.yaml" in said[3] and "rl.advantages.name: grpo -> rloo" in said[3]
    rates = [load_config(str(path)).rl.optimizer.lr for path in sorted(tmp_path.glob("config.[89].yaml"))]  # type: ignore[union-attr]
    assert rates == [3e-3, 1e-4]
    [[said_anew]] = run_world(1, _said, given[4:])
    assert "config has changed" not in said_anew
    assert sorted(path.name for path in tmp_path.glob("config*")) == ["config.7.yaml", "config.yaml"]
    assert mine.read_text() == "a user's"


@pytest.mark.slow
def test_never_starts_anew(tmp_path: Path, finished: Path) -> None:
    rows = logged_rows(finished)
    shutil.copytree(finished, tmp_path / "run")
    assert run_world(1, train_rows, arguments(tmp_path / "run", "float32", run__resume="never")) == [rows]
    assert logged_rows(tmp_path / "run") == rows


def _train_on_a_full_disk(rank: int, given: list[str]) -> None:
    """Files may not grow beyond 30 kB: the first checkpoint cannot be written."""
    with largest_file(30_000):
        train_rows(rank, given)


@pytest.mark.parametrize("world", [1, 2])
def test_a_failed_save_leaves_no_half_checkpoint(world: int, tmp_path: Path) -> None:
    with pytest.raises(WorldError) as failure:
        run_world(world, _train_on_a_full_disk, arguments(tmp_path, "float32", f"{{tensor: {world}}}"))
    assert sorted(failure.value.errors) == list(range(world))
    for error in failure.value.errors.values():
        assert "could not be written" in error
    assert list((tmp_path / "checkpoints").iterdir()) == []


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path, finished: Path) -> None:
    with pytest.raises(WorldError, match=r"model\.hidden is 32 there and 64 in this run"):
        run_world(1, train_rows, arguments(finished, "float32", model__hidden=64))
    sft = run("sft_arithmetic.yaml", run__dir=finished, model__hidden=32)
    with pytest.raises(WorldError, match="objective is 'rl' there and 'sft' in this run"):
        run_world(1, train_rows, sft)
    with pytest.raises(WorldError, match="is not a checkpoint"):
        run_world(1, train_rows, arguments(tmp_path / "new", "float32", run__init_from=finished))


def test_a_damaged_source_is_refused_before_never_removes_anything(tmp_path: Path, finished: Path) -> None:
    source, folder = tmp_path / "source", tmp_path / "run"
    for copy in (source, folder):
        shutil.copytree(finished, copy)
    weights = source / "checkpoints" / "step_000002"
    largest = max(weights.glob("*.distcp"), key=lambda path: path.stat().st_size)
    content = bytearray(largest.read_bytes())
    content[len(content) // 2] ^= 1
    largest.write_bytes(content)
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    more = {"warmup": "null", "data__examples": "null", "run__init_from": weights, "run__resume": "never"}
    with pytest.raises(WorldError, match=rf"is damaged: .*{largest.name}"):
        run_world(1, train_rows, arguments(folder, "float32", **more))
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before
