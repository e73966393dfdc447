"""The experience maker: its order, its numbers by hand, dynamic sampling, ranks and state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from parallel_rl import ParallelGroups, reduce_metrics
from parallel_rl.advantages import estimate
from parallel_rl.experience import (
    DynamicSampling,
    ExperienceConfig,
    ExperienceMaker,
    FailedSamplesConfig,
    SampleFailures,
    Samples,
    Sources,
    padded_samples,
    reward_function,
    text_rewards,
)
from parallel_rl.functional.kl import kl_estimate
from parallel_rl.testing.pool import WorldError, run_world
from tests.servers.server import serve

N = 4


def answers(prompt: int, copy: int) -> list[int]:
    """What the sampler says: 1 to 5 tokens that depend on prompt and copy; the prompts 10, 20, ... are always the same."""
    if prompt % 10 == 0:
        return [3, 3]
    return [2 + (prompt * 7 + copy * 5 + k) % 9 for k in range(1 + (prompt + copy) % 5)]


def generate(prompts: Sequence[int], count: int) -> Samples:
    pairs = [(prompt, copy) for prompt in prompts for copy in range(count)]
    said = [answers(*pair) for pair in pairs]
    drawn = padded_samples([[prompt] for prompt, _ in pairs], said, logprobs=[[-0.1 * t for t in row] for row in said])
    return replace(
        drawn,
        truncated=torch.tensor([len(row) == 5 for row in said]),
        prompts=tuple(str(prompt) for prompt, _ in pairs),
        completions=tuple("x" * len(row) for row in said),
    )


def score(samples: Samples) -> Tensor:
    """1 where the answer's last token is even."""
    last = samples.input_ids.gather(1, samples.lengths[:, None] - 1)[:, 0]
    return (last % 2 == 0).double()


def noise(seed: int, samples: Samples) -> Tensor:
    """Log-probs of a model: by token and place, NaN where there is none."""
    place = torch.arange(samples.input_ids.shape[1])
    found = -((samples.input_ids * 13 + place * 7 + seed * 3) % 11).double() / 5
    return torch.where(samples.token_mask, found, torch.nan)


SOURCES = Sources[int](
    generate=generate,
    score=score,
    policy_logprobs=lambda samples: noise(1, samples),
    reference_logprobs=lambda samples: noise(2, samples),
    values=lambda samples: noise(3, samples),
)


def test_every_step_by_hand() -> None:
    config = {
        "samples_per_prompt": N,
        "kl_estimator": "k1",
        "reward_scale": {"target_min": -1.0, "target_max": 1.0},
        "overlong": {"name": "dapo", "max_length": 5, "buffer": 3},
        "running_norm": True,
        "running_minus_mean": True,
        "reward_clip": [-1.0, 1.0],
        "advantages": {"name": "rloo", "kl_coefficient": 0.1},
        "weight_clip": 3.0,
        "mask_truncated": True,
        "kl_target": 0.5,
        "kl_horizon": 100.0,
    }
    prompts = [1, 2, 10, 4]
    maker = ExperienceMaker(config, SOURCES)
    made, metrics = maker.make(prompts)

    drawn = generate(prompts, N)
    raw, lengths, mask = score(drawn), drawn.token_mask.sum(1), drawn.token_mask
    shaped = 2 * raw - 1
    shaped = shaped + ((2 - lengths) / 3).clamp(-1, 0)
    shaped = ((shaped - shaped.mean()) / shaped.std()).clamp(-1, 1)
    kl = torch.where(mask, noise(1, drawn) - noise(2, drawn), 0.0)
    groups = torch.arange(4).repeat_interleave(N)
    batch = {"rewards": shaped, "group_ids": groups, "token_mask": mask, "kl": kl}
    plain = estimate({"name": "rloo", "kl_coefficient": 0.1}, batch)
    tells = torch.tensor([len(set(row)) > 1 for row in raw.view(4, N).tolist()])
    assert 0 < tells.sum() < 4
    weight = torch.where(tells, min(4 / int(tells.sum()), 3.0), 1.0).repeat_interleave(N)
    torch.testing.assert_close(made.rewards, shaped)
    torch.testing.assert_close(made.kl, kl)
    torch.testing.assert_close(made.advantages, plain.advantages * weight[:, None])
    torch.testing.assert_close(made.returns, plain.returns)
    assert drawn.truncated is not None and made.sample_mask is not None
    assert torch.equal(made.sample_mask, ~drawn.truncated) and not made.sample_mask.all()
    assert torch.equal(made.group_ids, groups) and made.info is not None
    torch.testing.assert_close(made.info["kl"], kl.sum(1) / lengths)
    mean_kl = float(kl[mask].mean())
    error = min(max(mean_kl / 0.5 - 1, -0.2), 0.2)
    assert maker.controller.value == pytest.approx(0.1 * (1 + error * 16 / 100))

    found = {name: float(value) for name, value in reduce_metrics([metrics]).items()}
    assert found["reward"] == pytest.approx(float(raw.mean())) and found["kl"] == pytest.approx(mean_kl)
    assert found["shaped_reward"] == pytest.approx(float(shaped.mean()))
    assert found["reward_clip_fraction"] == float((shaped.abs() == 1).double().mean()) > 0
    assert found["truncated_fraction"] == float(drawn.truncated.double().mean())
    assert found["response_length"] == float(lengths.double().mean()) and found["prompts_tried"] == 4

    data = made.data()
    assert {"input_ids", "token_mask", "sample_mask", "advantages", "prev_logprobs", "values"} <= set(data)
    # the next step starts from the coefficient that this one left
    second = maker.make(prompts).experience
    again = estimate({"name": "reinforce", "kl_coefficient": maker.controller.value}, {**batch, "rewards": shaped})
    assert not torch.equal(second.advantages, made.advantages) and again.advantages.shape == second.advantages.shape  # type: ignore[arg-type]


