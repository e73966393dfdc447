"""Parse and check completion servers' answers: token ids, log-probs, ends, the policy's version."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from parallel_rl.config.json_text import brief, is_finite, is_int64
from parallel_rl.servers.http_client import PassingError, read_json

# the log of a float32 softmax may exceed 0 by this much
_ROUNDING = 1e-5
# vLLM's −∞, which JSON lacks
MINUS_INFINITY = -9999.0
_PREFIX = "token_id:"
_DIGITS = re.compile(r"[0-9]{1,18}")


@dataclass(frozen=True)
class Completion:
    """Sampled tokens, with the end token, and their log-probs.

    Attributes:
        stopped: it reached an end token; else it was cut off.
        version: of the policy that sampled it, if the server returns one.
        url: of the server, if known.
        fault: message of a log-prob that is no finite number of at most 0; that log-prob is NaN.
    """

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    stopped: bool
    version: int | None
    url: str | None = field(default=None, compare=False)
    fault: str | None = field(default=None, compare=False)


@dataclass(frozen=True)
class Expected:
    """A request: these samples, of at most `max_tokens` tokens in [0, vocab_size), up to one of `ends`."""

    sample_ids: tuple[int, ...]
    max_tokens: int
    vocab_size: int
    ends: tuple[int, ...]


def read_openai(answer: bytes, expected: Expected) -> list[Completion]:
    """Read the answer of /v1/completions in prompt order; ValueError, or PassingError if aborted."""
    reply = _reply(answer, expected)
    choices = reply.get("choices") if isinstance(reply, dict) else None
    if not isinstance(reply, dict) or not isinstance(choices, list):
        raise ValueError(f'the answer is not {{"choices": [...]}}: {answer[:200]!r}')
    if len(choices) != len(expected.sample_ids):
        raise ValueError(f"{len(choices)} choices came back for {len(expected.sample_ids)} samples")
    metadata = reply.get("metadata")
    version = _version(metadata.get("weight_version") if isinstance(metadata, dict) else None)
    indices = [_mapping(choice, "choice").get("index") for choice in choices]
    by_index = {index: choice for index, choice in zip(indices, choices, strict=True) if is_int64(index)}
    if set(by_index) != set(range(len(choices))):
        raise ValueError(
            f"the choices have the indices {brief(indices)}; each of 0 to {len(choices) - 1} is needed once"
        )
    result = []
    for index, sample in enumerate(expected.sample_ids):
        where = f"sample {sample} (choice {index} of {len(choices)})"
        result.append(_openai_choice(by_index[index], where, expected, version))
    return result


def read_native(answer: bytes, expected: Expected) -> list[Completion]:
    """Read the answer of SGLang's /generate; ValueError, or PassingError if aborted."""
    reply = _reply(answer, expected)
    if isinstance(reply, dict) and "meta_info" in reply:
        reply = [reply]
    if not isinstance(reply, list):
        raise ValueError(f"the answer is not a list of completions: {answer[:200]!r}")
    if len(reply) != len(expected.sample_ids):
        raise ValueError(f"{len(reply)} completions came back for {len(expected.sample_ids)} samples")
    result = []
    for index, (sample, item) in enumerate(zip(expected.sample_ids, reply, strict=True)):
        where = f"sample {sample} (completion {index} of {len(reply)})"
        meta = _mapping(_mapping(item, where).get("meta_info"), f"{where}: meta_info")
        pairs = meta.get("output_token_logprobs")
        if not isinstance(pairs, list) or not all(isinstance(pair, list) and len(pair) >= 2 for pair in pairs):
            raise ValueError(f"{where}: meta_info.output_token_logprobs is {brief(pairs)}; [log-prob, id, ...] a token")
        reason = meta.get("finish_reason")
        kind = reason.get("type") if isinstance(reason, dict) else reason
        tokens, logprobs = [pair[1] for pair in pairs], [pair[0] for pair in pairs]
        result.append(_completion(tokens, logprobs, kind, where, expected, _version(meta.get("weight_version"))))
    return result


