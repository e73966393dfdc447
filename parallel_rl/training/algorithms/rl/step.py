"""One step of RL: samples, log-probs and values, advantages, and the optimizer steps."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache

import torch
from torch import Tensor

from parallel_rl.experience import Experience, Models, RewardShaping, ask_models, compute_advantages, shape_rewards
from parallel_rl.groups import mean_over_ranks
from parallel_rl.training.algorithms.rl.mismatch import check_mismatch
from parallel_rl.training.algorithms.rl.prefetch import ask_ahead, mask_stale
from parallel_rl.training.algorithms.rl.recorded import demonstrations, recorded_experience
from parallel_rl.training.algorithms.rl.sampled import sampled_experience
from parallel_rl.training.config.algorithms import RLConfig
from parallel_rl.training.config.fields import OBSERVED
from parallel_rl.training.models.learner import combine_updates
from parallel_rl.training.models.scoring import with_teacher_logits
from parallel_rl.training.models.train_step import StepMetrics
from parallel_rl.training.progress import TrainProgress
from parallel_rl.training.session import Session
from parallel_rl.vocab.truncation import KEEP_ALL, Truncation


def rl_step(session: Session, config: RLConfig, at: TrainProgress) -> StepMetrics:
    """Make `updates` optimizer steps on fresh samples or on the next recorded rollouts."""
    policy, step = session.policy, at.step
    if session.served is not None:
        ask_ahead(session, config, at)
    made, reward = (recorded_experience if session.data.rollouts else sampled_experience)(session, config, at)
    metrics: StepMetrics = {} if reward is None else {"reward": reward, **session.failures.metrics()}
    made, sizes = policy.balance(made, config.updates)
    made, kl = _with_advantages(session, config, made)
    metrics |= kl
    if session.served is not None:
        metrics |= check_mismatch(session, config, made, at)
        made, staleness = mask_stale(session, config, made)
        metrics |= staleness
    parts = made.split(sizes)
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


def _with_advantages(session: Session, config: RLConfig, made: Experience) -> tuple[Experience, StepMetrics]:
    """Add log-probs, shaped rewards and advantages (recorded ones stay); return metrics of the KLs."""
    groups, controller, kl = session.engine.groups, session.kl_controller, StepMetrics()
    made = made.with_fields(**ask_models(made, _models(session, config), config.reward_kl))
    if "teacher_token_logprobs" in config.advantages.needs:
        kl |= _teacher_metrics(session, made)
    raw = made.rewards
    if raw is None:
        return made, kl
    last = made.input_ids.gather(1, made.lengths[:, None] - 1)[:, 0]
    ends = torch.tensor(sorted(session.tokenizer.vocabulary.ends))
    made = replace(made, truncated=torch.isin(last, ends, invert=True))
    made = replace(made, rewards=shape_rewards(made, raw, RewardShaping(overlong=config.overlong))[0])
    if controller is not None:
        assert made.kl is not None and made.sample_mask is not None
        valid = made.token_mask & made.sample_mask[:, None]
        mean = mean_over_ranks(made.kl[valid], groups.data, session.engine.device)
        kl |= {"kl_coefficient": controller.value}
        kl |= {} if math.isnan(mean) else {"reward_kl": mean}  # undefined if every sample is masked
    estimates = compute_advantages(made.data(), config.advantages, groups, controller)
    return replace(made, advantages=estimates.advantages, returns=estimates.returns), kl


def _models(session: Session, config: RLConfig) -> Models:
    """Choose the models that give the fields of the loss and the estimator."""
    policy, sampling, needs = session.policy, session.engine.config.sampling, {*config.advantages.needs}

    def log_probs(model: torch.nn.Module | None, rule: Truncation = KEEP_ALL) -> Callable[[Experience], Tensor]:
        return lambda made: policy.log_probs(made, model, temperature=sampling.temperature, truncation=rule)

    whole, others = log_probs(None), {}
    if session.teacher is not None and "teacher_token_logprobs" in {*needs, *config.loss.requirements.names}:
        others["teacher_token_logprobs"] = log_probs(session.teacher)
    if "sum_pi_squared" in needs:

        @lru_cache(maxsize=1)  # one pass gives both scores of the untruncated policy
        def scores(made: Experience) -> tuple[Tensor, Tensor]:
            return policy.log_probs_and_squares(made, temperature=sampling.temperature)

        whole, others["sum_pi_squared"] = (lambda made: scores(made)[0]), (lambda made: scores(made)[1])
    own = log_probs(None, sampling.truncation) if sampling.truncation else whole
    return Models(
        policy_logprobs=own if config.recomputes_prev_logprobs else None,
        untruncated_logprobs=whole if sampling.truncation and needs & {"prev_logprobs", "kl"} else None,
        reference_logprobs=None if session.reference is None else log_probs(session.reference),
        values=None if session.critic is None else session.critic.values,
        others=others,
    )


def _teacher_metrics(session: Session, made: Experience) -> StepMetrics:
    """Measure the mean log-ratio of policy and teacher on sampled tokens (reverse KL), and its mean size."""
    fields, valid = made.data(), made.token_mask.bool()
    valid = valid if made.sample_mask is None else valid & made.sample_mask.bool()[:, None]
    ratio = (fields.get("untruncated_logprobs", fields["prev_logprobs"]) - fields["teacher_token_logprobs"])[valid]
    group, device = session.engine.groups.data, session.engine.device
    means = (mean_over_ranks(x, group, device) for x in (ratio, ratio.abs()))
    return dict(zip(("teacher_kl", "teacher_abs_log_ratio"), means, strict=True))
