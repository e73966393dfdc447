"""A run that dumps a step: on every layout the same dump, and the run that it would be without."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("megatron.core")

from parallel_rl.cli import main
from parallel_rl.explain import read_step
from parallel_rl.explain.read import Step
from parallel_rl.testing.pool import run_world
from tests.training.helpers import LAYOUTS, recorded_grpo

EXACT = ("token_mask", "input_ids", "scored", "sample_ids", "group_ids")
_dumps: dict[str, Step] = {}


def arguments(folder: Path, parallel: dict, packing: bool, **more: object) -> list[str]:
    rows = {"batch__micro_batch_size": "null" if "batch__tokens" in more else 8}
    return recorded_grpo(folder, parallel, packing, "float64", 1, **rows, **more)


def trained(rank: int, given: list[str], dump_step: int | None) -> tuple[list[dict[str, float | int | str]], str]:
    """The rows of a run, and a digest of this rank's weights at its end."""
    import warnings

    from parallel_rl.training import trainer
    from parallel_rl.training.config.load import load_config
    from tests.training.helpers import CLOCK

    warnings.simplefilter("ignore")
    engines, build = [], trainer.build_engine
    trainer.build_engine = lambda *args: engines.append(build(*args)) or engines[-1]
    try:
        result = trainer.train(load_config(given[0], given[1:]), dump_step)
    finally:
        trainer.build_engine = build
    weights = b"".join(parameter.detach().numpy().tobytes() for parameter in engines[0].bare.parameters())
    rows = [{key: value for key, value in row.items() if key not in CLOCK} for row in result.rows]
    return rows, hashlib.sha256(weights).hexdigest()


def one_process(folder: Path) -> Step:
    if "one" not in _dumps:
        run_world(1, trained, arguments(folder, {}, False), 2, timeout=240)
        _dumps["one"] = read_step(folder)
    return _dumps["one"]


def same(step: Step, wanted: Step) -> None:
    assert step.lengths.tolist() == wanted.lengths.tolist() and step.texts == wanted.texts
    assert step.tokens.keys() == wanted.tokens.keys() and step.sequences.keys() == wanted.sequences.keys()
    for ours, theirs in ((step.tokens, wanted.tokens), (step.sequences, wanted.sequences)):
        for name, x in theirs.items():
            if name in EXACT or x.dtype.kind in "biu":
                assert (ours[name] == x).all(), name
            else:
                np.testing.assert_allclose(ours[name], x, rtol=1e-7, atol=1e-11, err_msg=name)
    assert step.shares == pytest.approx(wanted.shares, rel=1e-8) and wanted.tokens["held/clipped"].any()
    for key in ("config", "counts", "loss", "title"):
        if key != "title":  # the run's folder is in it
            assert step.meta[key] == wanted.meta[key]
    assert step.meta["metrics"] == pytest.approx(wanted.meta["metrics"], rel=1e-8, abs=1e-12)


@pytest.mark.slow
def test_four_ranks_dump_what_one_process_does_and_train_as_without(tmp_path: Path) -> None:
    """TP 2 × CP 2, sequence parallel, packed, for every layout; weights to the bit with and without a dump."""
    world, parallel, packing = LAYOUTS["TP 2 × CP 2 × SP packed"]
    without = run_world(world, trained, arguments(tmp_path / "without", parallel, packing), None, timeout=240)
    found = run_world(world, trained, arguments(tmp_path / "many", parallel, packing), 2, timeout=240)
    assert found == without
    assert not (tmp_path / "without/dumps").exists()
    [dump] = (tmp_path / "many/dumps").iterdir()
    assert dump.name == "rl_step_000002" and [one.name for one in dump.iterdir()] == ["piece_00000_of_00001.npz"]
    step = read_step(tmp_path / "many")
    same(step, one_process(tmp_path / "one"))
    row = json.loads((tmp_path / "many/metrics.jsonl").read_text().splitlines()[0])  # of both updates of step 1
    assert row["probs_ratio_max"] >= step.meta["metrics"]["probs_ratio_max"] > 1
    assert step.texts[3] != "" and step.meta["title"] == "many, rl step 2"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "parallel", "packing", "more"),
    [
        (4, {"pipeline": 2, "data": 2}, True, {}),
        (2, {"data": 2}, True, {"batch__tokens": 64}),
        (2, {"context": 2}, False, {}),
        (4, {"tensor": 2, "context": 2, "sequence_parallel": True}, True, {"model__fused_head": True}),
    ],
)
def test_every_layout_dumps_the_same(
    world: int, parallel: dict, packing: bool, more: dict[str, object], tmp_path: Path
) -> None:
    run_world(world, trained, arguments(tmp_path / "many", parallel, packing, **more), 2, timeout=240)
    same(read_step(tmp_path / "many"), one_process(tmp_path / "one"))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--dump-step", "0"], "--dump-step 0 is not valid: the policy's optimizer steps in rl are 1 to 2"),
        (["--dump-step", "3"], "are 1 to 2"),
    ],
)
def test_a_step_that_the_run_does_not_make_is_refused(
    words: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = arguments(tmp_path / "run", {}, False)
    assert main(["train", *given, *words]) != 0
    assert said in capsys.readouterr().err and not (tmp_path / "run").exists()
