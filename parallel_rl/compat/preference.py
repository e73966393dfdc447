"""Losses of pairs and of labelled responses in both LightRFT and OpenRLHF."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import pad

from parallel_rl.compat.dense import Count, as_count, row_mean
from parallel_rl.functional.kl import straight_through
from parallel_rl.functional.preference import dpo, ipo, kto_desirable, kto_undesirable, log_exp, log_sigmoid
from parallel_rl.groups import ParallelGroups, group_rank
from parallel_rl.statistics import Statistics

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def pairs(seqs: Count | None) -> Count | None:
    return None if seqs is None else as_count(seqs) / 2


class PairWiseLoss(nn.Module):
    """Bradley-Terry loss of a reward model, −log σ(r_chosen − r_rejected − margin), a mean; 0 of none."""

    def forward(
        self,
        chosen_reward: Tensor,
        reject_reward: Tensor,
        margin: Tensor | float | None = None,
        *,
        global_valid_seqs: Count | None = None,
        context_parallel_group: ProcessGroup | None = None,
    ) -> Tensor:
        """Return the loss; with `global_valid_seqs` (both rows of each pair count) the local loss.

        chosen_reward, reject_reward: any shape, whole on every context rank. margin: broadcast.
        """
        losses = log_sigmoid(chosen_reward, reject_reward, 0.0 if margin is None else margin)
        return row_mean(losses, pairs(global_valid_seqs), context_parallel_group)


class LogExpLoss(nn.Module):
    """log(1 + exp(r_rejected − r_chosen)), a mean over all; 0 of none. The margin has no effect.

    It stays finite where the origin overflows (Q21: beyond 88 in float32). Paper: arXiv 2204.05862.
    """

    def forward(
        self,
        chosen_reward: Tensor,
        reject_reward: Tensor,
        margin: Tensor | float | None = None,
        *,
        global_valid_seqs: Count | None = None,
        context_parallel_group: ProcessGroup | None = None,
    ) -> Tensor:
        """Return the loss; with `global_valid_seqs` (both rows of each pair count) the local loss."""
        return row_mean(log_exp(chosen_reward, reject_reward), pairs(global_valid_seqs), context_parallel_group)


class DPOLoss(nn.Module):
    """DPO, cDPO with `label_smoothing`, or IPO, a mean over pairs; 0 of none.

    IPO takes the caller's sums of log-probs, where its authors take means over tokens (Q17: the library's `DPOLossFn` has
    both), and ignores label_smoothing. Papers: arXiv 2305.18290; ericmitchell.ai/cdpo.pdf; 2310.12036.
    """

    def __init__(self, beta: float, label_smoothing: float = 0.0, ipo: bool = False) -> None:
        super().__init__()
        self.beta, self.label_smoothing, self.ipo = beta, label_smoothing, ipo

    def forward(
        self,
        policy_chosen_logps: Tensor,
        policy_rejected_logps: Tensor,
        reference_chosen_logps: Tensor,
        reference_rejected_logps: Tensor,
        *,
        global_valid_seqs: Count | None = None,
        context_parallel_group: ProcessGroup | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return (loss, chosen_rewards, rejected_rewards); with `global_valid_seqs` the local loss.

        Args: four [P] log-probs of responses, whole on every context rank. global_valid_seqs: both rows of each pair.
        """
        # in the origin's order, for the same rounding of large log-probs
        policy, reference = (
            policy_chosen_logps - policy_rejected_logps,
            reference_chosen_logps - reference_rejected_logps,
        )
        losses = (
            ipo(policy, reference, self.beta) if self.ipo else dpo(policy, reference, self.beta, self.label_smoothing)
        )
        loss = row_mean(losses, pairs(global_valid_seqs), context_parallel_group)
        chosen_rewards = self.beta * (policy_chosen_logps - reference_chosen_logps).detach()
        return loss, chosen_rewards, self.beta * (policy_rejected_logps - reference_rejected_logps).detach()


