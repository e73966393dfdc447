"""Servers given weights by their engines' own endpoints: the order of the calls, the version, and what can be wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from parallel_rl.servers.completion_server import CompletionServerConfig, CompletionServerError
from parallel_rl.servers.weights import ServerWeights
from tests.servers.engine_server import EngineServer, serve_engine

ORDERS = {
    "vllm": ["/pause", "/collective_rpc", "/reset_prefix_cache", "/update_weight_version", "/resume", "/weight_info"],
    "sglang": ["/pause_generation", "/update_weights_from_disk", "/flush_cache", "/continue_generation", "/model_info"],
}
SHAPE = {"vocab_size": 15, "num_hidden_layers": 2}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    return tmp_path


def weights(engine: str, *urls: str, **options: object) -> ServerWeights:
    config = CompletionServerConfig(url=urls, model="tiny", backoff=0.01, retries=1, **options)  # type: ignore[arg-type]
    return ServerWeights(config, engine)  # type: ignore[arg-type]


def results(futures: list) -> list:
    return [future.result() for future in futures]


@pytest.mark.parametrize("name", ["vllm", "sglang"])
def test_every_server_pauses_loads_flushes_and_goes_on(name: str, folder: Path) -> None:
    """The engine refuses whatever comes at the wrong moment: this protects the order, and that no step is left out."""
    engines = [EngineServer(name), EngineServer(name)]
    with serve_engine(engines[0]) as one, serve_engine(engines[1]) as two:
        ours = weights(name, one.root, two.root)
        assert results(ours.versions()) == ["default", "default"]
        results(ours.update(folder, 3))
        assert results(ours.versions()) == ["3", "3"]
        results(ours.update(folder, 4, [two.root]))
    for engine in engines:
        assert engine.weights and not engine.paused and not engine.dirty
        assert engine.calls[1 : 1 + len(ORDERS[name])] == ORDERS[name]
    assert [engine.version for engine in engines] == ["3", "4"]


@pytest.mark.parametrize("name", ["vllm", "sglang"])
def test_a_server_that_cannot_load_goes_on_and_says_why(name: str, tmp_path: Path) -> None:
    """Others may use it: it must not stay paused; and what a dead engine says next must not hide the first answer."""
    engine = EngineServer(name)
    with (
        serve_engine(engine) as server,
        pytest.raises(CompletionServerError, match=f"there are no weights in {tmp_path}"),
    ):
        results(weights(name, server.root).update(tmp_path, 3))
    assert not engine.paused and engine.calls.count(ORDERS[name][1]) == 1


def test_a_version_that_does_not_arrive(folder: Path) -> None:
    with (
        serve_engine(EngineServer(stays=True)) as server,
        pytest.raises(CompletionServerError, match="loading the weights of version 3 it reports version 'default'"),
    ):
        results(weights("vllm", server.root).update(folder, 3))


@pytest.mark.parametrize(
    ("name", "engine", "message"),
    [
        (
            "vllm",
            EngineServer(lacks=("/weight_info",)),
            "vllm has no /weight_info: start it with VLLM_SERVER_DEV_MODE=1",
        ),
        ("vllm", EngineServer("sglang"), "vllm has no /weight_info"),
        ("sglang", EngineServer("vllm"), "sglang has no /model_info"),
        (
            "vllm",
            EngineServer(mode="raw_logprobs"),
            "logprobs_mode = 'raw_logprobs' ignores.*--logprobs-mode processed_logprobs",
        ),
    ],
)
def test_servers_that_cannot_be_kept_in_step(name: str, engine: EngineServer, message: str) -> None:
    with serve_engine(engine) as server, pytest.raises(CompletionServerError, match=message):
        weights(name, server.root).check(SHAPE)


@pytest.mark.parametrize("name", ["vllm", "sglang"])
def test_a_server_of_another_model(name: str, tmp_path: Path) -> None:
    """vLLM only warns where a folder has fewer layers, and trains on with a policy that is half the old one."""
    for config, message in (
        (
            {"vocab_size": 15, "num_hidden_layers": 4},
            "it serves another model, .* with num_hidden_layers 4; the policy has",
        ),
        ({"vocab_size": 32}, "with vocab_size 32; the policy has vocab_size 15"),
        ({"vocab_size": 15, "num_hidden_layers": 2, "more": 1}, None),
    ):
        (tmp_path / "config.json").write_text(json.dumps(config))
        with serve_engine(EngineServer(name, model=str(tmp_path))) as server:
            if message is None:
                weights(name, server.root).check(SHAPE)
                continue
            with pytest.raises(CompletionServerError, match=message):
                weights(name, server.root).check(SHAPE)
    with (
        serve_engine(EngineServer(name)) as server,
        pytest.raises(CompletionServerError, match=r"no model 'other'.*'tiny'"),
    ):
        ServerWeights(CompletionServerConfig(url=server.root, model="other"), name).check(SHAPE)  # type: ignore[arg-type]


def test_the_key_goes_along_and_into_no_message(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.setenv("SERVER_KEY", "secret")
    with serve_engine(EngineServer(lacks=("/resume",))) as server:
        ours = weights("vllm", server.root, api_key_env="SERVER_KEY")
        with pytest.raises(CompletionServerError) as caught:
            results(ours.update(folder, 1))
        assert {headers["Authorization"] for headers in server.headers} == {"Bearer secret"}
    assert "secret" not in str(caught.value)
