"""Sources that fail or give the wrong thing are errors on all ranks, and options that do not do are named."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from parallel_rl import ParallelGroups
from parallel_rl.experience import (
    ExperienceConfig,
    ExperienceMaker,
    Samples,
    SoftOverlong,
    Sources,
    reward_function,
    text_rewards,
)
from parallel_rl.testing.pool import WorldError, run_world
from tests.experience.test_maker import SOURCES, N, generate, noise, score


def broken_on_a_rank(rank: int, stage: str) -> None:
    def breaks(samples: Samples) -> Tensor:
        if rank == 1:
            raise ConnectionError("the server is down")
        return noise(2, samples)

    def no_reward(samples: Samples) -> Tensor:
        return torch.full((len(samples),), torch.nan) if rank == 1 else score(samples)

    change = {
        "score": {"score": no_reward},
        "reference": {"reference_logprobs": breaks},
        "shape": {"values": lambda samples: torch.zeros(2 if rank == 1 else len(samples))},
        "prompts": {},
    }[stage]
    maker = ExperienceMaker(
        {"samples_per_prompt": N},
        replace(SOURCES, **change),
        ParallelGroups(data=dist.group.WORLD),  # type: ignore[arg-type]
    )
    maker.make([] if stage == "prompts" and rank == 1 else [1, 2])


@pytest.mark.parametrize(
    ("stage", "message"),
    [
        ("score", "rank 1: score gave a reward that is not finite, of sample 0"),
        ("reference", "rank 1: ConnectionError: the server is down"),
        ("shape", r"rank 1: values must be \[8, \d\] or \[8\], got \[2\]"),
        ("prompts", "rank 1: there are no prompts"),
    ],
)
def test_a_source_that_fails_on_one_rank_is_an_error_on_all(stage: str, message: str) -> None:
    with pytest.raises(WorldError, match=message) as caught:
        run_world(2, broken_on_a_rank, stage, timeout=60)
    assert len(caught.value.errors) == 2 and not caught.value.silent


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"generate": lambda prompts, n: generate(prompts, n + 1)},
            "generate gave 10 padded samples for 2 prompts; 4 padded",
        ),
        ({"generate": lambda prompts, n: generate(prompts, n).pack()}, "generate gave 8 packed samples"),
        (
            {"score": lambda samples: torch.ones(3)},
            r"score must give \[N\] or \[N, K\] rewards of N = 8 samples, got \[3\]",
        ),
        ({"score": lambda samples: [1.0] * 8}, "score must give .* got list"),
        (
            {
                "score": text_rewards(reward_function("exact_match")),
                "generate": lambda prompts, n: replace(generate(prompts, n), prompts=None),
            },
            "rewards of texts need samples with prompts and completions",
        ),
        (
            {
                "policy_logprobs": None,
                "generate": lambda prompts, n: replace(generate(prompts, n), generation_logprobs=None),
            },
            r"the KL needs sources\.policy_logprobs or samples with generation_logprobs",
        ),
    ],
)
def test_sources_that_give_the_wrong_thing(change: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ExperienceMaker({"samples_per_prompt": N}, replace(SOURCES, **change)).make([1, 2])


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"advantages": {"name": "rloo", "kl_coefficient": 1}},
            r"advantages 'rloo' need kl; sources\.reference_logprobs is",
        ),
        ({"advantages": "gae"}, r"advantages 'gae' need values; sources\.values is missing"),
        ({"advantages": "remax"}, r"need greedy_rewards; sources\.others\['greedy_rewards'\] is missing"),
        ({"dynamic_sampling": {}}, r"dynamic_sampling and sources\.more, .* go together"),
    ],
)
def test_missing_sources(config: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ExperienceMaker(config, Sources[int](generate=generate, score=score))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"samples_per_prompts": 4},
            "unknown key samples_per_prompts = 4 in ExperienceConfig; did you mean 'samples_per_prompt'",
        ),
        ({"samples_per_prompt": 0}, "samples_per_prompt = 0 must be at least 1"),
        ({"running_minus_mean": True}, "running_minus_mean = True has no effect with running_norm = False"),
        ({"reward_clip": [1, -1]}, r"reward_clip = \[1.0, -1.0\] must be two numbers"),
        ({"weight_clip": 1}, r"weight_clip = 1\.0 must be above 1"),
        ({"weight_clip": 2, "advantages": "gae"}, r"weight_clip = 2\.0 needs a grouped estimator, not 'gae'"),
        ({"kl_target": 1}, r"kl_target = 1\.0 needs advantages\.kl_coefficient above 0"),
        ({"kl_horizon": 10}, r"horizon = 10\.0 has no effect without a target"),
        ({"kl_target": 0, "advantages": {"name": "rloo", "kl_coefficient": 1}}, r"target = 0\.0 of an adaptive"),
        (
            {"running_norm": True, "advantages": "gdpo"},
            "running_norm has no effect: advantages 'gdpo' read no reward",
        ),
        ({"dynamic_sampling": {"low": 1}}, r"low = 1\.0 must be below high = 1\.0"),
        ({"dynamic_sampling": {"max_rounds": 1}}, "max_rounds = 1 must be at least 2"),
        ({"dynamic_sampling": {"exhausted": "skip"}}, "dynamic_sampling.exhausted = 'skip' is not valid"),
        (
            {"failed_samples": {"timeout": 5}},
            r"failed_samples\.timeout = 5 has no effect on sources\.score; give it to",
        ),
        ({"failed_samples": {"timeout": 0}}, r"failed_samples: timeout = 0\.0 must be positive"),
        ({"overlong": "soft"}, "overlong.name = 'soft' is not valid; valid: dapo, stop_properly"),
    ],
)
def test_bad_options(config: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ExperienceMaker(config, SOURCES)


def test_a_config_is_a_dataclass_or_a_mapping() -> None:
    config = ExperienceConfig(overlong=SoftOverlong(10, 4))
    assert ExperienceMaker(config, SOURCES).config is config
    assert ExperienceMaker({"overlong": {"name": "dapo", "max_length": 10, "buffer": 4}}, SOURCES).config == config
