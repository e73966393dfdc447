"""Servers kept in step: folders of weights out, versions back, restarts of either side, evaluations through them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from parallel_rl.testing.pool import WorldError, run_world
from tests.launch import UNCOMPILED
from tests.servers.engine_server import EngineServer, serve_engine
from tests.servers.server import Server
from tests.training.helpers import DATA, ROOT, cut, run, train_rows
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
    """An evaluation of four samples of each of three prompts of two sources, after each step."""
    path = tmp_path / "held_out.jsonl"
    rows = map(json.loads, (DATA / "arithmetic_held_out.jsonl").read_text().splitlines()[:HELD_OUT])
    path.write_text("".join(json.dumps({**row, "source": "ab"[number % 2]}) + "\n" for number, row in enumerate(rows)))
    return {"evaluation": "{samples: 4, every: 1, passing: 0.5}", "data__held_out": path}


@pytest.mark.parametrize(
    ("layout", "options", "staleness", "versions"),
    [
        ("TP 2", "update: vllm", [0, 0, 0], ["0", "2", "4"]),
        ("one process", "update: sglang, ahead: 1", [0, 2, 2], ["0", "2", "4"]),
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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "tells"),
    [("one process", True), ("DP 2", False)],
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


@pytest.mark.slow
def test_evaluations_go_through_the_server(tmp_path: Path, held_out: dict[str, object]) -> None:
    """Each by the weights of its step, with draws of its own; and training is what it is without them."""
    with serve_engine(EngineServer()) as server:
        rows = in_step(tmp_path / "with", server, "DP 2", **held_out)
        drawn = sum(path == COMPLETE for path in server.paths)
    assert drawn == 3 * SAMPLES + 4 * HELD_OUT * 4 + 1  # before, after each step; no sampler of the trainer's
    names = [name for name in rows[0] if name.startswith("held_out")]
    kinds = ["mean@4", "pass@2", "pass@4"]
    assert names[-1] == "held_out_samples_failed/reward"
    assert names[:-1] == [
        "held_out_reward",
        *(f"held_out_{kind}{source}" for source in ("", "/a", "/b") for kind in kinds),
    ]
    for row in rows:
        assert row["held_out_mean@4"] == pytest.approx(row["held_out_reward"])
        mean = (2 * row["held_out_mean@4/a"] + row["held_out_mean@4/b"]) / 3
        assert mean == pytest.approx(row["held_out_reward"])
    assert len({row["held_out_reward"] for row in rows}) > 1
    with serve_engine(EngineServer()) as server:
        plain = in_step(tmp_path / "without", server, "DP 2")
    assert [{name: value for name, value in row.items() if name not in names} for row in rows] == plain


def test_greedy_answers_come_from_the_server(tmp_path: Path) -> None:
    """ReMax's baseline: one likeliest answer a prompt, beside the samples."""
    with serve_engine(EngineServer()) as server:
        in_step(tmp_path, server, rl__advantages="{name: remax}")
        heats = [body["temperature"] for body in server.requests if body.get("max_tokens", 1) > 1]
    assert heats.count(0) == 3 * SAMPLES // 4 and heats.count(1) == 3 * SAMPLES


@pytest.mark.slow
def test_students_rows_come_from_the_server(tmp_path: Path) -> None:
    """On-policy distillation, of the weights of each step."""
    with serve_engine(EngineServer()) as server:
        in_step(tmp_path / "teacher", server, rl__steps=1)
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


@pytest.fixture(scope="module")
def own_server() -> Iterator[Server]:
    """examples/serve_policy.py: a server that draws from the very weights that it was told to load, from its own before."""
    config = run("grpo_from_server.yaml", run__seed=5, rl__server__model="tiny")
    command = [sys.executable, str(ROOT / "examples" / "serve_policy.py"), "0", *config]
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", **UNCOMPILED}
    quiet = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(command, env=environment, text=True, **quiet) as process:
        try:
            assert process.stdout is not None
            yield Server(process.stdout.readline().split()[-1])
        finally:
            process.terminate()


SEVENS = {
    "model__hidden": 64,
    "run__dtype": "float32",
    "batch__micro_batch_size": 64,
    "reward": "sevens",
    "rl__prompts": 16,
    "rl__group_size": 8,
    "rl__optimizer": "{lr: 1e-2}",
}


def random_llama(rank: int, folder: Path, layers: int = 2) -> None:
    """Writes a folder on this rank of the pool, of the demo's vocabulary and with a head_dim that vLLM has on a CPU."""
    from parallel_rl.megatron import build_config, build_model, initialize
    from parallel_rl.megatron.hf import save_hf

    initialize()
    config = build_config(num_layers=layers, hidden_size=64, num_attention_heads=2, gated=True)
    save_hf(build_model(config, 15, 64, position_embedding="rope", seed=3), folder)


def drift(rows: list[dict]) -> list[float]:
    """How far the trainer's log-probs are from the server's, by step: a missed update shows here and nowhere else."""
    return [abs(row["sampling_importance_ratio"] - 1) for row in rows]


@pytest.mark.slow
def test_the_server_has_the_trainers_weights(tmp_path: Path, own_server: Server) -> None:
    """With real weights and log-probs, which come from another seed's model before the first update."""
    options = "update: vllm, batch_size: 128, max_mismatch: 1e-3"
    rows = in_step(tmp_path / "kept", own_server, "TP 2", options, **SEVENS)
    assert max(drift(rows)) < 1e-5 and max(row["mismatch"] for row in rows) < 1e-5
    options = "update: sglang, batch_size: 128, update_every: 9"
    faster = {**SEVENS, "rl__optimizer": "{lr: 2e-2}"}
    left_out = drift(in_step(tmp_path / "left_out", own_server, "one process", options, **faster))
    assert left_out[0] < 1e-5 and min(left_out[1:]) > 0.05


@pytest.mark.slow
def test_a_policy_learns_from_its_own_server(tmp_path: Path, own_server: Server) -> None:
    """Takes ten seconds: twelve steps, until the reward is learned, with a real server's samples."""
    options = "update: sglang, batch_size: 128"
    rows = in_step(tmp_path / "one", own_server, "one process", options, **{**SEVENS, "rl__steps": 12})
    ahead = in_step(tmp_path / "ahead", own_server, "one process", f"{options}, ahead: 1", **SEVENS)
    assert max(drift(rows)) < 1e-5 and max(drift(ahead)) > 1e-3
    assert rows[-1]["reward"] >= 0.9 > rows[0]["reward"]
    assert [row["staleness_max"] for row in ahead] == [0, 2, 2]
