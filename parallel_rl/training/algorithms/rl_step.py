"""One step of RL: samples or recorded rollouts, log-probs and values, advantages, and the optimizer steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache, partial

import torch
from torch import Tensor

from parallel_rl.agreement import raise_on_all_ranks
from parallel_rl.experience import (
    Experience,
    Models,
    RewardShaping,
    ask_models,
    compute_advantages,
    padded_samples,
    shape_rewards,
)
from parallel_rl.groups import group_sum, mean_over_ranks
from parallel_rl.training.algorithms.sampled import ask_ahead, mask_stale, sampled_experience
from parallel_rl.training.algorithms.supervised import rows_of
from parallel_rl.training.batching.micro_batches import local_shares, with_user_fields
from parallel_rl.training.config.algorithms import RLConfig
from parallel_rl.training.config.data import OBSERVED
from parallel_rl.training.data.datasets import check_cut
from parallel_rl.training.data.examples import Rollout
from parallel_rl.training.data.records.source import Records
from parallel_rl.training.models.learner import combine_updates
from parallel_rl.training.models.scoring import with_teacher_logits
from parallel_rl.training.models.train_step import StepMetrics
from parallel_rl.training.session import Session, TrainProgress
from parallel_rl.vocab.shards import KEEP_ALL, Truncation


def check_mismatch(session: Session, config: RLConfig, experience: Experience, at: TrainProgress) -> StepMetrics:
    """Return the mean |log ratio| of sampler and policy over valid tokens with staleness 0, if any.

    ValueError on every rank if one server exceeds `max_mismatch`; a mean over all would hide it.
    """
    served, server = session.served, config.server
    assert served is not None and server is not None
    recomputed = config.recomputes_prev_logprobs
    if server.max_mismatch is None or (served.compared and not recomputed):
        return {}
    served.compared = True
    logprobs = _policy_logprobs(session, experience) if not recomputed else experience.prev_logprobs
    assert logprobs is not None
    sums = _sums(session, experience, logprobs, len(server.urls))
    for url, (total, count) in zip(server.urls, sums[:-1].tolist(), strict=True):
        if count and not total / count <= server.max_mismatch:  # false for NaN
            version = config.policy_version(at.step)
            raise ValueError(
                f"completion server {url}: step {at.step + 1}'s log-probs differ from the policy's (version {version}) by "
                f"{total / count:.3g}, mean |log ratio| over {int(count)} tokens; rl.server.max_mismatch = "
                f"{server.max_mismatch:g}. Give the server the policy's weights, temperature, top_k and top_p, or set "
                "max_mismatch to null for samples of any policy"
            )
    total, count = sums.sum(0).tolist()
    return {"mismatch": total / count} if count and recomputed else {}


def _policy_logprobs(session: Session, experience: Experience) -> Tensor:
    sampling = session.engine.config.sampling
    return session.policy.log_probs(experience, temperature=sampling.temperature, truncation=sampling.truncation)


def _sums(session: Session, experience: Experience, logprobs: Tensor, servers: int) -> Tensor:
    """Sum |log ratio| and tokens per server, unknown ones last: [servers + 1, 2] float64 on the host."""
    assert experience.generation_logprobs is not None and experience.sample_mask is not None
    fresh = (experience.others["staleness"] == 0) & experience.sample_mask.bool()
    # −∞ is a token outside the policy's truncation; the loss masks it, too
    valid = experience.token_mask.bool() & fresh[:, None] & (logprobs != -torch.inf)
    distance = torch.where(valid, (logprobs.double() - experience.generation_logprobs.double()).abs(), 0.0)
    of_samples = torch.stack([distance.sum(1), valid.sum(1).double()], 1)
    place = experience.others["servers"] % (servers + 1)  # −1 is the last row
    sums = torch.zeros(servers + 1, 2, dtype=torch.float64).index_add(0, place, of_samples)
    return group_sum(sums.to(session.engine.device), session.engine.groups.data).cpu()


_EXPERTS = 1 << 48  # above the ids of all samples of a run


def recorded_experience(session: Session, config: RLConfig, at: TrainProgress) -> tuple[Experience, float | None]:
    """Read this data rank's next recorded rollouts, and their mean reward unless they have advantages."""
    engine, records = session.engine, session.data.rollouts
    first, count = at.next("rollouts"), config.prompts * config.group_size
    batch = raise_on_all_ranks(partial(_read, records, first, count))
    indices = local_shares(count, config.updates, engine.groups)
    mine = [batch[index] for index in indices]
    starts = [len(record.tokens) - len(record.logprobs) for record in mine]
    samples = padded_samples(
        [record.tokens[:start] for record, start in zip(mine, starts, strict=True)],
        [record.tokens[start:] for record, start in zip(mine, starts, strict=True)],
        logprobs=[record.logprobs for record in mine],
        masks=[record.mask for record in mine],
        dtype=engine.float_dtype,
    )
    keep = torch.tensor([record.sample_mask != 0 for record in batch])
    groups, ids = [record.group for record in mine], [first + index for index in indices]
    experience = Experience.of(samples).with_fields(
        group_ids=_ids(groups), sample_ids=_ids(ids), sample_mask=keep[indices]
    )
    if "run_ids" in config.recorded_fields:
        experience = experience.with_fields(run_ids=_ids([record.run or 0 for record in mine]))
    user_values = [record.user_values for record in mine]
    experience = with_user_fields(
        experience, user_values, engine.config.user_fields("rollouts"), starts, engine.float_dtype
    )
    if any(record.segments is not None for record in batch):
        experience = _with_turns(experience, mine)
    if batch[0].reward is None:
        advantages = torch.tensor([float(record.advantage or 0.0) for record in mine], dtype=engine.float_dtype)
        return replace(experience, advantages=experience.token_mask * advantages[:, None]), None
    rewards = torch.tensor([float(record.reward or 0.0) for record in batch], dtype=torch.float64)
    return replace(experience, rewards=rewards[indices].to(engine.float_dtype)), float(rewards[keep].mean())


