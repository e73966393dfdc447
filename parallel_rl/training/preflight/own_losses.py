"""Check a run's losses, as the trainer builds them, on the run's own layout and groups."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch.distributed as dist
from megatron.core import parallel_state

from parallel_rl.groups import ParallelGroups, current_device
from parallel_rl.losses.choice import LossConfig
from parallel_rl.losses.prm import PRMLossFn
from parallel_rl.testing import hidden_states
from parallel_rl.testing.alone import check_alone, trial_of
from parallel_rl.testing.batches import PLACEHOLDER, REWARD_IDS
from parallel_rl.testing.check import batch_for, check_subject
from parallel_rl.testing.layouts import Layout, Rank
from parallel_rl.testing.runners import JobRunner
from parallel_rl.testing.subjects import Given
from parallel_rl.training.algorithms.phases import phases
from parallel_rl.training.config.sections import SamplingConfig, data_parallel_size
from parallel_rl.training.config.train import TrainConfig

_TOLERANCE = 1e-9


def own_loss(config: TrainConfig) -> Given:
    """Return the loss of the main phase with its options, temperature and truncation."""
    return own_losses(config)[0]


def own_losses(config: TrainConfig) -> list[Given]:
    """Return the losses of all phases, the main one first, and the critic's, on the kit's vocabulary."""
    main, *others = reversed(phases(config))
    losses = [_built(main.loss, config.sampling if config.rl is not None else None)]
    losses += [_built(phase.loss) for phase in others]
    if config.rl is not None and config.rl.critic is not None:
        losses.append(_built(config.rl.critic.loss))
    return losses


def _built(chosen: LossConfig, sampling: SamplingConfig | None = None) -> Given:
    if sampling is None:
        loss = chosen.build()
    else:
        loss = chosen.build(temperature=sampling.temperature, truncation=sampling.truncation)
    if isinstance(loss, PRMLossFn):
        loss.config = replace(loss.config, placeholder_token_id=PLACEHOLDER, reward_token_ids=tuple(REWARD_IDS))
    return Given(loss)


def check_losses(config: TrainConfig) -> list[str]:
    """Compare the run's losses with one process, on Megatron's current groups; return their names.

    Compares loss, gradient and metrics on rows of the run's kind (padded, packed, prefix trees), in one and in three
    micro-batches, from logits and, with `model.fused_head`, from hidden states. RuntimeError on all ranks if a loss
    breaks the law, with the diagnosis.
    """
    sizes, groups = config.parallel, ParallelGroups.from_megatron()
    data = data_parallel_size(sizes, dist.get_world_size())
    kind = "tree" if config.batch.share_prefixes else "packed+padding"
    packing = kind if config.batch.packing else "padded"
    layouts = [Layout(sizes.tensor, sizes.context, data, packing, number, "zigzag") for number in (1, 3)]
    rank = Rank(groups, (groups.tp_rank, groups.cp_rank, groups.dp_rank), current_device())
    runner = JobRunner(lambda layout: rank)
    names = []
    for subject in own_losses(config):
        report = check_subject(subject, {layouts[0].world: layouts}, runner)
        if not report.ok:
            raise RuntimeError(f"the loss of this run must not train on this layout: {report}")
        if config.model.fused_head and hidden_states.takes_head(subject):
            _check_fused(subject, layouts, rank, sizes.pipeline)
        names.append(subject.name)
    return names


def _check_fused(subject: Given, layouts: Sequence[Layout], rank: Rank, stages: int) -> None:
    batch = batch_for(subject, {layouts[0].world: layouts})
    trial = trial_of(subject, batch, check_alone(0, subject, batch))
    for variant, layout in enumerate(layouts):
        outcome = hidden_states.run_layout(layout, trial, rank, variant)
        weight = outcome.weight.to(rank.device)
        dist.all_reduce(weight)
        outcomes = [outcome] * dist.get_world_size()
        dist.all_gather_object(outcomes, outcome)
        mine = parallel_state.get_pipeline_model_parallel_rank()
        stages_of = [mine] * dist.get_world_size()
        dist.all_gather_object(stages_of, mine)
        of_stage = [(result, weight.cpu() / stages) for result, at in zip(outcomes, stages_of, strict=True) if at == 0]
        wrong = hidden_states.faults(batch, trial.want, {layout.name: of_stage}, _TOLERANCE)
        if wrong:
            raise RuntimeError(
                f"{subject.name} from hidden states (model.fused_head) breaks the law: {'; '.join(sorted(set(wrong)))}"
            )
