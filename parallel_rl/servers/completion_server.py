"""Completions with log-probs from vLLM's or SGLang's servers: balanced, bounded, retried, checked."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import torch

from parallel_rl.config.shown import Secret, check_address
from parallel_rl.servers.completions import Completion, Expected, read_native, read_openai
from parallel_rl.servers.http_client import Poster, PostingConfig, ServerError, Workers, gather
from parallel_rl.vocab.sampling import sample_keys
from parallel_rl.vocab.shards import Truncation

_APIS = {"openai": ("/v1/completions", read_openai), "sglang": ("/generate", read_native)}
_SEEDS = (1 << 53) - 1  # exact in every JSON parser


class CompletionServerError(ServerError):
    """A completion server failed; the message names URL, attempt, sample and answer."""


@dataclass(frozen=True, kw_only=True)
class CompletionServerConfig(PostingConfig):
    """Servers of one policy that return token ids and log-probs; other options as in `PostingConfig`.

    Attributes:
        url: "http://host:port", or several that serve the same policy; the least loaded gets the request.
        model: its name in requests (`api = "openai"` only).
        api: "openai" is /v1/completions of vLLM and SGLang; "sglang" is SGLang's own /generate.
        api_key_env: the environment variable with the key, sent as a bearer token.
        batch_size: samples in a request. /v1/completions takes one seed a request, so beyond 1 the samples depend on their
            request's others; a prompt is never twice in a request, because engines would sample both alike.
    """

    url: str | tuple[str, ...]
    model: str | None = None
    api: Literal["openai", "sglang"] = "openai"
    api_key_env: str | None = None
    timeout: float = 600.0
    batch_size: int = 1
    concurrency: int = 64

    def __post_init__(self) -> None:
        if not self.urls:
            raise ValueError("url is empty; give at least one address")
        for url in self.urls:
            check_address(url)
            if url.endswith("/v1"):
                raise ValueError(f"url = {url!r} ends with /v1, which is added automatically; leave /v1 out")
        if len(set(self.urls)) < len(self.urls):
            raise ValueError(f"url = {list(self.urls)} names a server twice")
        if self.api == "openai" and not self.model:
            raise ValueError(
                f"model = {self.model!r} is missing; api = 'openai' needs the name under which it is served"
            )
        if self.api == "sglang" and self.model is not None:
            raise ValueError(
                f"model = {self.model!r} has no effect with api = 'sglang', which serves one; leave it out"
            )
        if self.api_key_env is not None:
            Secret.of_environment(self.api_key_env)
        super().__post_init__()

    @property
    def urls(self) -> tuple[str, ...]:
        return tuple(url.rstrip("/") for url in ((self.url,) if isinstance(self.url, str) else self.url))

    def poster(self) -> Poster:
        key = None if self.api_key_env is None else Secret.of_environment(self.api_key_env)
        return Poster("completion server", self, CompletionServerError, key)


@dataclass(frozen=True)
class Sampling:
    """Sampling options; a completion with a `fault` is resampled with new seeds, at most `redraws` times."""

    max_tokens: int
    ends: tuple[int, ...]
    vocab_size: int
    temperature: float = 1.0
    seed: int = 0
    top_k: int | None = None
    top_p: float | None = None
    redraws: int = 0

    def __post_init__(self) -> None:
        Truncation(self.top_k, self.top_p).check(self.vocab_size)


class CompletionServer:
    """Requests completions of token-id prompts, at most `concurrency` at a time over all callers."""

    def __init__(self, config: CompletionServerConfig, sampling: Sampling) -> None:
        self.config, self.sampling = config, sampling
        self._poster = config.poster()
        self._workers = Workers(config.concurrency)
        self._loads = _Loads(config.urls)
        self._stop = threading.Event()  # of submitted requests; set by `close`
        self._stops = {self._stop}
        self._lock = threading.Lock()

    def complete(
        self, prompts: Sequence[Sequence[int]], sample_ids: Sequence[int], sampling: Sampling | None = None
    ) -> list[Completion]:
        """Complete N prompts; after a failure the call's other requests are abandoned.

        The first of the N `sample_ids` in a request seeds it; `sampling` replaces the servers' own options.
        ValueError: lists of different lengths, or an empty prompt. CompletionServerError: a failure or wrong answer.
        """
        with self._stopping() as stop:
            completions = gather(self._submit(prompts, sample_ids, sampling, stop), stop)
        if faults := [completion.fault for completion in completions if completion.fault is not None]:
            raise CompletionServerError(faults[0])
        return completions

    def submit(
        self, prompts: Sequence[Sequence[int]], sample_ids: Sequence[int], sampling: Sampling | None = None
    ) -> list[Future[Completion]]:
        """Start `complete` without waiting: one future a sample, whose completion may have a `fault`."""
        return self._submit(prompts, sample_ids, sampling, self._stop)

    def close(self) -> None:
        """Start no further attempt: open requests fail."""
        with self._lock:
            for stop in self._stops:
                stop.set()

    @contextmanager
    def _stopping(self) -> Iterator[threading.Event]:
        """Yield the event that stops the requests of one call; `close` sets it, too."""
        stop = threading.Event()
        with self._lock:
            self._stops.add(stop)
            if self._stop.is_set():
                stop.set()
        try:
            yield stop
        finally:
            with self._lock:
                self._stops.discard(stop)

    def _submit(
        self,
        prompts: Sequence[Sequence[int]],
        sample_ids: Sequence[int],
        sampling: Sampling | None,
        stop: threading.Event,
    ) -> list[Future[Completion]]:
        if len(prompts) != len(sample_ids):
            raise ValueError(f"{len(prompts)} prompts and {len(sample_ids)} sample_ids; their numbers must be equal")
        for sample, prompt in zip(sample_ids, prompts, strict=True):
            if not prompt:
                raise ValueError(f"the prompt of sample {sample} is empty; at least one token is needed")
        sampling = sampling or self.sampling
        # here: torch must not run in threads that the program's end may cut off
        keys = sample_keys(
            sampling.seed, torch.tensor(sample_ids, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
        )
        seeds: list[int] = (keys & _SEEDS).tolist()
        completions: list[Future[Completion]] = [Future() for _ in prompts]
        for rows in _batches(prompts, self.config.batch_size):
            chosen, ids = [list(prompts[row]) for row in rows], tuple(sample_ids[row] for row in rows)
            expected = Expected(ids, sampling.max_tokens, sampling.vocab_size, sampling.ends)
            work = partial(self._ask, chosen, [seeds[row] for row in rows], sampling, expected, stop)
            request = self._workers.submit(work)
            request.add_done_callback(lambda done, rows=rows: _share(done, [completions[row] for row in rows]))  # type: ignore[misc]
        return completions

    def _ask(
        self,
        prompts: list[list[int]],
        seeds: Sequence[int],
        sampling: Sampling,
        expected: Expected,
        stop: threading.Event,
    ) -> list[Completion]:
        path, read = _APIS[self.config.api]
        servers = [""]  # server of each attempt
        completions: list[Completion] = []
        with self._loads.request() as choose:

            def address(attempt: int) -> str:
                servers.append(choose())
                return servers[-1] + path

            for number in range(sampling.redraws + 1):
                body = self._body(prompts, [(seed + number) & _SEEDS for seed in seeds], sampling)
                drawn = self._poster.post(address, body, lambda raw: read(raw, expected), stop)
                drawn = [self._placed(completion, servers[-1], path) for completion in drawn]
                pairs = zip(completions or drawn, drawn, strict=True)
                completions = [old if old.fault is None else new for old, new in pairs]
                if all(completion.fault is None for completion in completions):
                    break
        return completions

    def _placed(self, completion: Completion, url: str, path: str) -> Completion:
        fault = None if completion.fault is None else str(self._poster.failure(url + path, completion.fault))
        return replace(completion, url=url, fault=fault)

    def _body(self, prompts: list[list[int]], seeds: list[int], options: Sampling) -> dict[str, object]:
        common = {
            "temperature": options.temperature,
            "top_p": 1.0 if options.top_p is None else options.top_p,
            "top_k": -1 if options.top_k is None else options.top_k,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "stop_token_ids": list(options.ends),
            "skip_special_tokens": False,
        }
        if self.config.api == "sglang":
            params = [{**common, "max_new_tokens": options.max_tokens, "sampling_seed": seed} for seed in seeds]
            return {"input_ids": prompts, "sampling_params": params, "return_logprob": True}
        return {
            "model": self.config.model,
            "prompt": prompts,
            **common,
            "max_tokens": options.max_tokens,
            "seed": seeds[0],
            "logprobs": 0,  # only of the sampled token
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,  # older vLLM, without the key above
            "add_special_tokens": False,
        }


class _Loads:
    """Load balancer: a request goes to the least busy server, after a failure to another one."""

    def __init__(self, urls: Sequence[str]) -> None:
        self._running = dict.fromkeys(urls, 0)
        self._served = dict.fromkeys(urls, 0)
        self._lock = threading.Lock()

    @contextmanager
    def request(self) -> Iterator[Callable[[], str]]:
        url: str | None = None

        def choose() -> str:
            nonlocal url
            url = self._move(url)
            return url

        try:
            yield choose
        finally:
            if url is not None:
                with self._lock:
                    self._running[url] -= 1

    def _move(self, last: str | None) -> str:
        with self._lock:
            others = [url for url in self._running if url != last] or list(self._running)
            url = min(others, key=lambda url: (self._running[url], self._served[url]))
            if last is not None:
                self._running[last] -= 1
            self._running[url] += 1
            self._served[url] += 1
            return url


def _batches(prompts: Sequence[Sequence[int]], size: int) -> list[list[int]]:
    """List each request's rows, none with a prompt twice: each prompt's first sample, then the second, ..."""
    if size == 1:
        return [[row] for row in range(len(prompts))]
    seen: dict[tuple[int, ...], int] = {}
    rounds: list[list[int]] = []
    for row, prompt in enumerate(prompts):
        number = seen.get(tuple(prompt), 0)
        seen[tuple(prompt)] = number + 1
        if number == len(rounds):
            rounds.append([])
        rounds[number].append(row)
    return [rows[first : first + size] for rows in rounds for first in range(0, len(rows), size)]


def _share(request: Future[list[Completion]], futures: Sequence[Future[Completion]]) -> None:
    failure = request.exception()
    for index, future in enumerate(futures):
        if not future.set_running_or_notify_cancel():
            continue
        if failure is not None:
            future.set_exception(failure)
        else:
            future.set_result(request.result()[index])
