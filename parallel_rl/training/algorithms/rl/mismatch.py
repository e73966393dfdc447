"""Mismatch of servers and trainer: log-probs of fresh samples compared with the policy's."""

from __future__ import annotations

import torch
from torch import Tensor

from parallel_rl.experience import Experience
from parallel_rl.groups import group_sum
from parallel_rl.training.config.algorithms import RLConfig
from parallel_rl.training.models.train_step import StepMetrics
from parallel_rl.training.progress import TrainProgress
from parallel_rl.training.session import Session


def check_mismatch(session: Session, config: RLConfig, made: Experience, at: TrainProgress) -> StepMetrics:
    """Return the mean |log ratio| of sampler and policy over valid tokens with staleness 0, if any.

    ValueError on every rank if one server exceeds `max_mismatch`; a mean over all would hide it.
    """
    served, server = session.served, config.server
    assert served is not None and server is not None
    recomputed = config.recomputes_prev_logprobs
    if server.max_mismatch is None or (served.compared and not recomputed):
        return {}
    served.compared = True
    own = _own_logprobs(session, made) if not recomputed else made.prev_logprobs
    assert own is not None
    sums = _sums(session, made, own, len(server.urls))
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


def _own_logprobs(session: Session, made: Experience) -> Tensor:
    sampling = session.engine.config.sampling
    return session.policy.log_probs(made, temperature=sampling.temperature, truncation=sampling.truncation)


def _sums(session: Session, made: Experience, own: Tensor, servers: int) -> Tensor:
    """Sum |log ratio| and tokens per server, unknown ones last: [servers + 1, 2] float64 on the host."""
    assert made.generation_logprobs is not None and made.sample_mask is not None
    fresh = (made.others["staleness"] == 0) & made.sample_mask.bool()
    # −∞ is a token outside the policy's truncation; the loss masks it, too
    valid = made.token_mask.bool() & fresh[:, None] & (own != -torch.inf)
    distance = torch.where(valid, (own.double() - made.generation_logprobs.double()).abs(), 0.0)
    of_samples = torch.stack([distance.sum(1), valid.sum(1).double()], 1)
    place = made.others["servers"] % (servers + 1)  # −1 is the last row
    sums = torch.zeros(servers + 1, 2, dtype=torch.float64).index_add(0, place, of_samples)
    return group_sum(sums.to(session.engine.device), session.engine.groups.data).cpu()