def _reply(answer: bytes, expected: Expected) -> object:
    try:
        return read_json(answer)
    except ValueError as error:
        raise ValueError(f"{error} (sample {', '.join(map(str, expected.sample_ids))})") from None


def _openai_choice(choice: object, where: str, expected: Expected, version: int | None) -> Completion:
    fields = _mapping(choice, where)
    logprobs = fields.get("logprobs")
    if not isinstance(logprobs, dict) or not isinstance(logprobs.get("token_logprobs"), list):
        raise ValueError(f"{where}: the log-probs are missing; logprobs is {brief(logprobs)}")
    tokens = fields.get("token_ids")
    if tokens is None:
        named = logprobs.get("tokens")
        if not isinstance(named, list) or not all(isinstance(x, str) and x.startswith(_PREFIX) for x in named):
            raise ValueError(
                f"{where}: there are no token ids: neither token_ids nor tokens of the form 'token_id:7' "
                f"(tokens is {brief(named)}); the server must support return_token_ids or return_tokens_as_token_ids"
            )
        tokens = [_integer(text[len(_PREFIX) :]) for text in named]
    if not isinstance(tokens, list):
        raise ValueError(f"{where}: token_ids is {brief(tokens)}; a list is needed")
    return _completion(tokens, logprobs["token_logprobs"], fields.get("finish_reason"), where, expected, version)


def _completion(
    tokens: list, logprobs: list, reason: object, where: str, expected: Expected, version: int | None
) -> Completion:
    if reason == "abort":
        raise PassingError(f"{where}: the generation was aborted")
    if reason not in ("stop", "length"):
        raise ValueError(f"{where}: finish_reason is {brief(reason)}; 'stop' or 'length' is needed")
    if len(tokens) != len(logprobs):
        raise ValueError(f"{where}: {len(logprobs)} log-probs came back for {len(tokens)} tokens")
    if not 1 <= len(tokens) <= expected.max_tokens:
        raise ValueError(f"{where}: {len(tokens)} tokens came back; the request allows 1 to {expected.max_tokens}")
    for place, token in enumerate(tokens):
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < expected.vocab_size:
            raise ValueError(
                f"{where}: token {place} is {brief(token)}, outside the vocabulary [0, {expected.vocab_size})"
            )
    known = [is_finite(value) and MINUS_INFINITY < value <= _ROUNDING for value in logprobs]
    fault = None
    if not all(known):
        place = known.index(False)
        value = brief(logprobs[place])
        fault = f"{where}: the log-prob of token {place} is {value}; a finite number of at most 0 is needed"
    if early := [token for token in tokens[:-1] if token in expected.ends]:
        raise ValueError(f"{where}: the end token {early[0]} occurs before the end of {brief(tokens)}")
    stopped = tokens[-1] in expected.ends  # SGLang returns "length" if the end token is the last one allowed
    if reason == "stop" and not stopped:
        ends = " or ".join(map(str, expected.ends))
        raise ValueError(
            f"{where}: it stopped at token {tokens[-1]}; the end token {ends} and its log-prob must come back, too"
        )
    values = tuple(min(float(x), 0.0) if good else math.nan for x, good in zip(logprobs, known, strict=True))
    return Completion(tuple(tokens), values, stopped, version, fault=fault)


def _version(value: object) -> int | None:
    """Parse SGLang's weight_version: the trainer's text, or "default" for the initial weights."""
    if value is None:
        return None
    if value == "default":
        return 0
    number = _integer(str(value)) if isinstance(value, str) or is_int64(value) else None
    if number is None:
        raise ValueError(
            f"the server's weight_version is {brief(value)}; a number of optimizer steps, or 'default', is needed"
        )
    return number


def _integer(text: str) -> int | None:
    return int(text) if _DIGITS.fullmatch(text) else None


def _mapping(value: object, where: str) -> Mapping:
    if not isinstance(value, dict):
        raise ValueError(f"{where} is {brief(value)}; an object is needed")
    return value
