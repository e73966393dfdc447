"""The experience maker: `pipeline`'s functions behind LightRFT's interface."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from parallel_rl.advantages.base import moments
from parallel_rl.advantages.table import SampleTable, by_group
from parallel_rl.agreement import raise_on_all_ranks
from parallel_rl.compat.lightrft.losses import ExperienceConfig
from parallel_rl.config.strict import configure
from parallel_rl.experience.dynamic_sampling import Drawn, draw_groups
from parallel_rl.experience.failures import (
    SampleFailures,
    failed_logprobs,
    lone_in_groups,
    redrawn,
    without_failed_logprobs,
    without_lone,
)
from parallel_rl.experience.pipeline import (
    Models,
    ask_models,
    compute_advantages,
    is_truncated,
    kl_controller,
    shape_rewards,
)
from parallel_rl.experience.rewards import RewardFunction
from parallel_rl.experience.samples import Experience, Samples
from parallel_rl.experience.shaping import RunningMoments
from parallel_rl.groups import ParallelGroups
from parallel_rl.metrics import Metric, Metrics

PromptT = TypeVar("PromptT")

_MADE_HERE = ("rewards", "reward_components", "group_ids", "token_mask")


@dataclass(frozen=True, kw_only=True)
class Sources(Models, Generic[PromptT]):
    """The sources of experience: a sampler, a score, and the models that `Models` describes.

    Attributes:
        generate: (prompts, n) -> n consecutive samples of each prompt. It must not communicate over data ranks, which may call
            it a different number of times.
        score: samples -> [N] raw rewards, or [N, K] for an estimator that reads `reward_components`; see `text_rewards`. It
            is called again for samples whose reward is not finite.
        more: count -> that many other prompts, for dynamic sampling.
    """

    generate: Callable[[Sequence[PromptT], int], Samples]
    score: Callable[[Samples], Tensor]
    more: Callable[[int], Sequence[PromptT]] | None = None


def text_rewards(reward: RewardFunction) -> Callable[[Samples], Tensor]:
    """Make a score for `Sources` from a reward function on texts: `prompts`, `completions`, `answers`.

    The reward of a sample that failed is NaN, with a warning.

    >>> from parallel_rl.experience import padded_samples, reward_function
    >>> samples = replace(padded_samples([[1]], [[2]]), prompts=("1+1=",), completions=("2",), answers=("2",))
    >>> text_rewards(reward_function("exact_match"))(samples)
    tensor([1.], dtype=torch.float64)
    """

    def score(samples: Samples) -> Tensor:
        if samples.prompts is None or samples.completions is None:
            raise ValueError("rewards of texts need samples with prompts and completions, which are missing")
        scored = reward.score(samples.prompts, samples.completions, samples.answers or ("",) * len(samples))
        for fault in [*scored.faults.values()][:1]:
            warnings.warn(str(fault), stacklevel=2)
        return scored.rewards

    return score


class Made(NamedTuple):
    """Experience of a step on this data rank, and metrics to log (`reduce_metrics([metrics], groups)`)."""

    experience: Experience
    metrics: Metrics


class ExperienceMaker(Generic[PromptT]):
    """Maker of a step's experience, the same for any split of its prompts over data ranks.

        generate → score (with dynamic sampling: again, for replaced prompts)
        → log-probs of policy and reference, values → KL → reward scale → overlong → running norm → clip
        → advantages, with the KL in the reward → prompt weights → mask of truncated responses → KL controller

    Args:
        config: an `ExperienceConfig` or its mapping. sources: see `Sources`.
        groups: `data` ranks have other prompts. A prompt's samples are on one rank, or, without dynamic sampling, on several if
            `generate` sets `group_ids`.

    Raises:
        ValueError: an invalid option, or a missing source that the options need.
    """

    def __init__(
        self,
        config: ExperienceConfig | Mapping | None,
        sources: Sources[PromptT],
        groups: ParallelGroups | None = None,
    ) -> None:
        self.config, self.sources = configure(ExperienceConfig, config), sources
        self.groups = groups or ParallelGroups()
        estimator = self.config.advantages
        self.controller = kl_controller(estimator.kl_coefficient, self.config.kl_target, self.config.kl_horizon)
        self.running, self.failures = RunningMoments(), SampleFailures(self.config.failed_samples)
        for name in estimator.needs:
            source, available = self._source(name)
            if not available:
                raise ValueError(f"advantages {estimator.name!r} need {name}; sources.{source} is missing")
        if (self.config.dynamic_sampling is None) != (sources.more is None):
            raise ValueError(
                "dynamic_sampling and sources.more, which gives the other prompts, go together; one is missing"
            )

    @torch.no_grad()
    def make(self, prompts: Sequence[PromptT]) -> Made:
        """Make the experience of this rank's prompts; every data rank calls it.

        ValueError on all data ranks if a source fails or returns a wrong shape, without prompts, if `estimate` refuses, if
        dynamic sampling runs out of rounds, or if too many samples fail.
        """
        config, groups = self.config, self.groups
        drawn = self._draw(prompts)
        keep, total = drawn.keep, drawn.rewards if drawn.rewards.dim() == 1 else drawn.rewards.sum(1)
        experience = replace(Experience.of(drawn.samples), sample_mask=keep)
        experience = experience.with_fields(
            **raise_on_all_ranks(lambda: ask_models(experience, self.sources, config.kl_estimator), [groups.data])
        )
        rewards, clipped = shape_rewards(experience, total, config, self.running, keep, groups.data)
        fields = {**experience.data(), "rewards": rewards, "reward_components": drawn.rewards}
        estimates = compute_advantages(fields, config.advantages, groups, self.controller)
        weights = torch.ones_like(total)
        if config.weight_clip is not None:
            limit, columns = config.weight_clip, {"rewards": total, "group_ids": fields["group_ids"]}
            weights = by_group(lambda table: table.informative_weight(limit), columns, keep, groups.data)
        mask = experience.token_mask.bool() & keep[:, None]
        kl = torch.zeros_like(estimates.advantages) if experience.kl is None else torch.where(mask, experience.kl, 0.0)
        if config.kl_target is not None:
            samples = moments(keep.double(), keep, groups.data).number
            self.controller.update(float(moments(kl, mask, groups.data).mean), int(samples))
        experience = replace(
            experience,
            kl=kl,
            advantages=estimates.advantages * weights[:, None].to(estimates.advantages.dtype),
            returns=estimates.returns,
            rewards=rewards,
            sample_mask=keep & ~is_truncated(experience) if config.mask_truncated else keep,
            info=_info(experience, total, kl),
            others={},
        )
        failed = self.failures.metrics() if groups.dp_rank == 0 else dict.fromkeys(self.failures.metrics(), 0.0)
        return Made(experience, _metrics(experience, drawn, clipped & keep, failed, counts=groups.cp_rank == 0))

    def state_dict(self) -> dict[str, dict[str, float]]:
        """Return the state of KL controller and running moments for a checkpoint."""
        return {"controller": self.controller.state_dict(), "running": self.running.state_dict()}

    def load_state_dict(self, state: Mapping[str, Mapping[str, float]]) -> None:
        """Continue from a checkpoint; ValueError for the state of something else."""
        if set(state) != {"controller", "running"}:
            raise ValueError(f"the state has {sorted(state)}; an experience maker needs controller and running")
        self.controller.load_state_dict(state["controller"])
        self.running.load_state_dict(state["running"])

    def _source(self, name: str) -> tuple[str, bool]:
        """Return the source of a field that an estimator reads, and whether it is available."""
        providers = {"kl": "reference_logprobs", "values": "values"}
        if name in providers:
            return providers[name], getattr(self.sources, providers[name]) is not None
        # known only after sampling
        return f"others[{name!r}]", name in (*_MADE_HERE, "prev_logprobs", *self.sources.others)

    def _draw(self, prompts: Sequence[PromptT]) -> Drawn:
        sources, size, groups = self.sources, self.config.samples_per_prompt, self.groups
        grouped, dynamic = self.config.advantages.grouped, self.config.dynamic_sampling

        def draw(missing: Sequence[int], number: int) -> tuple[Samples, Tensor] | None:
            def work() -> tuple[Samples, Tensor, dict[str, Tensor]] | None:
                batch = _more_prompts(sources, len(missing)) if number else prompts
                # a rank with enough samples still takes part in each round
                return _generate(sources, batch, size, self.failures) if batch or not number else None

            result = raise_on_all_ranks(work, [groups.data])
            self.failures.count(*((0, {}) if result is None else (len(result[0]), result[2])), data=groups.data)
            if result is None:
                return None
            return result[0], without_lone(result[1], size) if grouped and dynamic else result[1]

        drawn = draw_groups(draw, len(prompts), size, dynamic, groups, in_place=False)
        failed = drawn.rewards.isnan() if drawn.rewards.dim() == 1 else drawn.rewards.isnan().any(1)
        drawn = drawn._replace(keep=drawn.keep & ~failed, rewards=drawn.rewards.nan_to_num(0.0))
        samples = drawn.samples
        if samples.group_ids is None:
            ids = torch.arange(len(samples)) // size + (groups.dp_rank << 40)  # unique over ranks
            samples = replace(samples, group_ids=ids.to(samples.lengths.device))
        elif dynamic is not None:
            columns = {"rewards": torch.zeros_like(samples.group_ids).double(), "group_ids": samples.group_ids}
            everyone = torch.ones_like(samples.group_ids, dtype=torch.bool)
            by_group(lambda table: _group_sizes(table, size), columns, everyone, groups.data)
        if grouped and dynamic is None:
            assert samples.group_ids is not None
            drawn = drawn._replace(keep=drawn.keep & ~lone_in_groups(drawn.keep, samples.group_ids, groups.data))
        return drawn._replace(samples=samples)


def _generate(
    sources: Sources[PromptT], prompts: Sequence[PromptT], count: int, failures: SampleFailures
) -> tuple[Samples, Tensor, dict[str, Tensor]]:
    if not prompts:
        raise ValueError("there are no prompts to make experience of")
    samples, retries = _samples(sources, prompts, count), failures.config.retries
    for _ in range(retries):
        failed = failed_logprobs(samples)
        if not (places := sorted({row // count for row in failed.nonzero()[:, 0].tolist()})):
            break
        samples = redrawn(samples, _samples(sources, [prompts[place] for place in places], count), failed, places)
    rewards = _rewards(sources, samples)
    for _ in range(retries):
        rows = (~rewards.isfinite()).view(len(samples), -1).any(1).nonzero()[:, 0]
        if not len(rows):
            break
        rewards[rows] = _rewards(sources, samples.select(rows))
    samples, lost = without_failed_logprobs(samples)
    rewards = rewards.to(samples.lengths.device)
    unscored = (~rewards.isfinite()).view(len(samples), -1).any(1)
    failures.report_logprobs("generate", lost, range(len(samples)))
    if bool(unscored.any()):
        failures.report("reward", f"score gave a reward that is not finite, of sample {int(unscored.nonzero()[0, 0])}")
    rewards[lost | unscored] = torch.nan
    return samples, rewards, {"logprobs": lost, "reward": unscored & ~lost}


def _samples(sources: Sources[PromptT], prompts: Sequence[PromptT], count: int) -> Samples:
    samples = sources.generate(prompts, count)
    if len(samples) != len(prompts) * count or samples.packed:
        layout = "packed" if samples.packed else "padded"
        raise ValueError(
            f"generate gave {len(samples)} {layout} samples for {len(prompts)} prompts; {count} padded ones of each are needed"
        )
    return samples


def _rewards(sources: Sources[PromptT], samples: Samples) -> Tensor:
    rewards = sources.score(samples)
    if not isinstance(rewards, Tensor) or rewards.dim() not in (1, 2) or len(rewards) != len(samples):
        got = list(rewards.shape) if isinstance(rewards, Tensor) else type(rewards).__name__
        raise ValueError(f"score must give [N] or [N, K] rewards of N = {len(samples)} samples, got {got}")
    return rewards.double()


def _group_sizes(table: SampleTable, size: int) -> Tensor:
    """Return the groups' sizes; refuse a group that is split over calls of `generate`."""
    if bool((table.count != size).any()):
        at = int((table.count != size).nonzero()[0, 0])
        raise ValueError(
            f"group {int(table.group_ids[at])} has {int(table.count[at])} samples in the step; dynamic_sampling needs all "
            f"{size} samples of a prompt on one rank, under an id that no other prompt of the step has"
        )
    return table.count


