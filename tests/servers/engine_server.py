"""A server that is kept in step as vLLM and SGLang are: it holds the weights of the folders that it is told to load."""

from __future__ import annotations

import hashlib
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tests.servers.policy_server import Policy, answer
from tests.servers.server import Server, serve


@dataclass
class EngineServer:
    """Loads only while it is paused, answers only while it is not, and has cached the prefixes of old weights until a flush.

    A path that it has read before gives the weights of the first time, as real engines may.

    Attributes:
        engine: whose endpoints it has.
        lacks: paths that it does not have.
        stays: tells the version that it began with, whatever it is given.
        tells: whether its completions tell their version.
        model: the folder that it says it was started from.
        words: of its vocabulary.
    """

    engine: str = "vllm"
    lacks: tuple[str, ...] = ()
    stays: bool = False
    tells: bool = False
    model: str | None = None
    words: int = 15
    mode: str = "processed_logprobs"
    version: str = "default"
    weights: int = 0
    paused: bool = False
    dirty: bool = False
    calls: list[str] = field(default_factory=list)
    read: dict[str, int] = field(default_factory=dict)

    def restart(self) -> None:
        """As a new process would be."""
        self.version, self.weights, self.paused, self.dirty, self.read = "default", 0, False, False, {}

    def __call__(self, path: str, body: dict) -> tuple[int, object]:
        path = path.partition("?")[0]
        own = {
            "vllm": ("/collective_rpc", "/weight_info", "/server_info"),
            "sglang": ("/update_weights_from_disk", "/model_info"),
        }
        others = [name for engine, names in own.items() if engine != self.engine for name in names]
        if path in self.lacks or path in others:
            return 404, {"detail": "Not Found"}
        if path in ("/v1/completions", "/generate"):
            if self.paused or self.dirty:
                return 400, {"error": f"asked while paused = {self.paused}, dirty = {self.dirty}"}
            if outside := [token for prompt in body.get("prompt", ()) for token in prompt if token >= self.words]:
                return 400, {"error": f"token id {outside[0]} is out of vocabulary"}
            return 200, answer(Policy(weights=self.weights, version=self.version if self.tells else None), body)
        self.calls.append(path)
        match path:
            case "/health":
                return 200, {}
            case "/v1/models":
                return 200, {"data": [{"id": "tiny", "root": self.model}]}
            case "/server_info":
                return 200, {"vllm_config": {"model_config": {"logprobs_mode": self.mode}}}
            case "/weight_info" | "/model_info":
                return 200, {"weight_version": self.version, "model_path": self.model}
            case "/pause" | "/pause_generation":
                self.paused = True
            case "/collective_rpc" if body["method"] == "reload_weights":
                return self._load(body["kwargs"]["weights_path"])
            case "/update_weights_from_disk":
                status, found = self._load(body["model_path"])
                self._tell(body["weight_version"])
                return status, found
            case "/reset_prefix_cache" | "/flush_cache":
                self.dirty = False
            case "/update_weight_version":
                self._tell(body["new_version"])
            case "/resume" | "/continue_generation":
                self.paused = False
            case _:
                return 404, {"detail": "Not Found"}
        return 200, {"success": True}

    def _load(self, folder: str) -> tuple[int, object]:
        if not self.paused:
            return 400, {"success": False, "message": "not paused"}
        try:
            raw = b"".join(path.read_bytes() for path in sorted(Path(folder).glob("*.safetensors")))
        except OSError as error:
            return 500, {"error": str(error)}
        if not raw:
            return 500, {"error": f"there are no weights in {folder}"}
        self.weights = self.read.setdefault(folder, int.from_bytes(hashlib.sha256(raw).digest()[:6], "big"))
        self.dirty = True
        return 200, {"success": True}

    def _tell(self, version: str) -> None:
        self.version = self.version if self.stays else version


@contextmanager
def serve_engine(engine: EngineServer, port: int = 0, host: str = "127.0.0.1") -> Iterator[Server]:
    """The engine on a port of this host, for the length of a `with` block."""
    found: list[Server] = []
    with serve(lambda number, body: engine(found[0].paths[number], body), port, host) as server:
        found.append(server)
        yield server


if __name__ == "__main__":  # HOST PORT SECONDS: of a process of its own, which takes so long for a completion
    took = float(sys.argv[3])

    class Slow(EngineServer):
        def __call__(self, path: str, body: dict) -> tuple[int, object]:
            time.sleep(took if path == "/v1/completions" else 0)
            return super().__call__(path, body)

    with serve_engine(Slow(), int(sys.argv[2]), sys.argv[1]):
        threading.Event().wait()
