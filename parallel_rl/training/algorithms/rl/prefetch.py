"""The server side of an RL step: send weights, request samples ahead, mask stale ones."""

from __future__ import annotations

from dataclasses import replace

from parallel_rl.experience import Experience
from parallel_rl.groups import max_over_ranks, mean_over_ranks, sum_over_ranks
from parallel_rl.training.algorithms.rl.sampled import asked
from parallel_rl.training.batching.micro_batches import local_shares
from parallel_rl.training.config.algorithms import RLConfig
from parallel_rl.training.models.train_step import StepMetrics
from parallel_rl.training.progress import TrainProgress
from parallel_rl.training.session import Session


def ask_ahead(session: Session, config: RLConfig, at: TrainProgress) -> None:
    """Send the weights if due, then request the first round of this step and of `ahead` more.

    Raises:
        ValueError: a server did not take the weights.
    """
    served, server, step = session.served, config.server, at.step
    assert served is not None and server is not None
    if step % server.update_every == 0 or not served.updated:
        served.bring(config.policy_version(step))
    positions, wanted = local_shares(config.prompts, config.updates, session.engine.groups), []
    for later in range(min(server.ahead + 1, config.steps - step)):
        first = at.next("train") + later * config.rounds * config.prompts
        prompts, ids = asked(session, config, [first + position for position in positions])
        served.request([prompt.tokens for prompt in prompts], ids)
        wanted += ids
    served.forget(set(wanted))


def mask_stale(session: Session, config: RLConfig, made: Experience) -> tuple[Experience, StepMetrics]:
    """Mask samples of a policy too far away; return the metrics of staleness over all samples.

    Call it after the advantages, so that stale samples still count in the means of their groups. ValueError if none is left.
    """
    staleness, group, device = made.others["staleness"], session.engine.groups.data, session.engine.device
    assert config.server is not None and made.sample_mask is not None
    metrics: StepMetrics = {
        "staleness_mean": mean_over_ranks(staleness, group, device),
        "staleness_max": float(max_over_ranks(int(staleness.abs().max()) if len(made) else 0, group, device)),
    }
    most = config.server.max_staleness
    if most is None:
        return made, metrics
    fresh = staleness.abs() <= most
    if not sum_over_ranks(int(fresh.sum()), group, device):
        raise ValueError(
            f"all samples of the step are further than rl.server.max_staleness = {most} optimizer steps from the policy (mean "
            f"{metrics['staleness_mean']:g}); raise it, or see that the servers get new weights (rl.server.update)"
        )
    made = replace(made, sample_mask=made.sample_mask & fresh)
    return made, {**metrics, "stale": mean_over_ranks((~fresh).double(), group, device)}
