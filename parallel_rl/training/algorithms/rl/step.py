"""One step of RL: rows, what models say of them, advantages, and the optimizer steps."""

from __future__ import annotations

from dataclasses import replace

from parallel_rl.advantages import estimate
from parallel_rl.functional.kl import kl_estimate
from parallel_rl.groups import mean_over_ranks
from parallel_rl.training.algorithms.rl.prefetch import ask_ahead, mask_stale
from parallel_rl.training.algorithms.rl.recorded import expert_rows, recorded_rows
from parallel_rl.training.algorithms.rl.sampled import sampled_rows
from parallel_rl.training.batching.micro_batches import Rows, join
from parallel_rl.training.config.algorithms import RLConfig
from parallel_rl.training.models.learner import combine_updates
from parallel_rl.training.models.train_step import StepMetrics
from parallel_rl.training.progress import TrainProgress
from parallel_rl.training.session import Session
from parallel_rl.training.tokenizer import EOS


def rl_step(session: Session, config: RLConfig, at: TrainProgress) -> StepMetrics:
    """`updates` optimizer steps on fresh samples or on the next recorded rollouts, each on its share of the prompts."""
    policy, step = session.policy, at.step
    if session.served is not None:
        ask_ahead(session, config, at)
    rows, reward = (recorded_rows if session.data.rollouts else sampled_rows)(session, config, at)
    numbers: StepMetrics = {} if reward is None else {"reward": reward}
    rows, sizes = policy.balance(rows, config.updates)
    rows, kl = _with_advantages(session, config, _scored(session, config, _shaped(config, rows)))
    numbers |= kl
    if session.served is not None:
        rows, staleness = mask_stale(session, config, rows)
        numbers |= staleness
    parts = rows.split(sizes)
    if config.experts:
        experts, sizes = policy.balance(expert_rows(session, config, at), config.updates, beside=parts)
        parts = [join(part, beside) for part, beside in zip(parts, experts.split(sizes), strict=True)]
    done = step * config.updates
    if config.critic is not None:
        critic = session.critic
        assert critic is not None
        results = [critic.update(critic.batches(part), done + index) for index, part in enumerate(parts)]
        numbers |= {f"critic_{name}": value for name, value in combine_updates(results).items() if name != "tokens"}
        if step < config.critic.warmup_steps:
            return {**numbers, "tokens": combine_updates(results)["tokens"]}
    results = []
    for index, part in enumerate(parts):
        results.append(policy.update(policy.batches(part), done + index))
    if session.kl_controller is not None:
        session.kl_controller.update(kl["reward_kl"], config.prompts * config.group_size)
    return {**combine_updates(results), **numbers}


def _shaped(config: RLConfig, rows: Rows) -> Rows:
    """With what the length of a completion makes of its reward."""
    if config.overlong is None:
        return rows
    lengths = rows.fields["token_mask"].sum(1).long()
    last = rows.fields["input_ids"].gather(1, rows.lengths[:, None] - 1)[:, 0]
    rewards = config.overlong(rows.fields["rewards"], lengths, last != EOS)
    return rows.with_fields(rewards=rewards.to(rows.fields["rewards"].dtype))


def _scored(session: Session, config: RLConfig, rows: Rows) -> Rows:
    """With the log-probs and values that the loss or the estimator reads."""
    policy, sampling, needs = session.policy, session.engine.config.sampling, config.advantages.needs
    temperature, truncation, read = sampling.temperature, sampling.truncation, {*config.loss.reads, *needs}
    if "prev_logprobs" in read or "kl" in read:
        prev = rows.fields["generation_logprobs"]
        if config.prev_logprobs == "recompute":
            prev = policy.log_probs(rows, temperature=temperature, truncation=truncation)
        rows = rows.with_fields(prev_logprobs=prev)
    if truncation and ("prev_logprobs" in needs or "kl" in needs):  # compared with models that are not truncated
        rows = rows.with_fields(whole_logprobs=policy.log_probs(rows, temperature=temperature))
    if session.reference is not None:
        rows = rows.with_fields(
            reference_policy_logprobs=policy.log_probs(rows, session.reference, temperature=temperature)
        )
    if session.teacher is not None:
        rows = rows.with_fields(teacher_token_logprobs=policy.log_probs(rows, session.teacher, temperature=temperature))
    if session.critic is not None:
        rows = rows.with_fields(values=session.critic.values(rows))
    return rows


def _with_advantages(session: Session, config: RLConfig, rows: Rows) -> tuple[Rows, StepMetrics]:
    """With the estimator's advantages, and returns for a critic (recorded advantages stay); and what a KL controller reads."""
    fields, controller, numbers = rows.fields, session.kl_controller, session.engine.float_dtype
    if "advantages" in fields:
        return rows, {}
    batch, estimator, kl = dict(fields), config.advantages, StepMetrics()
    if "whole_logprobs" in fields:
        batch["prev_logprobs"] = fields["whole_logprobs"]
    if config.reward_kl is not None:
        batch["kl"] = kl_estimate(batch["prev_logprobs"], fields["reference_policy_logprobs"], config.reward_kl)
    if controller is not None:
        valid = (fields["token_mask"] * fields["sample_mask"][:, None]).bool()
        mean = mean_over_ranks(batch["kl"][valid], session.engine.groups.data, session.engine.device)
        kl = {"reward_kl": mean, "kl_coefficient": controller.value}
        estimator = replace(estimator, kl_coefficient=controller.value)
    read = {name: batch[name] for name in (*estimator.needs, "sample_mask")}
    found = estimate(estimator, read, session.engine.groups)
    rows = rows.with_fields(advantages=found.advantages.to(numbers))
    return (rows if session.critic is None else rows.with_fields(returns=found.returns.to(numbers))), kl
