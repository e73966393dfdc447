"""Rollouts from a server: the same run on every layout, staleness, new weights, and what is in flight over a restart."""

from __future__ import annotations

import json
import math
import threading
import time
from pathlib import Path

import pytest

from parallel_rl.testing.pool import WorldError, run_world
from tests.servers.policy_server import Policy, answer
from tests.servers.server import Server, serve
from tests.training.helpers import LAYOUTS, assert_near, cut, run, screen_of_run, train_rows

SMALL = {
    "model__hidden": 32,
    "run__dtype": "float64",
    "batch__micro_batch_size": 8,
    "evaluation": "null",
    "data__held_out": "null",
    "data__examples": "null",
    "warmup": "null",
    "reward": "long_answers",
    "rl__steps": 3,
    "rl__prompts": 4,
    "rl__group_size": 4,
    "rl__updates": 2,
    "rl__optimizer": "{lr: 3e-3}",
    "rl__loss": "{name: policy, options: {importance: {mode: tis, high: 2.0}}}",
}
SAMPLES = 4 * 4
LAYOUTS = {**LAYOUTS, "DP 2": (2, {}, True)}


def arguments(
    folder: Path, server: Server, layout: str = "one process", options: str = "", **more: object
) -> list[str]:
    _, parallel, packing = LAYOUTS[layout]
    bound = "" if "max_mismatch" in options else "max_mismatch: null, "  # the servers here are of other policies
    section = f"{{url: {server.root}, model: tiny, backoff: 0.01, {bound}{options}}}"
    given = {"run__dir": folder, "parallel": parallel, "batch__packing": packing, "rl__server": section}
    return run("grpo_arithmetic.yaml", **{**SMALL, **given, **more})


def train(folder: Path, server: Server, layout: str = "one process", options: str = "", **more: object) -> list[dict]:
    results = run_world(LAYOUTS[layout][0], train_rows, arguments(folder, server, layout, options, **more))
    assert all(rows == results[0] for rows in results)
    return results[0]


def well(number: int, body: dict) -> tuple[int, object]:
    return 200, answer(Policy(), body)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict], list[str]]:
    """The rows of one process, and what it asked."""
    with serve(well) as server:
        rows = train(tmp_path_factory.mktemp("alone"), server)
        return rows, sorted(json.dumps(body, sort_keys=True) for body in server.requests)


@pytest.mark.parametrize(
    "layout",
    ["TP 2", "DP 2", pytest.param("TP 2 × CP 2 × SP packed", marks=pytest.mark.slow)],
)
def test_every_layout_asks_once_and_trains_alike(
    layout: str, tmp_path: Path, alone: tuple[list[dict], list[str]]
) -> None:
    expected, asked = alone
    assert len(asked) == 3 * SAMPLES == len(set(asked))  # a seed of its own for each
    with serve(well) as server:
        rows = train(tmp_path, server, layout)
        assert sorted(json.dumps(body, sort_keys=True) for body in server.requests) == asked
        assert_near(rows, expected)
    assert len({row["reward"] for row in expected}) > 1


@pytest.mark.slow
def test_the_rule_of_the_sampler_is_the_loss_s(tmp_path: Path, alone: tuple[list[dict], list[str]]) -> None:
    """A server that draws from everything all the same: what the trainer's truncated policy does not keep leaves the mask."""
    rule = {"sampling": "{max_new_tokens: 8, top_k: 8, top_p: 0.95}"}
    with serve(well) as server:
        one, two = (train(tmp_path / layout, server, layout, **rule) for layout in ("one process", "TP 2"))
        assert {(body["top_k"], body["top_p"]) for body in server.requests} == {(8, 0.95)}
    for row, other, plain in zip(one, two, alone[0], strict=True):
        assert {**row, "phase": 0} == pytest.approx({**other, "phase": 0}, rel=1e-8, abs=1e-12)
        assert 0 < row["dropped_tokens"] < row["tokens"] and "dropped_tokens" not in plain