class VanillaKTOLoss(nn.Module):
    """KTO with the baseline max(0, mean log-ratio) of the opposite class, a mean over both; 0 of none.

    The baselines carry a gradient (Q19: constant in the paper and the library's `KTOLossFn`). Paper: arXiv 2402.01306.
    """

    def __init__(self, beta: float) -> None:
        super().__init__()
        self.beta = beta

    def forward(
        self,
        policy_chosen_logps: Tensor,
        policy_rejected_logps: Tensor,
        reference_chosen_logps: Tensor,
        reference_rejected_logps: Tensor,
        *,
        data_parallel_group: ProcessGroup | None = None,
        context_parallel_group: ProcessGroup | None = None,
        statistics: Statistics | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return (loss, chosen_rewards, rejected_rewards) from [n_c] and [n_r] log-probs of responses.

        All are whole on every context rank. The loss is local with `data_parallel_group`, if every rank has its whole step in
        this call, or with `statistics`, the reduced result of `collect`.
        """
        log_ratios = (policy_chosen_logps - reference_chosen_logps, policy_rejected_logps - reference_rejected_logps)
        if statistics is None:
            logps = (policy_chosen_logps, policy_rejected_logps, reference_chosen_logps, reference_rejected_logps)
            statistics = self.collect(*logps).reduce(ParallelGroups(data=data_parallel_group))
        of_step = [statistics.samples[side].to(log_ratios[0]) for side in ("chosen", "rejected")]
        valid = [~ratios.isnan() for ratios in of_step]
        # the step's mean, with the gradient of this rank's ratios
        means = [
            straight_through(ratios.nansum(), local.sum()) / mask.sum().clamp(min=1)
            for ratios, local, mask in zip(of_step, log_ratios, valid, strict=True)
        ]
        chosen_kl, rejected_kl = (mean.clamp(min=0) for mean in means)
        all_good, all_bad = (torch.ones_like(ratios, dtype=torch.bool) for ratios in log_ratios)
        direct = self._sum(log_ratios[0], log_ratios[1], all_good, all_bad, chosen_kl.detach(), rejected_kl.detach())
        through_means = self._sum(of_step[0], of_step[1], valid[0], valid[1], chosen_kl, rejected_kl)
        count = (valid[0].sum() + valid[1].sum()).clamp(min=1)
        loss = row_mean(straight_through(direct, direct + through_means), count, context_parallel_group)
        return loss, self.beta * log_ratios[0].detach(), self.beta * log_ratios[1].detach()

    @torch.no_grad()
    def collect(
        self,
        policy_chosen_logps: Tensor,
        policy_rejected_logps: Tensor,
        reference_chosen_logps: Tensor,
        reference_rejected_logps: Tensor,
        *,
        context_parallel_group: ProcessGroup | None = None,
    ) -> Statistics:
        """Collect this rank's log-ratios of the step; `+` joins micro-batches, then `reduce`."""
        ratios = (policy_chosen_logps - reference_chosen_logps, policy_rejected_logps - reference_rejected_logps)
        rows = max(map(len, ratios))
        counts = group_rank(context_parallel_group) == 0
        samples = [pad(side if counts else side * torch.nan, (0, rows - len(side)), value=torch.nan) for side in ratios]
        return Statistics({}, dict(zip(("chosen", "rejected"), samples, strict=True)))

    def _sum(
        self, chosen: Tensor, rejected: Tensor, good: Tensor, bad: Tensor, chosen_kl: Tensor, rejected_kl: Tensor
    ) -> Tensor:
        """Sum the losses of both classes over the responses that `good` and `bad` mark."""
        desirable = kto_desirable(torch.where(good, chosen, 0), rejected_kl, self.beta)
        undesirable = kto_undesirable(torch.where(bad, rejected, 0), chosen_kl, self.beta)
        return torch.where(good, desirable, 0).sum() + torch.where(bad, undesirable, 0).sum()


class KTOLoss(nn.Module):
    """KTO of desirable and undesirable responses in any numbers, a mean over both; 0 of none.

    The baseline z₀ = max(0, mean log-ratio of the KL samples) is a constant. With `statistics` or `data_parallel_group` both
    means are over the whole step. Otherwise, as in the origin (Q18), z₀ is the mean of the default group's rank means, whatever
    their sizes, and the loss a mean over this rank's rows; a rank without KL samples counts as 0 (the origin: NaN everywhere).
    Paper: arXiv 2402.01306.
    """

    def __init__(
        self, beta: float, desirable_weight: float, undesirable_weight: float, world_size: int, device: torch.device
    ) -> None:
        super().__init__()
        self.beta, self.world_size, self.device = beta, world_size, device
        self.desirable_weight, self.undesirable_weight = desirable_weight, undesirable_weight

    def forward(
        self,
        policy_chosen_logps: Tensor,
        policy_rejected_logps: Tensor,
        policy_KL_logps: Tensor,
        reference_chosen_logps: Tensor,
        reference_rejected_logps: Tensor,
        reference_KL_logps: Tensor,
        *,
        data_parallel_group: ProcessGroup | None = None,
        context_parallel_group: ProcessGroup | None = None,
        statistics: Statistics | None = None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return (loss, chosen_rewards, rejected_rewards, KL); as `VanillaKTOLoss`, with [n_k] for the KL."""
        chosen, rejected = (
            policy_chosen_logps - reference_chosen_logps,
            policy_rejected_logps - reference_rejected_logps,
        )
        kl_ratios, count = (policy_KL_logps - reference_KL_logps).detach(), None
        if data_parallel_group is not None and statistics is None:
            statistics = self._collected(len(chosen) + len(rejected), kl_ratios).reduce(
                ParallelGroups(data=data_parallel_group)
            )
        if statistics is not None:
            kl = (statistics["kl_sum"] / statistics["kl_rows"].clamp(min=1)).to(kl_ratios)
            count = statistics["rows"].clamp(min=1)
        else:
            kl = row_mean(kl_ratios)
            if dist.is_available() and dist.is_initialized():
                dist.all_reduce(kl)
                kl = kl / self.world_size
        kl = kl.clamp(min=0)
        losses = torch.cat(
            [
                self.desirable_weight * kto_desirable(chosen, kl, self.beta),
                self.undesirable_weight * kto_undesirable(rejected, kl, self.beta),
            ]
        )
        loss = row_mean(losses, count, context_parallel_group)
        return loss, self.beta * chosen.detach(), self.beta * rejected.detach(), kl

    @torch.no_grad()
    def collect(
        self,
        policy_chosen_logps: Tensor,
        policy_rejected_logps: Tensor,
        policy_KL_logps: Tensor,
        reference_chosen_logps: Tensor,
        reference_rejected_logps: Tensor,
        reference_KL_logps: Tensor,
        *,
        context_parallel_group: ProcessGroup | None = None,
    ) -> Statistics:
        """Collect this rank's part of the step's statistics; `+` joins micro-batches, then `reduce`."""
        rows, ratios = len(policy_chosen_logps) + len(policy_rejected_logps), policy_KL_logps - reference_KL_logps
        return self._collected(rows, ratios, counts=group_rank(context_parallel_group) == 0)

    def _collected(self, rows: int, kl_ratios: Tensor, counts: bool = True) -> Statistics:
        sums: dict[str, Count] = {"rows": rows, "kl_rows": len(kl_ratios), "kl_sum": kl_ratios.sum(dtype=torch.float64)}
        return Statistics({name: as_count(value, kl_ratios.device) * counts for name, value in sums.items()})
