"""Fresh samples of an RL step with their rewards, from the trainer's own sampler or requested ahead from servers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from parallel_rl.experience import Experience, Samples, draw_groups
from parallel_rl.experience.failures import without_failed_logprobs, without_lone
from parallel_rl.groups import max_over_ranks, mean_over_ranks, sum_over_ranks
from parallel_rl.megatron import is_last_stage
from parallel_rl.training.algorithms.rewards import completion_rewards
from parallel_rl.training.batching.micro_batches import local_shares, with_user_fields
from parallel_rl.training.config.algorithms import RLConfig
from parallel_rl.training.data.examples import Prompt, Rollout, write_rollouts
from parallel_rl.training.models.engine import Engine
from parallel_rl.training.models.train_step import StepMetrics
from parallel_rl.training.rollouts.sampler import sample
from parallel_rl.training.rollouts.sharing import Sharing
from parallel_rl.training.session import Session, TrainProgress


def sampled_experience(session: Session, config: RLConfig, at: TrainProgress) -> tuple[Experience, float]:
    """Sample the next prompts of this data rank, ordered by update, with raw rewards and their mean.

    With dynamic sampling, later prompts replace dropped ones. ValueErrors of `draw_groups`.
    """
    engine = session.engine
    # a group stays on one data rank, and each update has the same prompts in every layout
    positions = [at.next("train") + index for index in local_shares(config.prompts, config.updates, engine.groups)]

    def draw(missing: Sequence[int], number: int) -> tuple[Samples, Tensor]:
        return _draw(session, config, at.step, [positions[index] + number * config.prompts for index in missing])

    drawn = draw_groups(draw, len(positions), config.group_size, config.dynamic_sampling, engine.groups)
    scored, first = ~drawn.rewards.isnan(), drawn.first_rewards
    experience = replace(
        Experience.of(drawn.samples), rewards=drawn.rewards.nan_to_num(0.0), sample_mask=drawn.keep & scored
    )
    if config.record:
        _record(engine, experience, at.step)
    return experience, mean_over_ranks(first[~first.isnan()], engine.groups.data, engine.device)


def prompts_and_ids(session: Session, config: RLConfig, positions: Sequence[int]) -> tuple[list[Prompt], list[int]]:
    """Return the prompt and the id of each of `group_size` samples at these positions of the stream."""
    size, data = config.group_size, session.data
    repeated = [prompt for prompt in data.read(data.train, positions) for _ in range(size)]
    return repeated, [position * size + index for position in positions for index in range(size)]


def _draw(session: Session, config: RLConfig, step: int, positions: Sequence[int]) -> tuple[Samples, Tensor]:
    """Draw and score `group_size` completions of the prompt at each position; failed rewards are NaN."""
    engine, size = session.engine, config.group_size
    prompts, ids = prompts_and_ids(session, config, positions)
    settings, seed = engine.config.sampling, 2 * engine.config.run.seed
    tokens, others = [prompt.tokens for prompt in prompts], dict[str, Tensor]()
    if session.served is None:
        samples = sample(engine, tokens, ids, seed, settings)
    else:
        samples, versions, servers, fault = session.served.take(tokens, ids)
        if fault is not None:
            session.failures.report("logprobs", fault)
        others |= {"staleness": config.policy_version(step) - versions, "servers": servers}
    samples, lost = without_failed_logprobs(samples)
    if session.served is None and Sharing(engine).asks:
        session.failures.report_logprobs("the trainer's sampler", lost, ids)
    fields = engine.config.reward_fields
    scores, late, field_values = completion_rewards(session, prompts, samples.responses(), fields)
    rewards = scores.to(engine.float_dtype)
    tensors = with_user_fields(
        samples, field_values, fields, [len(prompt) for prompt in tokens], engine.float_dtype
    ).tensors()
    for field in fields:
        others[field.name] = Sharing(engine).spread(tensors[field.name], tuple(tensors[field.name].shape))
    if "greedy_rewards" in config.advantages.needs:
        if session.served is None:
            greedy = sample(engine, tokens[::size], positions, seed, settings, greedy=True)
        else:
            greedy, *_, fault = session.served.draw(tokens[::size], positions, seed, greedy=True)
            session.failures.report_unread(fault)
        scores, greedy_late, _ = completion_rewards(session, prompts[::size], greedy.responses())
        of_greedy = scores.to(engine.float_dtype).repeat_interleave(size)
        late = late | greedy_late.repeat_interleave(size)
        rewards[of_greedy.isnan()] = torch.nan
        others["greedy_rewards"] = of_greedy.nan_to_num(0.0)
    failed = {"logprobs": lost, "reward": rewards.isnan() & ~lost & ~late, "timeout": late & ~lost}
    session.failures.count(len(samples), failed, engine.groups.data, engine.replica_groups)
    rewards[lost] = torch.nan
    rewards = without_lone(rewards, size) if config.advantages.grouped else rewards
    groups = torch.tensor(positions, dtype=torch.int64).repeat_interleave(size)
    return samples.with_fields(group_ids=groups, sample_ids=torch.tensor(ids, dtype=torch.int64), **others), rewards


def _record(engine: Engine, experience: Experience, step: int) -> None:
    """Write one file per step and data rank; a step repeated after a resume replaces its own."""
    where, fields = engine.groups, experience.tensors()
    if where.tp_rank or where.cp_rank or not is_last_stage():
        return
    ends, starts = experience.lengths.tolist(), (experience.lengths - experience.response_lengths).tolist()
    columns = [fields[name].tolist() for name in ("input_ids", "generation_logprobs", "group_ids", "rewards")]
    columns.append(fields["staleness"].tolist() if "staleness" in fields else [None] * len(experience))
    columns.append([None if kept else 0 for kept in fields["sample_mask"].tolist()])
    declared = engine.config.reward_fields
    values = (
        zip(*(fields[field.name].tolist() for field in declared), strict=True) if declared else [()] * len(experience)
    )
    rollouts = [
        Rollout(
            tuple(tokens[:end]),
            tuple(round(x, 12) for x in logprobs[start:end]),
            group,
            reward,
            None,
            staleness,
            user_values=tuple(tuple(value[start:end]) if isinstance(value, list) else value for value in row),
            sample_mask=keep,
        )
        for start, end, tokens, logprobs, group, reward, staleness, keep, row in zip(
            starts, ends, *columns, values, strict=True
        )
    ]
    path = Path(engine.config.run.dir) / "rollouts" / f"step_{step + 1:06d}_{where.dp_rank}.jsonl"
    write_rollouts(path, rollouts, declared)


def ask_ahead(session: Session, config: RLConfig, at: TrainProgress) -> None:
    """Send the weights if due, then request samples for this step and `ahead` more; ValueError if refused."""
    served, server, step = session.served, config.server, at.step
    assert served is not None and server is not None
    if step % server.update_every == 0 or not served.updated:
        served.bring(config.policy_version(step))
    positions, wanted = local_shares(config.prompts, config.updates, session.engine.groups), []
    for later in range(min(server.ahead + 1, config.steps - step)):
        first = at.next("train") + later * config.rounds * config.prompts
        prompts, ids = prompts_and_ids(session, config, [first + position for position in positions])
        served.request([prompt.tokens for prompt in prompts], ids)
        wanted += ids
    served.forget(set(wanted))


def mask_stale(session: Session, config: RLConfig, experience: Experience) -> tuple[Experience, StepMetrics]:
    """Mask samples of a policy too far away; return the metrics of staleness over all samples.

    Call it after the advantages, so that stale samples still count in the means of their groups. ValueError if none is left.
    """
    staleness, group, device = experience.others["staleness"], session.engine.groups.data, session.engine.device
    assert config.server is not None and experience.sample_mask is not None
    metrics: StepMetrics = {
        "staleness_mean": mean_over_ranks(staleness, group, device),
        "staleness_max": float(max_over_ranks(int(staleness.abs().max()) if len(experience) else 0, group, device)),
    }
    most = config.server.max_staleness
    if most is None:
        return experience, metrics
    fresh = staleness.abs() <= most
    if not sum_over_ranks(int(fresh.sum()), group, device):
        raise ValueError(
            f"all samples of the step are further than rl.server.max_staleness = {most} optimizer steps from the policy (mean "
            f"{metrics['staleness_mean']:g}); raise it, or see that the servers get new weights (rl.server.update)"
        )
    experience = replace(experience, sample_mask=experience.sample_mask & fresh)
    return experience, {**metrics, "stale": mean_over_ranks((~fresh).double(), group, device)}