def test_staleness_is_that_of_each_sample(tmp_path: Path) -> None:
    """A server that has gone on half-way through each step, in optimizer steps of which there are two a step."""

    def moves(number: int, body: dict) -> tuple[int, object]:
        return 200, answer(Policy(version=str(number // (SAMPLES // 2))), body)

    with serve(moves) as server:
        rows = train(tmp_path / "live", server, options="concurrency: 1", rl__record="true")
    assert [row["staleness_mean"] for row in rows] == [-0.5, -0.5, -0.5]
    assert [row["staleness_max"] for row in rows] == [1, 1, 1]
    recording = "".join(path.read_text() for path in sorted((tmp_path / "live" / "rollouts").iterdir()))
    assert [json.loads(line)["staleness"] for line in recording.splitlines()] == ([0] * 8 + [-1] * 8) * 3
    (tmp_path / "recording.jsonl").write_text(recording)
    replay = {"data__train": "null", "data__rollouts": tmp_path / "recording.jsonl", "rl__server": "null"}
    again = train(tmp_path / "replay", server, **replay)
    for row, live in zip(again, rows, strict=True):
        del row["phase"]
        assert row == pytest.approx({key: live[key] for key in row}, rel=1e-8, abs=1e-12)


@pytest.mark.slow
def test_old_samples_are_masked(tmp_path: Path, alone: tuple[list[dict], list[str]]) -> None:
    whole, _ = alone
    with serve(well) as server:  # says no version: that of the start
        assert [row["staleness_mean"] for row in whole] == [0, 2, 4] == [row["staleness_max"] for row in whole]
        with pytest.raises(
            WorldError, match=r"all samples of the step are further than rl\.server\.max_staleness = 2 .*mean 4"
        ):
            train(tmp_path / "none", server, "DP 2", "max_staleness: 2")

    def half(number: int, body: dict) -> tuple[int, object]:
        return 200, answer(Policy(version="40" if body["seed"] % 2 else "0"), body)

    with serve(half) as server:
        one = train(tmp_path / "one", server, options="max_staleness: 4")
        two = train(tmp_path / "two", server, "DP 2", "max_staleness: 4")
    assert all(0 < row["stale"] < 1 for row in one)
    for row, other, every in zip(one, two, whole, strict=True):
        assert {**row, "phase": 0} == pytest.approx({**other, "phase": 0}, rel=1e-8, abs=1e-12)
        assert row["tokens"] < every["tokens"]


def as_drawn_by_a_fresh_model(number: int, body: dict) -> tuple[int, object]:
    """The log-probs of a model of small random weights, which are close to uniform, whatever was drawn."""
    found = answer(Policy(), body)
    for choice in found["choices"]:  # type: ignore[call-overload]
        choice["logprobs"]["token_logprobs"] = [-math.log(15) for _ in choice["token_ids"]]
    return 200, found


@pytest.mark.slow
def test_a_server_of_another_policy_is_noticed(tmp_path: Path) -> None:
    """Protects the bound on samples with staleness 0: its number, on every layout the same, and the error on all ranks."""
    section = "{{url: [{}, {}], model: tiny, concurrency: 1, max_mismatch: {}}}"
    with serve(well) as other, serve(as_drawn_by_a_fresh_model) as own:
        one, two = (train(tmp_path / name, other, name, "max_mismatch: 9") for name in ("one process", "DP 2"))
        records = other.requests[:SAMPLES]
        drawn = [x for body in records for x in well(0, body)[1]["choices"][0]["logprobs"]["token_logprobs"]]  # type: ignore[index]
        near = sum(abs(x + math.log(15)) for x in drawn) / len(drawn)
        for rows in (one, two):
            assert rows[0]["mismatch"] == pytest.approx(one[0]["mismatch"], rel=1e-9) == pytest.approx(near, rel=0.1)
            assert not any("mismatch" in row for row in rows[1:])  # it tells no version: its samples are stale then
        both = {"rl__server": section.format(own.root, other.root, near * 0.8)}  # above the mean of both
        for more in (both, {**both, "rl__prev_logprobs": "generation"}):
            with pytest.raises(WorldError) as caught:
                train(tmp_path / "two", own, "DP 2", **more)
            assert sorted(caught.value.errors) == [0, 1]
            for error in caught.value.errors.values():
                assert f"completion server {other.root}: step 1's log-probs differ from the policy's" in error
                assert "(version 0)" in error


@pytest.mark.parametrize("layout", ["one process", "TP 2", "DP 2"])
def test_a_failure_is_one_on_every_rank(layout: str, tmp_path: Path) -> None:
    def fails(number: int, body: dict) -> tuple[int, object]:
        found = answer(Policy(), body)
        if number == SAMPLES + 3:
            found["choices"][0]["token_ids"][0] = 1.5  # type: ignore[call-overload]
        return 200, found

    world = LAYOUTS[layout][0]
    with serve(fails) as server, pytest.raises(WorldError) as caught:
        train(tmp_path, server, layout)
    assert sorted(caught.value.errors) == list(range(world))
    for error in caught.value.errors.values():
        assert f"completion server {server.root}/v1/completions, attempt 1 of 4: sample " in error
        assert "token 0 is 1.5, outside the vocabulary" in error


@pytest.mark.parametrize(
    ("layout", "others"),
    [
        ("one process", ("one process",)),
        pytest.param("DP 2", ("DP 2", "TP 2"), marks=pytest.mark.slow),
    ],
)
def test_a_restart_trains_on_what_was_in_flight(layout: str, others: tuple[str, ...], tmp_path: Path) -> None:
    """The server's answers depend on when it is asked: only the checkpoint can know what it said."""

    def timely(number: int, body: dict) -> tuple[int, object]:
        return 200, answer(Policy(salt=time.monotonic_ns()), body)

    more = {"rl__steps": 4, "run__checkpoint_every": 1, "run__keep_checkpoints": 9, "run__dtype": "float32"}
    with serve(timely) as server:
        rows = train(tmp_path / "whole", server, layout, "ahead: 2", **more)
        for other in others:
            server.requests.clear()
            cut(tmp_path / "whole", tmp_path / other, 2)
            later = train(tmp_path / other, server, other, "ahead: 2", **more)
            assert not server.requests  # all of what was left had been asked for
            if other == layout:
                assert later == rows[2:]  # to the bit
            assert_near(later, rows[2:], rel=1e-5, abs=1e-6)


@pytest.mark.slow
def test_prompts_that_teach_nothing_are_replaced(tmp_path: Path) -> None:
    more = {
        "rl__dynamic_sampling": "{max_rounds: 3, exhausted: mask}",
        "reward": "agreeing",
    }
    with serve(well) as server:
        one = train(tmp_path / "one", server, options="ahead: 1", **more)
        assert len(server.requests) > 3 * SAMPLES
        two = train(tmp_path / "two", server, "DP 2", "ahead: 1", **more)
    assert_near(one, two)


@pytest.mark.slow
def test_what_was_in_flight_for_other_prompts_is_not_used(tmp_path: Path) -> None:
    more = {"run__checkpoint_every": 1, "run__keep_checkpoints": 9}
    with serve(well) as server:
        train(tmp_path / "whole", server, options="ahead: 1", **more)
        cut(tmp_path / "whole", tmp_path / "other", 2)
        server.requests.clear()
        # the samples 32 to 35 are of the prompts 10 and 11 now, and were of prompt 8
        train(tmp_path / "other", server, options="ahead: 1", **more, rl__group_size=3)
    assert len(server.requests) == 4 * 3


def test_samples_are_asked_for_ahead_of_their_step(tmp_path: Path) -> None:
    second = threading.Event()

    def waits(number: int, body: dict) -> tuple[int, object]:
        """The first request is answered when the second is there."""
        second.wait(30) if number == 0 else second.set()
        return well(number, body)

    with serve(waits) as server:
        ahead = train(tmp_path / "ahead", server, options="ahead: 1, concurrency: 2")
        assert len(server.requests) == 3 * SAMPLES and server.most_at_once == 2
        assert ahead == train(tmp_path / "behind", server)


@pytest.mark.parametrize(
    ("options", "more", "message"),
    [
        ("ahead: -1", {}, r"rl.server: ahead = -1 must be at least 0"),
        ("update_every: 2", {}, "update_every = 2 has no effect without update"),
        ("update: tgi", {}, "rl.server.update = 'tgi' is not valid; choose one of 'vllm', 'sglang'"),
        (
            "update: vllm",
            {},
            "needs a model of Hugging Face's families; set model.position = 'learned_absolute' to 'rope'",
        ),
        ("max_mismatch: 0", {}, "max_mismatch = 0.0 must be a finite number above 0, or null"),
        ("urls: x", {}, "unknown key rl.server.urls"),
    ],
)
def test_bad_options(options: str, more: dict, message: str, tmp_path: Path) -> None:
    from parallel_rl.training.config.load import load_config

    given = arguments(tmp_path, Server("http://x"), options=options, **more)
    with pytest.raises(ValueError, match=message):
        load_config(given[0], given[1:])


@pytest.mark.slow
def test_a_sample_that_fails_is_masked_and_counted(tmp_path: Path) -> None:
    """A prompt's sample without log-probs, and a reward that a server has no number for, in each step; else the same run."""

    def draws(number: int, body: dict) -> tuple[int, object]:
        found = answer(Policy(), body)
        assert isinstance(found, dict)
        if body["seed"] % 16 == 3 or body["temperature"] == 0:
            found["choices"][0]["logprobs"]["token_logprobs"][-1] = -9999.0
        return 200, found

    def scores(number: int, body: dict) -> tuple[int, object]:
        return 200, {"rewards": [None if text[-1:] in "13579" else len(text) / 8 for text in body["completions"]]}

    with serve(draws) as server, serve(scores) as judge:
        more = {"reward": judge.url, "rl__failed_samples": "{retries: 0, max_share: 0.9}", "rl__steps": 2}
        one = train(tmp_path / "one", server, **more, rl__record="true")
        recording = "".join(path.read_text() for path in sorted((tmp_path / "one" / "rollouts").iterdir()))
        masked = [json.loads(line).get("sample_mask") for line in recording.splitlines()]
        assert len(masked) == 2 * SAMPLES and {*masked} == {None, 0}
        (tmp_path / "recording.jsonl").write_text(recording)
        replay = {"data__train": "null", "data__rollouts": tmp_path / "recording.jsonl", "rl__server": "null"}
        for row, live in zip(train(tmp_path / "replay", server, **{**more, **replay}), one, strict=True):
            del row["phase"]
            kept = {name: value for name, value in row.items() if not name.startswith("samples_failed")}
            assert kept == pytest.approx({name: live[name] for name in kept}, rel=1e-8, abs=1e-12)
        failed = {cause: [row[f"samples_failed/{cause}"] for row in one] for cause in ("logprobs", "reward")}
        assert sum(failed["logprobs"]) > 0 and sum(failed["reward"]) > 0
        assert_near(train(tmp_path / "two", server, "DP 2", **more), one)
        greedy = {**more, "reward": "long_answers", "rl__steps": 1, "rl__advantages": "remax"}
        [screen] = run_world(1, screen_of_run, arguments(tmp_path / "greedy", server, **greedy))
        assert (
            screen.count(
                "warning: the log-probs of a sample are invalid, but this run does not read them: completion server"
            )
            == 1
        )
        hung = {**more, "reward": "stuck_on_odd", "rl__failed_samples": "{retries: 0, max_share: 0.9, timeout: 0.05}"}
        late = train(tmp_path / "hung", server, "DP 2", **hung)
        names = {"samples_failed/reward": "samples_failed/timeout", "samples_failed/timeout": "samples_failed/reward"}
        assert_near(late, [{names.get(name, name): value for name, value in row.items()} for row in one])
        more["rl__failed_samples"] = "{retries: 1, max_share: 0.0}"
        with pytest.raises(WorldError, match=r"failed, more than failed_samples.max_share = 0") as caught:
            train(tmp_path / "strict", server, "DP 2", **more)
        assert len(caught.value.errors) == 2 and not caught.value.silent
