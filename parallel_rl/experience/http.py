"""Rewards from a server: batches at once, with a deadline for each, and errors that say what happened where."""

from __future__ import annotations

import http.client
import json
import math
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

_PASSING = (408, 425, 429)  # the server asks to come again; so does every 5xx


class RewardServerError(RuntimeError):
    """A reward server did not give what it was asked for: the message names its URL, the attempt and what came back."""


@dataclass(frozen=True)
class HTTPRewardConfig:
    """A reward server.

    Attributes:
        url: where the samples are posted.
        timeout: seconds for one attempt, from the connection to the last byte.
        retries: attempts after a first that failed in passing: no connection, too slow, status 408, 425, 429 or 5xx.
        backoff: seconds before the first of them; doubled for each that follows.
        batch_size: samples in a request.
        concurrency: requests at a time.
    """

    url: str
    timeout: float = 60.0
    retries: int = 3
    backoff: float = 1.0
    batch_size: int = 64
    concurrency: int = 8

    def __post_init__(self) -> None:
        if not self.url.startswith(("http://", "https://")):
            raise ValueError(f"url = {self.url!r} must start with http:// or https://")
        for name, bound in (("retries", 0), ("backoff", 0), ("batch_size", 1), ("concurrency", 1)):
            if getattr(self, name) < bound:
                raise ValueError(f"{name} = {getattr(self, name)} must be at least {bound}")
        if not self.timeout > 0:
            raise ValueError(f"timeout = {self.timeout} must be above 0 seconds")


class HTTPReward:
    """(prompts, completions, answers) -> [N] float64, scored by a server.

    A request is a POST of {"query": [prompt + completion, ...], "prompts": [...], "completions": [...], "labels": [answers]},
    the answer {"rewards": [one number a sample]}: what servers made for OpenRLHF read and give. The order is kept.
    """

    def __init__(self, config: HTTPRewardConfig) -> None:
        self.config = config

    def __call__(self, prompts: Sequence[str], completions: Sequence[str], answers: Sequence[str]) -> Tensor:
        """[N] rewards of N samples.

        Raises:
            ValueError: lists of different lengths.
            RewardServerError: the last attempt failed, or an answer is not one finite number a sample.
        """
        if not len(prompts) == len(completions) == len(answers):
            raise ValueError(
                f"{len(prompts)} prompts, {len(completions)} completions and {len(answers)} answers; they must be as many"
            )
        size, stop = self.config.batch_size, threading.Event()
        bodies = []
        for first in range(0, len(prompts), size):
            asked, said = list(prompts[first : first + size]), list(completions[first : first + size])
            query = [prompt + completion for prompt, completion in zip(asked, said, strict=True)]
            labels = list(answers[first : first + size])
            bodies.append({"query": query, "prompts": asked, "completions": said, "labels": labels})
        with ThreadPoolExecutor(min(self.config.concurrency, max(len(bodies), 1))) as pool:
            futures = [pool.submit(self._score, body, stop) for body in bodies]
            try:
                rewards = [reward for future in futures for reward in future.result()]
            except BaseException:
                stop.set()  # the others end at their next attempt; their samples are of no use any more
                pool.shutdown(cancel_futures=True)
                raise
        return torch.tensor(rewards, dtype=torch.float64)

    def _score(self, body: dict[str, list[str]], stop: threading.Event) -> list[float]:
        attempts = self.config.retries + 1
        for attempt in range(1, attempts + 1):
            where = f"reward server {self.config.url}, attempt {attempt} of {attempts}"
            try:
                answer = self._post(json.dumps(body).encode())
            except urllib.error.HTTPError as error:
                what = f"status {error.code} {error.reason}: {_start(error)}"
                if error.code < 500 and error.code not in _PASSING:
                    raise RewardServerError(f"{where}: {what}") from None
            except TimeoutError:
                what = f"no answer in {self.config.timeout:g} s"
            except (OSError, http.client.HTTPException) as error:  # URLError is an OSError
                reason = getattr(error, "reason", error)
                slow = isinstance(reason, TimeoutError)
                what = f"no answer in {self.config.timeout:g} s" if slow else f"no connection: {reason}"
            else:
                return _rewards(answer, len(body["query"]), where)
            if attempt == attempts or stop.wait(self.config.backoff * 2 ** (attempt - 1)):
                raise RewardServerError(f"{where}: {what}")
        raise AssertionError("unreachable")

    def _post(self, body: bytes) -> bytes:
        request = urllib.request.Request(self.config.url, body, {"Content-Type": "application/json"})
        end = time.monotonic() + self.config.timeout
        with _opener().open(request, timeout=self.config.timeout) as response:
            parts = []
            while part := response.read1(1 << 16):
                parts.append(part)
                if time.monotonic() > end:  # the timeout above is of one read: a server that drips never meets it
                    raise TimeoutError
            if response.length:
                raise ConnectionError(f"the answer broke off {response.length} bytes before its end")
        return b"".join(parts)


def _opener() -> urllib.request.OpenerDirector:
    """Straight to the server: no proxy of the environment, no redirection (which would turn the POST into a GET)."""
    opener = urllib.request.OpenerDirector()
    for handler in (
        urllib.request.HTTPHandler,
        urllib.request.HTTPSHandler,
        urllib.request.HTTPDefaultErrorHandler,
        urllib.request.HTTPErrorProcessor,
    ):
        opener.add_handler(handler())
    return opener


def _rewards(answer: bytes, count: int, where: str) -> list[float]:
    try:
        found = json.loads(answer)
    except ValueError:
        raise RewardServerError(f"{where}: the answer is no JSON: {answer[:200]!r}") from None
    rewards = found.get("rewards") if isinstance(found, dict) else None
    if not isinstance(rewards, list):
        raise RewardServerError(f'{where}: the answer is not {{"rewards": [...]}}: {answer[:200]!r}')
    if len(rewards) != count:
        raise RewardServerError(f"{where}: {len(rewards)} rewards came back for {count} samples")
    for index, reward in enumerate(rewards):
        if isinstance(reward, bool) or not isinstance(reward, (int, float)) or not math.isfinite(reward):
            raise RewardServerError(f"{where}: reward {index} of {count} is {reward!r}; a finite number is needed")
    return [float(reward) for reward in rewards]


def _start(error: urllib.error.HTTPError) -> str:
    try:
        return error.read(200).decode(errors="replace")
    except OSError:
        return ""
