"""What cannot be kept in step with the trainer is an error on every rank: servers, weights, and options."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from parallel_rl.testing.pool import WorldError
from parallel_rl.training.config.load import load_config
from parallel_rl.training.config.sections import ServerConfig
from tests.servers.engine_server import EngineServer, serve_engine
from tests.training.helpers import run
from tests.training.rollouts.test_in_step import COMPLETE, in_step

pytest.importorskip("safetensors")


def test_a_sample_of_another_version_than_was_acknowledged(tmp_path: Path) -> None:
    """As behind an address that leads to several servers, one of which took the weights."""

    class Another(EngineServer):
        def __call__(self, path: str, body: dict) -> tuple[int, object]:
            status, found = super().__call__(path, body)
            if path == COMPLETE and body["max_tokens"] > 1:
                found["metadata"] = {"weight_version": "7"}  # type: ignore[index]
            return status, found

    with serve_engine(Another()) as server, pytest.raises(WorldError) as caught:
        in_step(tmp_path, server, "DP 2")
    wanted = f"{server.root}: a sample is of version 7, although the server acknowledged version 0"
    assert sorted(caught.value.errors) == [0, 1] and all(wanted in error for error in caught.value.errors.values())


@pytest.mark.parametrize(
    ("engine", "more", "message"),
    [
        (EngineServer(lacks=("/weight_info",)), {}, "vllm has no /weight_info: start it with VLLM_SERVER_DEV_MODE=1"),
        (EngineServer(stays=True), {}, "after loading the weights of version 0 it reports version 'default'"),
        (EngineServer(lacks=(COMPLETE,)), {}, "status 404 Not Found"),
        (EngineServer(lacks=("/collective_rpc",)), {}, "vllm has no /collective_rpc"),
        (EngineServer(), {"rl__server__model": "other"}, "it has no model 'other'; it serves 'tiny'"),
        (EngineServer(words=12), {}, "status 400 .*token id 14 is out of vocabulary"),
    ],
    ids=["no developer's mode", "another version", "no completions", "no load", "another model", "another vocabulary"],
)
def test_a_server_that_cannot_be_kept_in_step_is_an_error_on_every_rank(
    engine: EngineServer, more: dict[str, object], message: str, tmp_path: Path
) -> None:
    """Before the first sample is asked for; nothing is trained, and no rank waits for another."""
    with serve_engine(engine) as server, pytest.raises(WorldError) as caught:
        in_step(tmp_path, server, "TP 2", **more)
    assert sorted(caught.value.errors) == [0, 1] and not (tmp_path / "checkpoints").exists()
    for error in caught.value.errors.values():
        assert re.search(message, error), error
    assert not any(body.get("max_tokens", 1) > 1 for body in server.requests)


def test_weights_that_cannot_be_written(tmp_path: Path) -> None:
    """What stands in their place stays as it is."""
    (tmp_path / "policy").write_text("mine")
    with serve_engine(EngineServer()) as server, pytest.raises(WorldError) as caught:
        in_step(tmp_path, server, "TP 2")
    assert sorted(caught.value.errors) == [0, 1] and (tmp_path / "policy").read_text() == "mine"
    assert all("policy" in error and "cannot be written" in error for error in caught.value.errors.values())


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ("rl.server", "update = 'vllm' is incompatible with api = 'sglang', which vLLM does not serve"),
        ("rows: examples", "'server' has no effect with rows = 'examples'; set rows to 'policy'"),
        ("ahead: 1", "server.ahead = 1 has no effect in distillation"),
        ("max_mismatch: 1", "server.max_mismatch = 1.0 has no effect in distillation"),
        ("max_staleness: 2", "server.max_staleness = 2 has no effect in distillation"),
    ],
)
def test_options_that_contradict_each_other(section: str, message: str, tmp_path: Path) -> None:
    if section == "rl.server":
        with pytest.raises(ValueError, match=message):
            ServerConfig(url="http://x", api="sglang", update="vllm")
        return
    rows, option = ("examples", "") if section.startswith("rows") else ("policy", f", {section}")
    server = f"{{url: 'http://x', model: tiny{option}}}"
    given = f"{{steps: 1, batch_size: 8, optimizer: {{lr: 1e-3}}, teacher: {tmp_path}, rows: {rows}, server: {server}}}"
    arguments = run("grpo_arithmetic.yaml", rl="null", warmup="null", distillation=given)
    with pytest.raises(ValueError, match=message):
        load_config(arguments[0], arguments[1:])
