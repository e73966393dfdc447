"""One step of RL: rows, what models say of them, advantages, and the optimizer steps."""

from __future__ import annotations

from parallel_rl.advantages import estimate
from parallel_rl.losses.mix import MixLossFn
from parallel_rl.objectives.kl import kl_estimate
from parallel_rl.training.batching import Rows, join
from parallel_rl.training.drawing import sampled_rows
from parallel_rl.training.objectives import RLConfig
from parallel_rl.training.samples import expert_rows, recorded_rows
from parallel_rl.training.session import Numbers, Session, numbers_of
from parallel_rl.training.tokenizer import EOS


def rl_step(session: Session, config: RLConfig, step: int) -> Numbers:
    """`updates` optimizer steps on fresh samples or on the next recorded rollouts, each on its share of the prompts."""
    loss_fn = session.policy_loss
    assert loss_fn is not None
    rows, reward = (recorded_rows if session.data.rollouts else sampled_rows)(session, config, step)
    rows = _with_advantages(session, config, _scored(session, config, _shaped(config, rows)))
    parts = _parts(rows, config.updates)
    if config.experts:
        rows_of_experts = _parts(expert_rows(session, config, step), config.updates)
        parts = [join(part, experts) for part, experts in zip(parts, rows_of_experts, strict=True)]
    done, total = step * config.updates, config.steps * config.updates
    numbers: Numbers = {} if reward is None else {"reward": reward}
    if config.critic is not None:
        value_loss, optimizer = session.loss(config.critic.loss), config.critic.optimizer
        results = [
            session.update_critic(session.batches(part), value_loss, optimizer, done + index, total)
            for index, part in enumerate(parts)
        ]
        numbers |= {f"critic_{name}": value for name, value in numbers_of(results).items() if name != "tokens"}
        if step < config.critic.warmup_steps:
            return {**numbers, "tokens": numbers_of(results)["tokens"]}
    results = []
    for index, part in enumerate(parts):
        results.append(session.update(session.batches(part), loss_fn, config.optimizer, done + index, total))
        if isinstance(loss_fn, MixLossFn):
            loss_fn.mu_schedule.step()
    return {**numbers_of(results), **numbers}


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
    temperature, read = session.temperature, {*config.loss.reads, *config.advantages.needs}
    if "prev_logprobs" in read or "kl" in read:
        prev = rows.fields["generation_logprobs"]
        if config.prev_logprobs == "recompute":
            prev = session.log_probs(session.engine.model, rows, temperature)
        rows = rows.with_fields(prev_logprobs=prev)
    if session.reference is not None:
        rows = rows.with_fields(reference_policy_logprobs=session.log_probs(session.reference, rows, temperature))
    if session.teacher is not None:
        rows = rows.with_fields(teacher_token_logprobs=session.log_probs(session.teacher, rows, temperature))
    if session.critic is not None:
        rows = rows.with_fields(values=session.values(rows))
    return rows


def _with_advantages(session: Session, config: RLConfig, rows: Rows) -> Rows:
    """With the estimator's advantages, and returns for a critic; recorded advantages stay."""
    fields = rows.fields
    if "advantages" in fields:
        return rows
    batch = dict(fields)
    if config.reward_kl is not None:
        batch["kl"] = kl_estimate(fields["prev_logprobs"], fields["reference_policy_logprobs"], config.reward_kl)
    read = {name: batch[name] for name in (*config.advantages.needs, "sample_mask")}
    found, numbers = estimate(config.advantages, read, session.engine.groups), session.engine.numbers
    rows = rows.with_fields(advantages=found.advantages.to(numbers))
    return rows if session.critic is None else rows.with_fields(returns=found.returns.to(numbers))


def _parts(rows: Rows, updates: int) -> list[Rows]:
    size = len(rows) // updates
    return [rows.take(slice(index * size, (index + 1) * size)) for index in range(updates)]