def _more_prompts(sources: Sources[PromptT], count: int) -> list[PromptT]:
    assert sources.more is not None
    prompts = list(sources.more(count)) if count else []
    if len(prompts) != count:
        raise ValueError(f"sources.more gave {len(prompts)} prompts; it must give {count}")
    return prompts


def _info(samples: Samples, rewards: Tensor, kl: Tensor) -> dict[str, Tensor]:
    return {
        "reward": rewards,
        "kl": kl.sum(1) / samples.response_lengths.clamp(min=1),
        "response_length": samples.response_lengths,
        "total_length": samples.lengths,
    }


def _metrics(
    experience: Experience, drawn: Drawn, clipped: Tensor, failed: Mapping[str, float], *, counts: bool
) -> Metrics:
    """Average over all ranks' samples with `keep`; only ranks with `counts` add to the counts."""
    keep, count = drawn.keep, drawn.keep.sum().double()
    assert experience.info is not None and experience.rewards is not None and experience.kl is not None

    def mean(x: Tensor) -> Metric:
        return Metric("ratio", torch.where(keep, x.double(), 0.0).sum(), count)

    tokens = (experience.token_mask.bool() & keep[:, None]).sum().double()
    return Metrics(
        {
            **{name: mean(experience.info[name]) for name in ("reward", "response_length", "total_length")},
            "shaped_reward": mean(experience.rewards),
            "reward_clip_fraction": mean(clipped),
            "truncated_fraction": mean(is_truncated(experience)),
            "kl": Metric("ratio", experience.kl.double().sum(), tokens),
            "samples": Metric("count", count * counts),
            **{name: Metric("count", torch.tensor(n * counts, device=keep.device)) for name, n in failed.items()},
            "prompts_tried": Metric("count", torch.tensor(float(drawn.tried * counts), device=keep.device)),
        }
    )
