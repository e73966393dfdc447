"""Servers kept in step: folders of weights out, versions back, restarts of either side, evaluations through them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from parallel_rl.testing.pool import WorldError, run_world
from tests.experience.engine_server import EngineServer, serve_engine
from tests.experience.server import Server
from tests.training.helpers import DATA, cut, run, train_rows
from tests.training.rollouts.test_remote import SAMPLES, SMALL, train

pytest.importorskip("safetensors")

LLAMA = {"model__position": "rope", "model__gated": "true", "model__heads": 2}
COMPLETE = "/v1/completions"
HELD_OUT = 3


def in_step(
    folder: Path, server: Server, layout: str = "one process", options: str = "update: vllm", **more: object
) -> list:
    return train(folder, server, layout, options, **{**LLAMA, **more})


@pytest.fixture
def held_out(tmp_path: Path) -> dict[str, object]:
    """An evaluation of four samples of each of three prompts, after each step."""
    path = tmp_path / "held_out.jsonl"
    path.write_text("".join((DATA / "arithmetic_held_out.jsonl").read_text().splitlines(keepends=True)[:HELD_OUT]))
    return {"evaluation": "{samples: 4, every: 1, passing: 0.5}", "data__held_out": path}


@pytest.mark.parametrize(
    ("layout", "options", "staleness", "versions"),
    [
        ("TP 2", "update: vllm", [0, 0, 0], ["0", "2", "4"]),
        ("one process", "update: sglang, ahead: 1", [0, 2, 2], ["0", "2", "4"]),
        pytest.param("DP 2", "update: vllm, ahead: 1", [0, 2, 2], ["0", "2", "4"], marks=pytest.mark.slow),
        pytest.param("PP 2", "update: sglang, update_every: 2", [0, 2, 0], ["0", "4"], marks=pytest.mark.slow),
    ],
)
def test_weights_go_out_before_each_step(
    layout: str, options: str, staleness: list[int], versions: list[str], tmp_path: Path
) -> None:
    """A folder for each version, of which two stay; and no sample in flight meets an update."""
    name = "vllm" if "vllm" in options else "sglang"
    engine = EngineServer(name, tells=name == "sglang")
    with serve_engine(engine) as server:
        rows = in_step(tmp_path, server, layout, options)
        orders = [body for body in server.requests if body.get("kwargs") or "model_path" in body]
        probes = sum(body.get("max_tokens") == 1 for body in server.requests)
        drawn = sum(path == COMPLETE for path in server.paths)
    folders = [Path(order.get("model_path") or order["kwargs"]["weights_path"]) for order in orders]
    assert [re.fullmatch(r"version_0*(\d+)_\d+", folder.name)[1] for folder in folders] == versions  # type: ignore[index]
    assert len(set(folders)) == len(folders) == len(engine.read) == len(set(engine.read.values()))
    assert {path.name for path in (tmp_path / "policy").iterdir()} == {folder.name for folder in folders[-2:]}
    assert [row["staleness_max"] for row in rows] == staleness == [row["staleness_mean"] for row in rows]
    assert probes == 1 and drawn == 3 * SAMPLES + probes


@pytest.mark.parametrize(
    ("layout", "tells"), [("one process", True), pytest.param("TP 2", False, marks=pytest.mark.slow), ("DP 2", False)]
)
def test_a_server_that_was_restarted_is_noticed(layout: str, tells: bool, tmp_path: Path) -> None:
    """What it drew of the weights that it began with is drawn again: the run is the one without the restart, to the bit."""

    class Restarts(EngineServer):
        asked = 0

        def __call__(self, path: str, body: dict) -> tuple[int, object]:
            self.asked += path == COMPLETE
            if path == COMPLETE and self.asked == SAMPLES + 5:
                self.restart()
            return super().__call__(path, body)

    with serve_engine(EngineServer(tells=tells)) as server:
        expected = in_step(tmp_path / "one", server, layout)
    engine = Restarts(tells=tells)
    with serve_engine(engine) as server:
        rows = in_step(tmp_path / "two", server, layout)
    assert engine.asked > 3 * SAMPLES + 1 and engine.calls.count("/collective_rpc") == 4
    assert rows == expected


def test_a_server_that_never_keeps_its_weights(tmp_path: Path) -> None:
    class Forgets(EngineServer):
        def __call__(self, path: str, body: dict) -> tuple[int, object]:
            if path == COMPLETE:
                self.restart()
            return super().__call__(path, body)

    with serve_engine(Forgets()) as server, pytest.raises(WorldError, match="lost the trainer's weights 3 times"):
        in_step(tmp_path, server)


def test_a_trainer_that_goes_on_sends_its_weights_before_it_asks(tmp_path: Path) -> None:
    """The server has meanwhile been started again, and what the killed run wrote is under no path that is read twice."""
    more = {"run__checkpoint_every": 1, "run__keep_checkpoints": 9}
    with serve_engine(EngineServer()) as server:
        rows = in_step(tmp_path / "whole", server, **more)
    cut(tmp_path / "whole", tmp_path / "later", 2)
    old = {path.name for path in (tmp_path / "later" / "policy").iterdir()}
    engine = EngineServer()
    with serve_engine(engine) as server:
        assert in_step(tmp_path / "later", server, **more) == rows[2:]
        loads = [place for place, path in enumerate(server.paths) if path == "/collective_rpc"]
        asked = [place for place, body in enumerate(server.requests) if body.get("max_tokens", 1) > 1]
    assert loads[0] < asked[0] and not old & {Path(path).name for path in engine.read}


@pytest.mark.parametrize("layout", ["one process", "DP 2"])
def test_evaluations_go_through_the_server(layout: str, tmp_path: Path, held_out: dict[str, object]) -> None:
    """Each by the weights of its step, with draws of its own; and training is what it is without them."""
    with serve_engine(EngineServer()) as server:
        rows = in_step(tmp_path / "with", server, layout, **held_out)
        drawn = sum(path == COMPLETE for path in server.paths)
    assert drawn == 3 * SAMPLES + 4 * HELD_OUT * 4 + 1  # before, after each step; no sampler of the trainer's
    names = [name for name in rows[0] if name.startswith("held_out")]
    assert names == ["held_out_reward", "held_out_mean@4", "held_out_pass@2", "held_out_pass@4"]
    assert all(row["held_out_mean@4"] == pytest.approx(row["held_out_reward"]) for row in rows)
    assert len({row["held_out_reward"] for row in rows}) > 1
    with serve_engine(EngineServer()) as server:
        plain = in_step(tmp_path / "without", server, layout)
    assert [{name: value for name, value in row.items() if name not in names} for row in rows] == plain


def test_greedy_answers_come_from_the_server(tmp_path: Path) -> None:
    """ReMax's baseline: one likeliest answer a prompt, beside the samples."""
    with serve_engine(EngineServer()) as server:
        in_step(tmp_path, server, rl__advantages="{name: remax}")
        heats = [body["temperature"] for body in server.requests if body.get("max_tokens", 1) > 1]
    assert heats.count(0) == 3 * SAMPLES // 4 and heats.count(1) == 3 * SAMPLES


def test_students_rows_come_from_the_server(tmp_path: Path) -> None:
    """On-policy distillation, of the weights of each step."""
    with serve_engine(EngineServer()) as server:
        in_step(tmp_path / "teacher", server, run__checkpoint_every=1)
        before = len(server.requests)
        given = {name: value for name, value in {**SMALL, **LLAMA}.items() if not name.startswith("rl__")}
        given |= {"run__dir": tmp_path / "student", "parallel": "{}", "rl": "null"}
        address = f"{{url: {server.root}, model: tiny, update: vllm}}"
        teacher = max((tmp_path / "teacher" / "checkpoints").iterdir())
        section = (
            f"{{steps: 3, batch_size: 8, optimizer: {{lr: 3e-3}}, teacher: {teacher}, rows: policy, server: {address}}}"
        )
        results = run_world(2, train_rows, run("grpo_arithmetic.yaml", **given, distillation=section))
        requests = server.requests[before:]
        asked = [body for body in requests if body.get("max_tokens", 1) > 1]
    assert len(results[0]) == 3 and results[0] == results[1] and len(asked) == 3 * 8
    assert sum("kwargs" in body for body in requests) == 3
