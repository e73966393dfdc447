"""From prompts to experience: draw, score, look at the models, shape, compare."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from parallel_rl.advantages import estimate, moments
from parallel_rl.advantages.table import by_group
from parallel_rl.agreement import raise_on_all_ranks
from parallel_rl.config.strict import configure
from parallel_rl.experience.dynamic_sampling import Drawn, Sources, draw
from parallel_rl.experience.kl_control import kl_controller
from parallel_rl.experience.maker_config import ExperienceConfig
from parallel_rl.experience.running_moments import RunningMoments
from parallel_rl.experience.samples import Experience, Samples
from parallel_rl.functional.kl import kl_estimate
from parallel_rl.groups import ParallelGroups
from parallel_rl.metrics import Metric, Metrics

PromptT = TypeVar("PromptT")

_MADE_HERE = ("rewards", "reward_components", "group_ids", "token_mask")


class Made(NamedTuple):
    """The step's experience on this data rank, and what to log of it (`reduce_metrics([metrics], groups)`)."""

    experience: Experience
    metrics: Metrics


class ExperienceMaker(Generic[PromptT]):
    """Makes the experience of a step, the same for any split of its prompts over data ranks. The order is

        generate → score (with dynamic sampling: again, for other prompts in place of those that tell nothing)
        → log-probs of policy and reference, values → KL → reward scale → overlong → running norm → clip
        → advantages, with the KL in the reward → prompt weights → mask of truncated responses → KL controller

    Args:
        config: see `ExperienceConfig`; a mapping will do.
        sources: see `Sources`.
        groups: `data` are the ranks that draw the other prompts. A prompt's samples are drawn on one rank, or on several where
            `generate` names their groups by `group_ids`.

    Raises:
        ValueError: an option that is not valid, or a source that the options need and that is missing.
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
        self.running = RunningMoments()
        for name in estimator.needs:
            source, given = self._source(name)
            if not given:
                raise ValueError(f"advantages {estimator.name!r} need {name}; sources.{source} is missing")
        if (self.config.dynamic_sampling is None) != (sources.more is None):
            raise ValueError(
                "dynamic_sampling and sources.more, which draws the other prompts, go together; one is missing"
            )

    @torch.no_grad()
    def make(self, prompts: Sequence[PromptT]) -> Made:
        """The experience of this rank's prompts; every data rank calls it.

        Raises:
            ValueError: what a source raised on any rank, or gave in a wrong shape; no prompts; what `estimate` refuses; dynamic
                sampling that ran out of rounds. On all data ranks alike.
        """
        config = self.config
        drawn = draw(self.sources, prompts, config.samples_per_prompt, config.dynamic_sampling, self.groups)
        samples, keep = drawn.samples, drawn.keep
        looked = raise_on_all_ranks(lambda: self._look(samples), [self.groups.data])
        mask = samples.token_mask.bool() & keep[:, None]
        total = drawn.rewards if drawn.rewards.dim() == 1 else drawn.rewards.sum(1)
        rewards, clipped = self._shape(samples, total, keep)
        fields = {**looked, "rewards": rewards, "token_mask": mask, "sample_mask": keep}
        assert samples.group_ids is not None
        fields |= {"group_ids": samples.group_ids, "reward_components": drawn.rewards}
        estimator = config.advantages
        if estimator.kl_coefficient:
            estimator = replace(estimator, kl_coefficient=self.controller.value)
        found = estimate(estimator, {name: fields[name] for name in (*estimator.needs, "sample_mask")}, self.groups)
        weights = torch.ones_like(total)
        if config.weight_clip is not None:
            limit, columns = config.weight_clip, {"rewards": total, "group_ids": samples.group_ids}
            weights = by_group(lambda table: table.informative_weight(limit), columns, keep, self.groups.data)
        advantages = found.advantages * weights[:, None].to(found.advantages.dtype)
        kl = looked.get("kl", torch.zeros_like(advantages))
        self._control(kl, mask, keep)

        trained = keep & ~_truncated(samples) if config.mask_truncated else keep
        made = replace(
            Experience.of(samples),
            kl=torch.where(mask, kl, 0.0),
            advantages=advantages,
            returns=found.returns,
            rewards=rewards,
            sample_mask=trained,
            info=_info(samples, total, torch.where(mask, kl, 0.0)),
            prev_logprobs=looked.get("prev_logprobs"),
            reference_policy_logprobs=looked.get("reference_policy_logprobs"),
            values=looked.get("values"),
        )
        return Made(made, _metrics(made, drawn, clipped))

    def state_dict(self) -> dict[str, dict[str, float]]:
        """What a checkpoint keeps: the KL controller and the running moments of the rewards."""
        return {"controller": self.controller.state_dict(), "running": self.running.state_dict()}

    def load_state_dict(self, state: Mapping[str, Mapping[str, float]]) -> None:
        """Goes on from a checkpoint.

        Raises:
            ValueError: `state` is not one of an experience maker.
        """
        if set(state) != {"controller", "running"}:
            raise ValueError(f"the state has {sorted(state)}; an experience maker needs controller and running")
        self.controller.load_state_dict(state["controller"])
        self.running.load_state_dict(state["running"])

    def _source(self, name: str) -> tuple[str, bool]:
        """Which source gives the field that an estimator reads, and whether it is there."""
        own = {"kl": "reference_logprobs", "values": "values"}
        if name in own:
            return own[name], getattr(self.sources, own[name]) is not None
        # whether the sampler gives log-probs is known when it has sampled
        return f"others[{name!r}]", name in (*_MADE_HERE, "prev_logprobs", *self.sources.others)

    def _look(self, samples: Samples) -> dict[str, Tensor]:
        """What the models say of the samples, and the KL."""
        sources, wide = self.sources, samples.input_ids.shape
        policy = sources.policy_logprobs
        found = {} if samples.generation_logprobs is None else {"prev_logprobs": samples.generation_logprobs}
        asked = {
            "prev_logprobs": policy,
            "reference_policy_logprobs": sources.reference_logprobs,
            "values": sources.values,
            **sources.others,
        }
        for name, source in asked.items():
            if source is not None:
                found[name] = source(samples)
                if found[name].shape[:2] not in (wide, wide[:1]):
                    raise ValueError(f"{name} must be {list(wide)} or {list(wide[:1])}, got {list(found[name].shape)}")
        if sources.reference_logprobs is not None:
            if "prev_logprobs" not in found:
                raise ValueError(
                    "the KL needs sources.policy_logprobs or samples with generation_logprobs; both are missing"
                )
            mask = samples.token_mask.bool()
            prev, reference = (
                torch.where(mask, found[name], 0.0) for name in ("prev_logprobs", "reference_policy_logprobs")
            )
            found["kl"] = kl_estimate(prev, reference, self.config.kl_estimator)
        return found

    def _shape(self, samples: Samples, rewards: Tensor, keep: Tensor) -> tuple[Tensor, Tensor]:
        """[N] shaped rewards, and which of them the clip changed."""
        config = self.config
        if config.reward_scale is not None:
            rewards = config.reward_scale(rewards)
        if config.overlong is not None:
            rewards = config.overlong(rewards, samples.token_mask.bool().sum(1), _truncated(samples))
        if config.running_norm:
            self.running.update(rewards, keep, self.groups.data)
            rewards = self.running.normalize(rewards, minus_mean=config.running_minus_mean)
        if config.reward_clip is None:
            return rewards, torch.zeros_like(keep)
        within = rewards.clamp(*config.reward_clip)
        return within, (within != rewards) & keep

    def _control(self, kl: Tensor, mask: Tensor, keep: Tensor) -> None:
        if self.config.kl_target is None:
            return
        samples = moments(keep.double(), keep, self.groups.data).number
        self.controller.update(float(moments(kl, mask, self.groups.data).mean), int(samples))


def _truncated(samples: Samples) -> Tensor:
    if samples.truncated is None:
        return torch.zeros_like(samples.lengths, dtype=torch.bool)
    return samples.truncated.bool()


def _info(samples: Samples, rewards: Tensor, kl: Tensor) -> dict[str, Tensor]:
    lengths = samples.token_mask.bool().sum(1)
    return {
        "reward": rewards,
        "kl": kl.sum(1) / lengths.clamp(min=1),
        "response_length": lengths,
        "total_length": samples.lengths,
    }


def _metrics(made: Experience, drawn: Drawn, clipped: Tensor) -> Metrics:
    """Means over the samples that count, of all ranks, once they are reduced."""
    keep, count = drawn.keep, drawn.keep.sum().double()
    assert made.info is not None and made.rewards is not None and made.kl is not None

    def mean(x: Tensor) -> Metric:
        return Metric("ratio", torch.where(keep, x.double(), 0.0).sum(), count)

    tokens = (made.token_mask.bool() & keep[:, None]).sum().double()
    return Metrics(
        {
            **{name: mean(made.info[name]) for name in ("reward", "response_length", "total_length")},
            "shaped_reward": mean(made.rewards),
            "reward_clip_fraction": mean(clipped),
            "truncated_fraction": mean(_truncated(made)),
            "kl": Metric("ratio", made.kl.double().sum(), tokens),
            "samples": Metric("count", count),
            "prompts_tried": Metric("count", torch.tensor(float(drawn.tried), device=keep.device)),
        }
    )
