"""Rewards from a server: concurrent batches, a deadline for each, and errors that name the request."""

from __future__ import annotations

import json
import math
import re
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from parallel_rl.config.json_text import brief, is_finite
from parallel_rl.config.shown import Secret, check_address
from parallel_rl.servers.http_client import Poster, PostingConfig, ServerError, Workers, gather, read_json

_KEY = "it holds a key, which would be saved with the run; set api_key_env to the name of the environment variable that has it"
_WHY = dict.fromkeys(("authorization", "proxy-authorization", "cookie"), _KEY) | dict.fromkeys(
    (
        "host",
        "content-type",
        "content-length",
        "content-encoding",
        "transfer-encoding",
        "accept-encoding",
        "connection",
    ),
    "it is set automatically; leave it out",
)
_TOKEN = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")


class Scored(NamedTuple):
    """Rewards [N], NaN for each sample that failed, the errors of these, and further fields of each."""

    rewards: Tensor
    faults: Mapping[int, Exception]
    fields: Sequence[Mapping[str, object]] = ()

    def checked(self) -> Tensor:
        """Return the rewards, or raise the error of the first sample that failed."""
        if self.faults:
            raise self.faults[min(self.faults)]
        return self.rewards


def split_score(value: object) -> tuple[object, Mapping[str, object]]:
    """Split a sample's score into its reward and its other fields.

    >>> split_score({"reward": 0.5, "steps": 3}), split_score(0.5)
    ((0.5, {'steps': 3}), (0.5, {}))
    """
    if not isinstance(value, Mapping) or "reward" not in value:
        return value, {}
    return value["reward"], {str(name): field for name, field in value.items() if name != "reward"}


class RewardServerError(ServerError):
    """A reward server failed; the message names its URL, the attempt and the answer."""


@dataclass(frozen=True)
class HTTPRewardConfig(PostingConfig):
    """A reward server; other options as in `PostingConfig`.

    >>> HTTPRewardConfig("http://judge:8000/score", retries=5, headers={"X-Team": "blue"}).timeout
    60.0

    Attributes:
        url: where the samples are posted.
        headers: sent with each request, and recorded with the run: pass keys by the environment.
        api_key_env: the environment variable with the key, sent as a bearer token.
    """

    url: str
    headers: dict[str, str] = field(default_factory=dict)
    api_key_env: str | None = None

    def __post_init__(self) -> None:
        check_address(self.url)
        for name, value in self.headers.items():
            if name.lower() in _WHY or not _TOKEN.fullmatch(name):
                raise ValueError(
                    f"headers: {name!r} is not valid; {_WHY.get(name.lower(), 'a name of a header is needed')}"
                )
            if not (value.isascii() and value.isprintable()):
                raise ValueError(f"headers: the value of {name!r} holds a character that a header cannot have")
        if self.api_key_env is not None:
            Secret.of_environment(self.api_key_env)
        super().__post_init__()


class HTTPReward:
    """(prompts, completions, answers) -> [N] float64, scored by a server.

    It posts {"query": [prompt + completion, ...], "prompts": [...], "completions": [...], "labels": [answers]} and reads
    {"rewards": [one number per sample]} in that order, like servers for OpenRLHF. If records have other columns, "extras" is
    a mapping of them for each sample; `tokens` of completions are sent if they are passed. In place of a number a mapping
    {"reward": number, ...} has further fields.
    """

    def __init__(self, config: HTTPRewardConfig) -> None:
        self.config = config
        key = None if config.api_key_env is None else Secret.of_environment(config.api_key_env)
        self._poster = Poster("reward server", config, RewardServerError, key, config.headers)

    def __call__(
        self,
        prompts: Sequence[str],
        completions: Sequence[str],
        answers: Sequence[object],
        extras: Sequence[Mapping[str, object]] | None = None,
    ) -> Tensor:
        """Score N samples, [N]; ValueError for unequal lists, RewardServerError for a wrong answer."""
        return self.score(prompts, completions, answers, extras).checked()

    def score(
        self,
        prompts: Sequence[str],
        completions: Sequence[str],
        answers: Sequence[object],
        extras: Sequence[Mapping[str, object]] | None = None,
        tokens: Sequence[Sequence[int]] | None = None,
    ) -> Scored:
        """Score N samples as a call does, but keep faults: rewards that are no finite numbers."""
        if not len(prompts) == len(completions) == len(answers):
            raise ValueError(
                f"{len(prompts)} prompts, {len(completions)} completions and {len(answers)} answers; their numbers must be "
                "equal"
            )
        size, stop, workers = self.config.batch_size, threading.Event(), Workers(self.config.concurrency)
        futures = []
        for first in range(0, len(prompts), size):
            texts, responses = list(prompts[first : first + size]), list(completions[first : first + size])
            query = [prompt + completion for prompt, completion in zip(texts, responses, strict=True)]
            labels = list(answers[first : first + size])
            body: dict[str, list] = {"query": query, "prompts": texts, "completions": responses, "labels": labels}
            if extras is not None and any(extras):
                # Parquet has dates and the like, which JSON lacks
                body["extras"] = json.loads(json.dumps(list(map(dict, extras[first : first + size])), default=str))
            if tokens is not None:
                body["tokens"] = list(map(list, tokens[first : first + size]))
            futures.append(workers.submit(lambda body=body: self._score(body, stop)))  # type: ignore[misc]
        values = [value for batch in gather(futures, stop) for value in batch]
        faults = {row: value for row, value in enumerate(values) if isinstance(value, str)}
        rewards = [math.nan if isinstance(value, str) else value[0] for value in values]
        fields = [{} if isinstance(value, str) else value[1] for value in values]
        errors = {row: self._poster.failure(self.config.url, fault) for row, fault in faults.items()}
        return Scored(torch.tensor(rewards, dtype=torch.float64), errors, fields)

    def _score(self, body: dict[str, list], stop: threading.Event) -> list[_Score | str]:
        count = len(body["query"])
        return self._poster.post(self.config.url, body, lambda answer: _rewards(answer, count), stop)


_Score = tuple[float, Mapping[str, object]]


def _rewards(answer: bytes, count: int) -> list[_Score | str]:
    reply = read_json(answer)
    rewards = reply.get("rewards") if isinstance(reply, dict) else None
    if not isinstance(rewards, list):
        raise ValueError(f'the answer is not {{"rewards": [...]}}: {answer[:200]!r}')
    if len(rewards) != count:
        raise ValueError(f"{len(rewards)} rewards came back for {count} samples")
    return [
        (float(reward), fields)  # type: ignore[arg-type]  # a number
        if is_finite(reward)
        else f"reward {index} of {count} is {brief(reward)}; a finite number is needed (in float32)"
        for index, (reward, fields) in enumerate(map(split_score, rewards))
    ]
