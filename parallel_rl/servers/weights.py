"""Weights of inference servers: vLLM and SGLang load a Hugging Face folder in place and report a version."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, TypeVar

from parallel_rl.servers.completion_server import CompletionServerConfig, CompletionServerError
from parallel_rl.servers.http_client import Poster, ServerError, Workers, gather, read_json

ResultT = TypeVar("ResultT")
EngineName = Literal["vllm", "sglang"]
Order = tuple[str, object]  # a path, and the body to post

SHAPE = (
    "model_type",
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "tie_word_embeddings",
)
_PROBE_TIMEOUT = 10.0  # seconds per attempt: faults must show before GPUs have waited long


@dataclass(frozen=True)
class Protocol:
    """How an engine receives weights.

    Attributes:
        pause, resume: orders around `load`, which lists orders for a folder and a version.
        version: path to GET for `weight_version`. hint: what a server without these paths lacks.
    """

    pause: Order
    load: Callable[[str, str], Sequence[Order]]
    resume: Order
    version: str
    hint: str


def _load_vllm(folder: str, version: str) -> Sequence[Order]:
    return (
        ("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": folder}}),
        ("/reset_prefix_cache", {}),
        ("/update_weight_version", {"new_version": version}),
    )


def _load_sglang(folder: str, version: str) -> Sequence[Order]:
    return (
        ("/update_weights_from_disk", {"model_path": folder, "weight_version": version}),
        ("/flush_cache", {}),
    )


PROTOCOLS: Mapping[EngineName, Protocol] = {
    "vllm": Protocol(
        ("/pause?mode=wait", {}),
        _load_vllm,
        ("/resume", {}),
        "/weight_info",
        "start it with VLLM_SERVER_DEV_MODE=1 (vLLM 0.32 or newer)",
    ),
    "sglang": Protocol(
        ("/pause_generation", {"mode": "retract"}),
        _load_sglang,
        ("/continue_generation", {}),
        "/model_info",
        "is it SGLang, and new enough to have it?",
    ),
}


class ServerWeights:
    """Updates the weights of a config's servers; every order goes to all at once, each on a thread."""

    def __init__(self, config: CompletionServerConfig, engine: EngineName) -> None:
        self.config, self.engine, self._protocol = config, engine, PROTOCOLS[engine]
        self._poster = config.poster()
        # an engine may end on a failed load; a retry's answer would say less than the first
        self._once = replace(self._poster, config=replace(config, retries=0, wait=0))
        brief = replace(config, timeout=min(config.timeout, _PROBE_TIMEOUT))
        self._probe = replace(self._poster, config=brief)

    def update(self, folder: Path, version: int, urls: Sequence[str] | None = None) -> list[Future[None]]:
        """Order all servers, or some, to pause, load `folder`, clear their caches and resume.

        A future fails with CompletionServerError if a server refuses, does not answer, or does not report `version`.
        """
        return self._all(lambda url: self._update(url, str(folder.absolute()), str(version)), urls)

    def versions(self) -> list[Future[str]]:
        """Return each server's version; a future fails with CompletionServerError if there is none."""
        return self._all(lambda url: self._version(url, self._poster))

    def check(self, shape: Mapping[str, object], *, as_drawn: bool = True) -> None:
        """Check, before training, that every server can follow the policy; waits for the answers.

        `shape`, the policy's config.json, is compared if the server's folder can be read. `as_drawn`: log-probs must be of
        the tempered or truncated distribution, as vLLM reports.
        CompletionServerError: no answer, a missing endpoint, another model, or other log-probs.
        """
        gather(self._all(lambda url: self._check(url, shape, as_drawn)), threading.Event())

    def _all(self, call: Callable[[str], ResultT], urls: Sequence[str] | None = None) -> list[Future[ResultT]]:
        workers = Workers(len(self.config.urls))
        return [workers.submit(lambda url=url: call(url)) for url in urls or self.config.urls]  # type: ignore[misc]

    def _update(self, url: str, folder: str, version: str) -> None:
        for last in (False, True):  # wait for a server that ends on the way, and restart its update once
            self._post(self._poster, url, self._protocol.pause)
            try:
                for order in self._protocol.load(folder, version):
                    self._post(self._once, url, order)
                break
            except ServerError as error:
                with contextlib.suppress(ServerError):  # others may use it
                    self._post(self._once, url, self._protocol.resume)
                if last or not error.lost:
                    raise
        self._post(self._poster, url, self._protocol.resume)
        if (reported := self._version(url, self._poster)) != version:
            raise self._poster.failure(
                url, f"after loading the weights of version {version} it reports version {reported!r}"
            )

    def _check(self, url: str, shape: Mapping[str, object], as_drawn: bool) -> None:
        folder = self._folder(url)
        self._version(url, self._probe)
        if self.engine == "vllm":
            info = self._get(url, "/server_info?config_format=json", self._probe)
            mode = _inside(info, "vllm_config", "model_config", "logprobs_mode")
            if as_drawn and mode not in (None, "processed_logprobs"):
                raise self._poster.failure(
                    url,
                    f"logprobs_mode = {mode!r} ignores temperature, top_k and top_p; start it with --logprobs-mode "
                    "processed_logprobs",
                )
        served = _config_of(folder)
        differ = [key for key in SHAPE if {key} <= served.keys() & shape.keys() and served[key] != shape[key]]
        if differ:
            theirs, ours = (", ".join(f"{key} {sizes[key]!r}" for key in differ) for sizes in (served, shape))
            raise self._poster.failure(url, f"it serves another model, {folder}, with {theirs}; the policy has {ours}")

    def _folder(self, url: str) -> str | None:
        if self.config.api == "openai":
            models = _inside(self._get(url, "/v1/models", self._probe), "data")
            served = {_text(_inside(model, "id")): model for model in models} if isinstance(models, list) else {}
            if self.config.model not in served:
                raise self._poster.failure(
                    url, f"it has no model {self.config.model!r}; it serves {', '.join(map(repr, served)) or 'none'}"
                )
            if self.engine == "vllm":
                return _text(_inside(served[self.config.model], "root"))
        if self.engine != "sglang":
            return None
        return _text(_inside(self._get(url, "/model_info", self._probe), "model_path"))

    def _version(self, url: str, poster: Poster) -> str:
        answer = self._get(url, self._protocol.version, poster)
        version = _inside(answer, "weight_version")
        if version is None:
            raise self._poster.failure(
                url + self._protocol.version, f"its answer has no weight_version: {str(answer)[:200]}"
            )
        return str(version)

    def _get(self, url: str, path: str, poster: Poster) -> object:
        return self._ask(poster, url, path, None, read_json)

    def _post(self, poster: Poster, url: str, order: Order) -> None:
        path, body = order
        self._ask(poster, url, path, body, _accepted)

    def _ask(self, poster: Poster, url: str, path: str, body: object, read: Callable[[bytes], ResultT]) -> ResultT:
        try:
            return poster.post(url + path, body, read, threading.Event())
        except CompletionServerError as error:
            if error.status != 404 or path.startswith("/v1/"):
                raise
            raise CompletionServerError(f"{error}; {self.engine} has no {path}: {self._protocol.hint}") from None


def _accepted(answer: bytes) -> None:
    """Refuse an answer with "success": false; accept texts and empty answers."""
    try:
        reply = read_json(answer)
    except ValueError:
        return
    if _inside(reply, "success") is False:
        raise ValueError(f"the server refused: {answer[:400].decode(errors='replace')}")


def _config_of(folder: str | None) -> Mapping[str, object]:
    try:
        config = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8")) if folder else {}
    except (OSError, ValueError, RecursionError):
        return {}
    return config if isinstance(config, dict) else {}


def _inside(value: object, *keys: str) -> object:
    for key in keys:
        value = value.get(key) if isinstance(value, dict) else None
    return value


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None
