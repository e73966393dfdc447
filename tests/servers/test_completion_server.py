"""Completions by HTTP, from a real server: what is asked, and what of its answers is right or wrong."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable
from dataclasses import replace

import pytest

from parallel_rl.servers.completion_server import (
    CompletionServer,
    CompletionServerConfig,
    CompletionServerError,
    Sampling,
)
from parallel_rl.servers.completions import Completion
from tests.servers.policy_server import END, Policy, answer, openai
from tests.servers.server import Answer, serve

PROMPTS = [[1, 4 + place % 3, 5 + place // 3] for place in range(10)]
SAMPLING = Sampling(max_tokens=6, ends=(END,), vocab_size=15, temperature=0.7, seed=5)


def client(*urls: str, sampling: Sampling = SAMPLING, **options: object) -> CompletionServer:
    own = {"model": "tiny"} if options.get("api") != "sglang" else {}
    config = CompletionServerConfig(url=tuple(urls), **{"backoff": 0.01, **own, **options})  # type: ignore[arg-type]
    return CompletionServer(config, sampling)


def well(number: int, body: dict) -> tuple[int, object]:
    return 200, answer(Policy(), body)


@pytest.mark.parametrize("api", ["openai", "sglang"])
def test_tokens_with_their_log_probs_in_order(api: str) -> None:
    with serve(lambda number, body: (200, answer(Policy(version="12"), body))) as server:
        one = client(server.root, api=api).complete(PROMPTS, range(10))
        assert len(server.requests) == 10 and set(server.paths) == {
            "/v1/completions" if api == "openai" else "/generate"
        }
        again = client(server.root, api=api).complete(PROMPTS[5:], range(5, 10))
        other = client(server.root, api=api).complete(PROMPTS, range(10, 20))
    assert again == one[5:] and other != one  # draws go by the sample's id
    assert {completion.version for completion in one} == {12}
    assert {completion.stopped for completion in one} == {True, False}
    for prompt, completion in zip(PROMPTS, one, strict=True):
        assert completion.stopped == (completion.tokens[-1] == END)
        for last, token, logprob in zip(
            (prompt[-1], *completion.tokens), completion.tokens, completion.logprobs, strict=False
        ):
            assert logprob == pytest.approx(math.log(Policy().distribution(last, 0.7)[token]))
    body = server.requests[0]
    asked = body if api == "openai" else body["sampling_params"][0]
    assert asked["temperature"] == 0.7 and asked["stop_token_ids"] == [END]
    assert asked["top_p"] == 1 and asked["top_k"] == -1  # whatever the model's defaults are


@pytest.mark.parametrize("api", ["openai", "sglang"])
def test_the_rule_of_the_sampler_is_asked_for(api: str) -> None:
    with serve(well) as server:
        for rule in ({"top_k": 4, "top_p": 0.9}, {"top_k": 4}, {"top_p": 0.9}):
            client(server.root, api=api, sampling=replace(SAMPLING, **rule)).complete(PROMPTS[:1], [0])
    asked = [body if api == "openai" else body["sampling_params"][0] for body in server.requests]
    assert [(body["top_k"], body["top_p"]) for body in asked] == [(4, 0.9), (4, 1.0), (-1, 0.9)]


@pytest.mark.parametrize(
    ("rule", "words"),
    [
        ({"top_k": 16}, "top_k = 16 exceeds vocab_size = 15"),
        ({"top_k": True}, "top_k = True must be an integer"),
        ({"top_p": 0.0}, r"top_p = 0.0 must lie in \(0, 1\]"),
    ],
)
def test_rules_that_are_none(rule: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        replace(SAMPLING, **rule)


@pytest.mark.parametrize("api", ["openai", "sglang"])
def test_batches_never_hold_a_prompt_twice(api: str) -> None:
    prompts = [prompt for prompt in PROMPTS[:5] for _ in range(4)]
    with serve(well) as server:
        found = client(server.root, api=api, batch_size=3).complete(prompts, range(20))
        expected = client(server.root, api="sglang").complete(prompts, range(20))
    bodies = [body["prompt" if api == "openai" else "input_ids"] for body in server.requests[:-20]]
    assert sorted(map(len, bodies)) == [2] * 4 + [3] * 4
    assert all(len({tuple(prompt) for prompt in body}) == len(body) for body in bodies)
    assert all(len(set(found[first : first + 4])) > 1 for first in range(0, 20, 4))
    assert (found == expected) == (api == "sglang")  # which takes a seed a sample


def test_ids_as_text_where_a_server_knows_no_other_way() -> None:
    with serve(lambda number, body: (200, openai(Policy(), body, ids="tokens"))) as server:
        named = client(server.root).complete(PROMPTS, range(10))
    with serve(well) as server:
        assert named == client(server.root).complete(PROMPTS, range(10))
    assert {completion.version for completion in named} == {None}


def test_requests_run_at_once_but_not_more_than_allowed() -> None:
    def slowly(number: int, body: dict) -> tuple[int, object]:
        time.sleep(0.05)
        return well(number, body)

    with serve(slowly) as server:
        ours = client(server.root, concurrency=3)
        first, second = ours.submit(PROMPTS[:5], range(5)), ours.submit(PROMPTS[5:], range(5, 10))  # one bound for both
        assert len([future.result() for future in first + second]) == 10
        assert server.most_at_once == 3


def with_choice(**changes: object) -> Answer:
    """Two samples, the second of them changed: a value, or a function of what it was."""

    def changed(number: int, body: dict) -> tuple[int, object]:
        found = openai(Policy(), body)
        choice = next(choice for choice in found["choices"] if choice["index"] == 1)
        choice["token_ids"], choice["finish_reason"] = [5, 6, END], "stop"
        choice["logprobs"]["token_logprobs"] = [-1.0, -2.0, -0.5]
        for key, value in changes.items():
            place = choice["logprobs"] if key in ("token_logprobs", "tokens") else choice
            place[key] = value
        return 200, found

    return changed


def other(change: Callable[[dict], object]) -> Answer:
    def changed(number: int, body: dict) -> tuple[int, object]:
        found = copy.deepcopy(openai(Policy(), body))
        return 200, change(found)

    return changed


SAMPLE = r"attempt 1 of 3: sample 8 \(choice 1 of 2\): "
LOGPROB = r"/v1/completions: sample 8 \(choice 1 of 2\): the log-prob of token "


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (lambda n, b: (404, b"no such model"), "attempt 1 of 3: status 404 Not Found: no such model"),
        (lambda n, b: (200, b"<html>"), "attempt 1 of 3: the answer is not JSON: b'<html>'"),
        (lambda n, b: (200, {"error": "no"}), 'the answer is not {"choices": .*error'),
        (other(lambda found: {**found, "choices": found["choices"][:1]}), "1 choices came back for 2 samples"),
        (other(lambda found: {**found, "choices": found["choices"] * 2}), "4 choices came back for 2 samples"),
        (
            other(lambda found: {**found, "choices": found["choices"][:1] * 2}),
            r"the choices have the indices \[.*needed once",
        ),
        (other(lambda found: {**found, "choices": [1, 2]}), "choice is 1; an object is needed"),
        (other(lambda found: {**found, "metadata": {"weight_version": "main"}}), "weight_version is 'main'; a number"),
        (with_choice(logprobs=None), SAMPLE + "the log-probs are missing; logprobs is None"),
        (with_choice(token_logprobs=None), SAMPLE + "the log-probs are missing"),
        (with_choice(token_ids=None), SAMPLE + r"there are no token ids: .*'<.*return_token_ids"),
        (with_choice(token_ids=[5, END]), SAMPLE + "3 log-probs came back for 2 tokens"),
        (with_choice(token_logprobs=[-1.0, -2.0]), SAMPLE + "2 log-probs came back for 3 tokens"),
        (with_choice(token_ids=[], token_logprobs=[]), SAMPLE + "0 tokens came back; the request allows 1 to 6"),
        (
            with_choice(token_ids=[5] * 7, token_logprobs=[-1.0] * 7, finish_reason="length"),
            SAMPLE + "7 tokens came back",
        ),
        (with_choice(token_ids=[5, 15, END]), SAMPLE + r"token 1 is 15, outside the vocabulary \[0, 15\)"),
        (with_choice(token_ids=[-1, 5, END]), SAMPLE + "token 0 is -1, outside"),
        (with_choice(token_ids=[True, 5, END]), SAMPLE + "token 0 is True, outside"),
        (with_choice(token_ids=["5", 5, END]), SAMPLE + "token 0 is '5', outside"),
        (
            with_choice(token_logprobs=[-1.0, 0.1, -1.0]),
            LOGPROB + "1 is 0.1; a finite number of at most 0",
        ),
        (with_choice(token_logprobs=[-1.0, -1.0, math.nan]), LOGPROB + "2 is nan"),
        (with_choice(token_logprobs=[-math.inf, -1.0, -1.0]), LOGPROB + "0 is -inf"),
        (with_choice(token_logprobs=[-9999.0, -1.0, -1.0]), LOGPROB + "0 is -9999.0"),
        (with_choice(token_logprobs=[-1.0, None, -1.0]), LOGPROB + "1 is None"),
        (with_choice(finish_reason="tool_calls"), SAMPLE + "finish_reason is 'tool_calls'; 'stop' or 'length'"),
        (with_choice(token_ids=[5, END, 6], finish_reason="length"), SAMPLE + "the end token 2 occurs before the end"),
        (
            with_choice(token_ids=[5, 6, 7]),
            SAMPLE + "it stopped at token 7; the end token 2 and its log-prob must come",
        ),
    ],
)
def test_what_a_server_does_wrong_is_told(bad: Answer, message: str) -> None:
    with serve(bad) as server:
        ours = client(server.root, retries=2, batch_size=2)
        with pytest.raises(CompletionServerError, match=message) as caught:
            ours.complete(PROMPTS[:2], [7, 8])
        assert f"completion server {server.root}/v1/completions" in str(caught.value)
        assert len(server.requests) == 1


def test_an_answer_may_end_on_any_end_token() -> None:
    """Qwen's and Llama's engines stop at either of two or three."""
    with serve(with_choice(token_ids=[5, 6, 7])) as server:
        first, second = client(server.root, sampling=replace(SAMPLING, ends=(END, 7)), batch_size=2).complete(
            PROMPTS[:2], [7, 8]
        )
        assert second.tokens == (5, 6, 7) and second.stopped and first.tokens[-1] in (END, 7)
        assert server.requests[0]["stop_token_ids"] == [END, 7]
    with (
        serve(with_choice(token_ids=[5, 7, 6])) as server,
        pytest.raises(CompletionServerError, match="end token 7 occurs"),
    ):
        client(server.root, sampling=replace(SAMPLING, ends=(END, 7)), batch_size=2).complete(PROMPTS[:2], [7, 8])


@pytest.mark.parametrize(
    ("found", "message"),
    [
        ({"text": ""}, "the answer is not a list of completions"),
        ([], "0 completions came back for 1 samples"),
        ([{"text": ""}], r"sample 7 \(completion 0 of 1\): meta_info is None"),
        ([{"meta_info": {}}], "output_token_logprobs is None"),
        ([{"meta_info": {"output_token_logprobs": [[-1.0, END, None]]}}], "finish_reason is None"),
        (
            [{"meta_info": {"output_token_logprobs": [[0.5, END, None]], "finish_reason": {"type": "stop"}}}],
            "the log-prob of token 0 is 0.5",
        ),
    ],
)
def test_what_the_other_api_does_wrong_is_told(found: object, message: str) -> None:
    with serve(lambda number, body: (200, found)) as server, pytest.raises(CompletionServerError, match=message):
        client(server.root, api="sglang").complete(PROMPTS[:1], [7])


def test_what_is_right_at_the_edge() -> None:
    """The end token as the last that was allowed, and a log-prob that rounds above 0."""

    def edge(number: int, body: dict) -> tuple[int, object]:
        meta = {
            "output_token_logprobs": [[2e-7, END, None]],
            "finish_reason": {"type": "length"},
            "weight_version": "default",
        }
        return 200, {"meta_info": meta}

    with serve(edge) as server:
        [found] = client(server.root, api="sglang").complete(PROMPTS[:1], [7])
    assert found == Completion((END,), (0.0,), True, 0)


def test_the_key_is_sent_and_never_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINY_KEY", "sk-very-secret")
    with serve(lambda number, body: (401, b"wrong key sk-very-secret")) as server:
        ours = client(server.root, api_key_env="TINY_KEY")
        with pytest.raises(CompletionServerError, match=r"status 401 Unauthorized: wrong key \*\*\*") as caught:
            ours.complete(PROMPTS[:1], [0])
        assert server.headers[0]["Authorization"] == "Bearer sk-very-secret"
    assert "secret" not in str(caught.value) + repr(ours.config) + repr(ours._poster)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"url": "ftp://x"}, "url = 'ftp://x' must start with http:// or https://"),
        ({"url": "http://x/v1/"}, "url = 'http://x/v1' ends with /v1"),
        ({"url": ()}, "url is empty"),
        ({"url": ("http://x", "http://x/")}, "names a server twice"),
        ({"model": None}, "model = None is missing; api = 'openai' needs the name"),
        ({"api": "sglang"}, "model = 'tiny' has no effect with api = 'sglang'"),
        ({"timeout": 0}, "timeout = 0 must be above 0"),
        ({"concurrency": 0}, "concurrency = 0 must be at least 1"),
        ({"api_key_env": "NO_SUCH_VARIABLE"}, "api_key_env = 'NO_SUCH_VARIABLE': the environment has no such variable"),
    ],
)
def test_bad_options(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CompletionServerConfig(**{"url": "http://x", "model": "tiny", **options})


def test_bad_calls() -> None:
    with pytest.raises(ValueError, match="2 prompts and 1 sample_ids"):
        client("http://x").submit([[1], [2]], [0])
    with pytest.raises(ValueError, match="the prompt of sample 4 is empty"):
        client("http://x").submit([[1], []], [3, 4])
