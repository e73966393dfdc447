"""Fresh samples of an RL step, drawn again where dynamic sampling asks for it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from parallel_rl.groups import mean_over_ranks, sum_over_ranks
from parallel_rl.megatron import is_last_stage
from parallel_rl.training.algorithms.rewards import completion_rewards
from parallel_rl.training.batching.micro_batches import Rows, join, local_shares
from parallel_rl.training.config.algorithms import RLConfig
from parallel_rl.training.data.examples import Prompt, Rollout, write_rollouts
from parallel_rl.training.models.engine import Engine
from parallel_rl.training.progress import TrainProgress
from parallel_rl.training.rollouts.sampler import sample
from parallel_rl.training.session import Session


def sampled_rows(session: Session, config: RLConfig, at: TrainProgress) -> tuple[Rows, float]:
    """This data rank's samples of the next prompts with their rewards, each update's part in order.

    With dynamic sampling the places of prompts that teach nothing are given to others, round after round.

    Returns:
        the rows, and the mean reward of the first round, which is the policy's.

    Raises:
        ValueError: places without a prompt that teaches something after the last round, unless they are to be masked.
    """
    engine = session.engine
    # A group stays on one data rank, and each update has the same prompts in every layout.
    places = [at.next("train") + place for place in local_shares(config.prompts, config.updates, engine.groups)]
    size, keep = config.group_size, config.dynamic_sampling
    rows = _draw(session, config, at.step, places)
    reward = mean_over_ranks(rows.fields["rewards"], engine.groups.data, engine.device)
    for number in range(1, config.rounds + 1):
        assert keep is not None or config.rounds == 1
        means = rows.fields["rewards"].view(len(places), size).double().mean(1)
        missing = [] if keep is None else (~((keep.low < means) & (means < keep.high))).nonzero()[:, 0].tolist()
        left = sum_over_ranks(len(missing), engine.groups.data, engine.device)
        if not left:
            break
        if number < config.rounds:
            others = [places[index] + number * config.prompts for index in missing]
            again = _draw(session, config, at.step, others)
            fresh = {place: len(rows) // size + index for index, place in enumerate(missing)}
            groups = [fresh.get(index, index) for index in range(len(places))]
            rows = join(rows, again).take([group * size + index for group in groups for index in range(size)])
        elif keep is not None and keep.exhausted == "error":
            raise ValueError(
                f"{left} of rl.prompts = {config.prompts} places have no prompt with {keep.low} < mean reward < {keep.high} "
                f"after rl.dynamic_sampling.max_rounds = {config.rounds} rounds; raise it, or set exhausted: mask"
            )
        else:
            mask = torch.ones(len(places), dtype=rows.fields["sample_mask"].dtype)
            mask[missing] = 0
            rows = rows.with_fields(sample_mask=mask.repeat_interleave(size))
    if config.record:
        _record(engine, rows, at.step)
    return rows, reward


def asked(session: Session, config: RLConfig, places: Sequence[int]) -> tuple[list[Prompt], list[int]]:
    """The prompt of each sample for these places of the stream, `group_size` times each, and the samples' ids."""
    size, data = config.group_size, session.data
    chosen = [prompt for prompt in data.read(data.train, places) for _ in range(size)]
    return chosen, [place * size + index for place in places for index in range(size)]


def _draw(session: Session, config: RLConfig, step: int, places: Sequence[int]) -> Rows:
    """`group_size` completions of the prompt at each place of the stream, with their rewards; none for no places."""
    engine, size = session.engine, config.group_size
    chosen, ids = asked(session, config, places)
    settings, seed = engine.config.sampling, 2 * engine.config.run.seed
    tokens, versions = [prompt.tokens for prompt in chosen], None
    if session.served is None:
        drawn = sample(engine, tokens, ids, seed, settings)
    else:
        drawn, versions = session.served.take(tokens, ids)
    column = torch.arange(drawn.tokens.shape[1])
    mask = (column >= drawn.prompt_lengths[:, None]) & (column < drawn.lengths[:, None])
    fields = {
        "input_ids": drawn.tokens,
        "token_mask": mask.to(engine.float_dtype),
        "sample_mask": torch.ones(len(ids), dtype=engine.float_dtype),
        "generation_logprobs": drawn.logprobs,
        "rewards": completion_rewards(session, chosen, drawn.completions()).to(engine.float_dtype),
        "group_ids": torch.tensor(places, dtype=torch.int64),
        "sample_ids": torch.tensor(ids, dtype=torch.int64),
    }
    fields["group_ids"] = fields["group_ids"].repeat_interleave(size)
    if versions is not None:
        fields["staleness"] = config.policy_version(step) - versions
    if "greedy_rewards" in config.advantages.needs:
        greedy = sample(engine, tokens[::size], places, seed, settings, greedy=True)
        rewards = completion_rewards(session, chosen[::size], greedy.completions())
        fields["greedy_rewards"] = rewards.to(engine.float_dtype).repeat_interleave(size)
    return Rows(fields, drawn.lengths)


def _record(engine: Engine, rows: Rows, step: int) -> None:
    """One file a step and data rank, so that a step that is done again after a resume replaces its own."""
    where, fields = engine.groups, rows.fields
    if where.tp_rank or where.cp_rank or not is_last_stage():
        return
    ends = rows.lengths.tolist()
    starts = (rows.lengths - fields["token_mask"].sum(1).long()).tolist()
    columns = [fields[name].tolist() for name in ("input_ids", "generation_logprobs", "group_ids", "rewards")]
    columns.append(fields["staleness"].tolist() if "staleness" in fields else [None] * len(rows))
    rollouts = [
        Rollout(tuple(tokens[:end]), tuple(round(x, 12) for x in logprobs[start:end]), group, reward, None, staleness)
        for start, end, tokens, logprobs, group, reward, staleness in zip(starts, ends, *columns, strict=True)
    ]
    write_rollouts(Path(engine.config.run.dir) / "rollouts" / f"step_{step + 1:06d}_{where.dp_rank}.jsonl", rollouts)