def _with_turns(experience: Experience, records: Sequence[Rollout]) -> Experience:
    """Add the turn of each token; tokens of the environment have no loss."""
    turns = torch.zeros_like(experience.input_ids)
    for row, record in enumerate(records):
        if record.segments is not None:
            end = len(record.tokens)
            turns[row, end - len(record.segments) : end] = torch.tensor(record.segments)
    return experience.with_fields(token_mask=experience.token_mask & (turns >= 0), segment_ids=turns)


def demonstrations(session: Session, config: RLConfig, at: TrainProgress) -> Experience:
    """Read this data rank's next demonstrations, ordered by update."""
    first, groups = at.next("examples"), session.engine.groups
    positions = [first + position for position in local_shares(config.experts, config.updates, groups)]
    examples = session.data.read(session.data.examples, positions)
    samples = rows_of(session, "examples", examples)
    ids = torch.tensor([_EXPERTS + position for position in positions])
    return Experience.of(samples).with_fields(sample_ids=ids, expert_mask=torch.ones(len(positions), dtype=torch.bool))


def _ids(values: Sequence[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)


def _read(records: Records[Rollout], first: int, count: int) -> list[Rollout]:
    check_cut(records, first % len(records), count)
    return [records[place % len(records)] for place in range(first, first + count)]


def rl_step(session: Session, config: RLConfig, at: TrainProgress) -> StepMetrics:
    """Make `updates` optimizer steps on fresh samples or on the next recorded rollouts."""
    policy, step = session.policy, at.step
    if session.served is not None:
        ask_ahead(session, config, at)
    experience, reward = (recorded_experience if session.data.rollouts else sampled_experience)(session, config, at)
    metrics: StepMetrics = {} if reward is None else {"reward": reward, **session.failures.metrics()}
    experience, sizes = policy.balance(experience, config.updates)
    experience, kl = _with_advantages(session, config, experience)
    metrics |= kl
    if session.served is not None:
        metrics |= check_mismatch(session, config, experience, at)
        experience, staleness = mask_stale(session, config, experience)
        metrics |= staleness
    parts = experience.split(sizes)
    done = step * config.updates
    if config.critic is not None:
        critic = session.critic
        assert critic is not None
        results = [critic.update(critic.batches(part), done + index) for index, part in enumerate(parts)]
        metrics |= {f"critic_{name}": value for name, value in combine_updates(results).items() if name != "tokens"}
        if step < config.critic.warmup_steps:
            return {**metrics, "tokens": combine_updates(results)["tokens"]}
    if config.experts:  # the policy only: a critic would read their returns as 0
        experts, sizes = policy.balance(demonstrations(session, config, at), config.updates, beside=parts)
        pairs = zip(parts, experts.split(sizes), strict=True)
        parts = [Experience.concat([part, beside], fill=True) for part, beside in pairs]
    if OBSERVED in config.loss.requirements.names:
        parts = [part.with_fields(**{OBSERVED: part.attention_mask & ~part.token_mask.bool()}) for part in parts]
    results = []
    for index, part in enumerate(parts):
        batches = policy.batches(part)
        if "teacher_logits" in config.loss.requirements.names:
            assert session.teacher is not None
            batches = with_teacher_logits(policy.engine, session.teacher, batches)
        results.append(policy.update(batches, done + index))
    if session.kl_controller is not None and "reward_kl" in kl:
        session.kl_controller.update(kl["reward_kl"], config.prompts * config.group_size)
    return {**combine_updates(results), **metrics}


def _with_advantages(session: Session, config: RLConfig, experience: Experience) -> tuple[Experience, StepMetrics]:
    """Add log-probs, shaped rewards and advantages (recorded ones stay); return metrics of the KLs."""
    groups, controller, kl = session.engine.groups, session.kl_controller, StepMetrics()
    experience = experience.with_fields(**ask_models(experience, _models(session, config), config.reward_kl))
    if "teacher_token_logprobs" in config.advantages.needs:
        kl |= _teacher_metrics(session, experience)
    raw = experience.rewards
    if raw is None:
        return experience, kl
    last = experience.input_ids.gather(1, experience.lengths[:, None] - 1)[:, 0]
    ends = torch.tensor(sorted(session.tokenizer.vocabulary.ends))
    experience = replace(experience, truncated=torch.isin(last, ends, invert=True))
    experience = replace(experience, rewards=shape_rewards(experience, raw, RewardShaping(overlong=config.overlong))[0])
    if controller is not None:
        assert experience.kl is not None and experience.sample_mask is not None
        valid = experience.token_mask & experience.sample_mask[:, None]
        mean = mean_over_ranks(experience.kl[valid], groups.data, session.engine.device)
        kl |= {"kl_coefficient": controller.value}
        kl |= {} if math.isnan(mean) else {"reward_kl": mean}  # undefined if every sample is masked
    estimates = compute_advantages(experience.data(), config.advantages, groups, controller)
    return replace(experience, advantages=estimates.advantages, returns=estimates.returns), kl


def _models(session: Session, config: RLConfig) -> Models:
    policy, sampling, needs = session.policy, session.engine.config.sampling, {*config.advantages.needs}

    def log_probs(model: torch.nn.Module | None, rule: Truncation = KEEP_ALL) -> Callable[[Experience], Tensor]:
        return lambda samples: policy.log_probs(samples, model, temperature=sampling.temperature, truncation=rule)

    untruncated, others = log_probs(None), {}
    if session.teacher is not None and "teacher_token_logprobs" in {*needs, *config.loss.requirements.names}:
        others["teacher_token_logprobs"] = log_probs(session.teacher)
    if "sum_pi_squared" in needs:

        @lru_cache(maxsize=1)  # one pass gives both scores of the untruncated policy
        def scores(samples: Experience) -> tuple[Tensor, Tensor]:
            return policy.log_probs_and_squares(samples, temperature=sampling.temperature)

        untruncated, others["sum_pi_squared"] = (
            (lambda samples: scores(samples)[0]),
            (lambda samples: scores(samples)[1]),
        )
    sampled = log_probs(None, sampling.truncation) if sampling.truncation else untruncated
    return Models(
        policy_logprobs=sampled if config.recomputes_prev_logprobs else None,
        untruncated_logprobs=untruncated if sampling.truncation and needs & {"prev_logprobs", "kl"} else None,
        reference_logprobs=None if session.reference is None else log_probs(session.reference),
        values=None if session.critic is None else session.critic.values,
        others=others,
    )


def _teacher_metrics(session: Session, experience: Experience) -> StepMetrics:
    """Measure the mean log-ratio of policy and teacher on sampled tokens (reverse KL), and its mean size."""
    fields, valid = experience.data(), experience.token_mask.bool()
    valid = valid if experience.sample_mask is None else valid & experience.sample_mask.bool()[:, None]
    ratio = (fields.get("untruncated_logprobs", fields["prev_logprobs"]) - fields["teacher_token_logprobs"])[valid]
    group, device = session.engine.groups.data, session.engine.device
    means = (mean_over_ranks(x, group, device) for x in (ratio, ratio.abs()))
    return dict(zip(("teacher_kl", "teacher_abs_log_ratio"), means, strict=True))