def test_what_is_not_set_does_nothing() -> None:
    bare = Sources[int](generate=generate, score=score)
    made, metrics = ExperienceMaker({"samples_per_prompt": N}, bare).make([1, 2, 3])
    drawn = generate([1, 2, 3], N)
    batch = {"rewards": score(drawn), "group_ids": torch.arange(12) // N, "token_mask": drawn.token_mask}
    torch.testing.assert_close(made.advantages, estimate("grpo", batch).advantages)
    assert torch.equal(made.rewards, score(drawn)) and made.sample_mask is not None and made.sample_mask.all()  # type: ignore[arg-type]
    assert torch.equal(made.prev_logprobs, drawn.generation_logprobs)  # type: ignore[arg-type]
    assert made.reference_policy_logprobs is None and made.values is None and not made.kl.any()  # type: ignore[union-attr]
    assert float(metrics["reward_clip_fraction"]) == 0


@pytest.mark.parametrize("name", ["gae", "reinforce_plus_plus", "remax", "on_policy_distillation", "gdpo"])
def test_estimators_that_read_more(name: str) -> None:
    others = {
        "greedy_rewards": lambda samples: samples.lengths.double(),
        "teacher_token_logprobs": lambda samples: noise(4, samples),
    }
    sources = replace(SOURCES, others=others)
    if name == "gdpo":
        sources = replace(sources, score=lambda samples: torch.stack([score(samples), samples.lengths.double()], 1))
    made = ExperienceMaker({"samples_per_prompt": N, "advantages": name}, sources).make([1, 2, 3]).experience
    drawn = generate([1, 2, 3], N)
    batch = {
        "rewards": score(drawn),
        "reward_components": torch.stack([score(drawn), drawn.lengths.double()], 1),
        "group_ids": torch.arange(12) // N,
        "token_mask": drawn.token_mask,
        "values": noise(3, drawn),
        "prev_logprobs": noise(1, drawn),
        **{key: source(drawn) for key, source in others.items()},
    }
    torch.testing.assert_close(made.advantages, estimate(name, batch).advantages)


def test_the_kl_estimator() -> None:
    for kind in ("k1", "k2", "k3", "abs"):
        made = ExperienceMaker({"samples_per_prompt": N, "kl_estimator": kind}, SOURCES).make([1]).experience
        drawn = generate([1], N)
        prev, reference = (torch.where(drawn.token_mask, noise(seed, drawn), 0.0) for seed in (1, 2))
        torch.testing.assert_close(made.kl, kl_estimate(prev, reference, kind))  # type: ignore[arg-type]


def test_dynamic_sampling_draws_others() -> None:
    more, asked = iter([20, 5, 30, 6, 7]), []

    def others(count: int) -> list[int]:
        asked.append(count)
        return [next(more) for _ in range(count)]

    config = {"samples_per_prompt": N, "dynamic_sampling": {}}
    made, metrics = ExperienceMaker(config, replace(SOURCES, more=others)).make([1, 10, 2, 20])
    assert asked == [2, 1, 1] and made.prompts is not None
    assert [int(prompt) for prompt in made.prompts[::N]] == [1, 2, 5, 6]
    assert made.info is not None and all(0 < mean < 1 for mean in made.info["reward"].view(-1, N).mean(1).tolist())
    assert float(metrics["prompts_tried"]) == 8 and len(made) == 4 * N
    assert made.group_ids is not None and made.group_ids.tolist() == [g for g in range(4) for _ in range(N)]


def test_dynamic_sampling_has_an_end() -> None:
    config = ExperienceConfig(samples_per_prompt=N, dynamic_sampling=DynamicSampling(max_rounds=3))
    calls: list[int] = []

    def never(count: int) -> list[int]:
        calls.append(count)
        return [10] * count

    with pytest.raises(ValueError, match=r"after 3 rounds 1 prompts have no mean reward between 0\.0 and 1\.0; raise"):
        ExperienceMaker(config, replace(SOURCES, more=never)).make([1, 10])
    assert calls == [1, 1]
    masked = replace(config, dynamic_sampling=DynamicSampling(max_rounds=3, exhausted="mask"))
    made, metrics = ExperienceMaker(masked, replace(SOURCES, more=never)).make([1, 10])
    assert made.sample_mask is not None and made.sample_mask.tolist() == [True] * N + [False] * N
    assert made.advantages is not None and not made.advantages[N:].any() and made.advantages[:N].any()
    assert float(metrics["samples"]) == N
    with pytest.raises(ValueError, match=r"sources\.more gave 0 prompts; it must give 1"):
        ExperienceMaker(config, replace(SOURCES, more=lambda count: [])).make([1, 10])


def test_the_state_goes_on() -> None:
    config = {
        "samples_per_prompt": N,
        "running_norm": True,
        "advantages": {"name": "rloo", "kl_coefficient": 0.1},
        "kl_target": 0.5,
    }
    whole, half, other = (ExperienceMaker(config, SOURCES) for _ in range(3))
    whole.make([1, 2]), half.make([1, 2])
    other.load_state_dict(half.state_dict())
    for maker in (whole, other):
        maker.last = maker.make([3, 4]).experience  # type: ignore[attr-defined]
    assert torch.equal(whole.last.advantages, other.last.advantages)  # type: ignore[attr-defined]
    assert whole.state_dict() == other.state_dict()
    with pytest.raises(ValueError, match="an experience maker needs controller and running"):
        other.load_state_dict({"controller": {"value": 1.0}})


def test_rewards_of_texts_from_a_server() -> None:
    def counts(number: int, body: dict) -> tuple[int, object]:
        return 200, {
            "rewards": [
                len(said) + int(asked) for said, asked in zip(body["completions"], body["prompts"], strict=True)
            ]
        }

    with serve(counts) as server:
        sources = replace(SOURCES, score=text_rewards(reward_function({"url": server.url, "batch_size": 3})))
        made = ExperienceMaker({"samples_per_prompt": N}, sources).make([1, 2]).experience
    assert made.rewards is not None
    assert made.rewards.tolist() == [p + len(answers(p, k)) for p in (1, 2) for k in range(N)]


WORLD = {
    "samples_per_prompt": N,
    "overlong": {"name": "stop_properly", "coefficient": 0.5},
    "running_norm": True,
    "advantages": {"name": "reinforce_plus_plus_baseline", "kl_coefficient": 0.1},
    "weight_clip": 3.0,
    "kl_target": 0.5,
    "kl_horizon": 100.0,
}


def on_a_rank(rank: int, prompts: list[list[int]]) -> tuple[Tensor, Tensor, dict, dict[str, float]]:
    groups = ParallelGroups(data=dist.group.WORLD)
    maker = ExperienceMaker(WORLD, SOURCES, groups)
    for _ in range(2):
        made, metrics = maker.make(prompts[rank])
    assert made.advantages is not None and made.group_ids is not None
    numbers = {name: float(x) for name, x in reduce_metrics([metrics], groups).items()}
    return made.advantages, made.group_ids, maker.state_dict(), numbers


def test_two_ranks_make_what_one_makes() -> None:
    maker = ExperienceMaker(WORLD, SOURCES)
    for _ in range(2):
        made, metrics = maker.make([1, 2, 3, 10, 5])
    numbers = {name: float(x) for name, x in reduce_metrics([metrics]).items()}
    ranks = run_world(2, on_a_rank, [[1, 2, 3], [10, 5]])
    width = max(rank[0].shape[1] for rank in ranks)
    joined = torch.cat([torch.nn.functional.pad(rank[0], (0, width - rank[0].shape[1])) for rank in ranks])
    torch.testing.assert_close(joined, made.advantages, rtol=1e-11, atol=1e-12)
    assert len(set(torch.cat([rank[1] for rank in ranks]).tolist())) == 5
    for _, _, state, found in ranks:
        assert found == pytest.approx(numbers, rel=1e-12)
        assert state["controller"] == pytest.approx(maker.controller.state_dict(), rel=1e-12)
        assert state["running"] == pytest.approx(maker.running.state_dict(), rel=1e-12)


def on_a_context_rank(rank: int) -> dict[str, float]:
    groups = ParallelGroups(context=dist.group.WORLD)
    _, metrics = ExperienceMaker({"samples_per_prompt": N}, SOURCES, groups).make([1, 2, 3])
    return {name: float(x) for name, x in reduce_metrics([metrics], groups).items()}


def test_context_ranks_count_their_common_samples_once() -> None:
    _, metrics = ExperienceMaker({"samples_per_prompt": N}, SOURCES).make([1, 2, 3])
    alone = {name: float(x) for name, x in reduce_metrics([metrics]).items()}
    assert run_world(2, on_a_context_rank) == [pytest.approx(alone)] * 2 and alone["samples"] == 3 * N


def dynamic_on_a_rank(rank: int, prompts: list[list[int]], others: list[list[int]]) -> list[str]:
    more = iter(others[rank])
    sources = replace(SOURCES, more=lambda count: [next(more) for _ in range(count)])
    config = {"samples_per_prompt": N, "dynamic_sampling": {"max_rounds": 4}}
    made = ExperienceMaker(config, sources, ParallelGroups(data=dist.group.WORLD)).make(prompts[rank]).experience
    assert made.prompts is not None
    return list(made.prompts[::N])


def test_a_rank_waits_for_one_that_draws_more_often() -> None:
    found = run_world(2, dynamic_on_a_rank, [[1, 2], [10, 20]], [[], [30, 5, 40, 6]])
    assert found == [["1", "2"], ["5", "6"]]
    with pytest.raises(WorldError, match="after 4 rounds 1 prompts") as caught:
        run_world(2, dynamic_on_a_rank, [[1, 2], [10, 2]], [[], [30, 40, 50]], timeout=60)
    assert len(caught.value.errors) == 2
    with pytest.raises(WorldError, match=r"rank 1: .*StopIteration") as caught:
        run_world(2, dynamic_on_a_rank, [[1, 2], [10, 2]], [[], [30]], timeout=60)
    assert len(caught.value.errors) == 2


def grouped_on_a_rank(rank: int) -> str:
    """Both ranks draw two of a prompt's four samples, and say so."""

    def half(prompts: Sequence[int], count: int) -> Samples:
        drawn = generate(prompts, count)
        return replace(drawn, group_ids=torch.tensor(prompts).repeat_interleave(count))

    sources = replace(SOURCES, generate=half, more=lambda count: [7] * count)
    config = {"samples_per_prompt": 2, "dynamic_sampling": {"low": -1.0, "high": 2.0}}
    with pytest.raises(ValueError) as caught:
        ExperienceMaker(config, sources, ParallelGroups(data=dist.group.WORLD)).make([1, 2])
    return str(caught.value)


def test_dynamic_sampling_of_a_part_of_a_group_is_refused() -> None:
    """Each rank judged its own part: one kept what the other drew anew."""
    said = "group 1 has 4 samples in the step; dynamic_sampling needs all 2 samples of a prompt on one rank, "
    assert run_world(2, grouped_on_a_rank) == [said + "under an id that no other prompt of the step has"] * 2


def test_a_failed_sample_is_judged_with_its_own_group() -> None:
    """Its group has the samples of one id; dynamic sampling looks at those that did not fail."""
    nan = torch.nan
    assert DynamicSampling().keeps(torch.tensor([[1, nan, 0], [nan, nan, nan], [1, nan, 1]])) == [True, False, False]

    def rate(samples: Samples) -> Tensor:
        return torch.where(torch.arange(len(samples)) == 1, nan, score(samples))

    def draw(prompts: Sequence[int], count: int) -> Samples:
        return replace(generate(prompts, count), group_ids=torch.tensor([7, 7, 7, 7, 8, 8]))

    config = {"samples_per_prompt": 2, "failed_samples": {"retries": 0, "max_share": 0.5}}
    made = ExperienceMaker(config, Sources[int](generate=draw, score=rate)).make([1, 1, 2]).experience
    assert made.sample_mask is not None and made.sample_mask.tolist() == [True, False, True, True, True, True]
    made = ExperienceMaker(config, Sources[int](generate=generate, score=rate)).make([1, 3, 2]).experience
    assert made.sample_mask is not None and made.sample_mask.tolist() == [False, False, True, True, True, True]


def test_as_many_failures_as_the_bound_are_accepted() -> None:
    """0.29 · 100 is 28.999… in binary."""
    failures = SampleFailures(FailedSamplesConfig(max_share=0.29))
    failures.count(100, {"reward": torch.arange(100) < 29})
    with pytest.raises(ValueError, match="30 by reward of 100 samples failed, more than"):
        failures.count(0, {"reward": torch.tensor([True])})


@pytest.mark.parametrize("cause", ["reward", "logprobs"])
def test_a_sample_that_fails_is_masked_and_no_part_of_its_group(cause: str, capsys: pytest.CaptureFixture[str]) -> None:
    """... if it fails each time: otherwise nothing is to be seen of it."""
    prompts, calls = [1, 2, 3], [0]

    def sources(times: int) -> Sources[int]:
        calls[0] = 0

        def fails(samples: Samples) -> bool:
            calls[0] += bool((hit := samples.input_ids[:, 0] == 2).any())
            return bool(hit.any()) and calls[0] <= times

        def draw(asked: Sequence[int], count: int) -> Samples:
            drawn = generate(asked, count)
            if cause == "logprobs" and fails(drawn):
                drawn.generation_logprobs[(drawn.input_ids[:, 0] == 2).nonzero()[0], 1] = -9999.0  # type: ignore[index]
            return drawn

        def rate(samples: Samples) -> Tensor:
            rewards = score(samples)
            if cause == "reward" and fails(samples):
                rewards[(samples.input_ids[:, 0] == 2).nonzero()[0]] = torch.nan
            return rewards

        return Sources[int](generate=draw, score=rate)

    whole = generate(prompts, N)
    maker = ExperienceMaker({"samples_per_prompt": N}, sources(3))
    made, metrics = maker.make(prompts)
    keep = torch.arange(3 * N) != N
    batch = {"rewards": score(whole), "group_ids": torch.arange(3 * N) // N, "token_mask": whole.token_mask}
    expected = estimate("grpo", {name: value[keep] for name, value in batch.items()}).advantages
    assert torch.equal(made.sample_mask, keep) and calls[0] == 3  # type: ignore[arg-type]
    torch.testing.assert_close(made.advantages[keep], expected)  # type: ignore[index]
    assert all(bool(x.isfinite().all()) for x in made.tensors().values() if x.is_floating_point())
    assert {name: float(metrics[name]) for name in ("samples_failed/reward", "samples_failed/logprobs", "samples")} == {
        "samples_failed/reward": float(cause == "reward"),
        "samples_failed/logprobs": float(cause == "logprobs"),
        "samples": 11.0,
    }
    said = capsys.readouterr().out
    assert f"is not finite, of sample {N}; samples_failed/{cause} counts such samples" in said

    made, metrics = ExperienceMaker({"samples_per_prompt": N}, sources(1)).make(prompts)
    torch.testing.assert_close(made.advantages, estimate("grpo", batch).advantages)
    assert calls[0] == 2 and float(metrics[f"samples_failed/{cause}"]) == 0 and not capsys.readouterr().out

    strict = {"samples_per_prompt": N, "failed_samples": {"max_share": 0.08, "retries": 0}}
    with pytest.raises(ValueError, match=rf"is not finite, of sample 4 \(1 by {cause} of 12 samples failed, more than"):
        ExperienceMaker(strict, sources(1)).make(prompts)
