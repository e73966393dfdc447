"""Losses of preference pairs: Bradley-Terry reward model, and DPO with a supervised term."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from parallel_rl.groups import group_size
from parallel_rl.layout import CPLayout, SequenceLayout
from parallel_rl.losses.base import LossFn, NoConfig
from parallel_rl.losses.batch import Alignment, TokenBatch
from parallel_rl.objectives.preference import bradley_terry
from parallel_rl.reduce import Metric, Metrics, token_weights
from parallel_rl.vocab.backends.torch_backend import math_dtype

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch.distributed import ProcessGroup

    from parallel_rl.losses.base import PackedRow


def _pair_terms(batch: TokenBatch, rewards: Tensor, beta: float) -> tuple[Tensor, dict[str, Metric]]:
    """Share of the mean pair loss from [B] rewards, and the metrics of the pairs; a pair counts where both rows do."""
    chosen, rejected = rewards[::2], rewards[1::2]
    mask, count = batch.sequence_mask[::2] & batch.sequence_mask[1::2], batch.counts.seqs / 2
    loss = batch.sequence_sum(bradley_terry(chosen, rejected, beta), mask, count)
    samples = batch.count(batch.sequence_mask)
    return loss, {
        "accuracy": batch.sequence_mean(chosen > rejected, mask, count),
        "rewards_chosen_mean": batch.sequence_mean(chosen, mask, count),
        "rewards_rejected_mean": batch.sequence_mean(rejected, mask, count),
        "num_valid_samples": samples._replace(value=samples.value / 2),
    }


class PreferenceLoss(LossFn[NoConfig]):
    """Bradley-Terry loss of a reward model; this rank's share.

        L = −Σ_pairs log σ(r_chosen − r_rejected) / (N_seq / 2)

    Rows are pairs: chosen even, rejected odd. In place of logits it takes the reward head's output, equal on tensor
    ranks: [B] or [B, 1], one reward a row, whole on every context rank (`data` then needs `sample_mask` only); or
    [B, S/cp, 1] (packed: [1, T/cp, 1]), where the reward of a row is the output at its last valid token.

    Metrics: loss, accuracy (ties count as wrong), rewards_chosen_mean, rewards_rejected_mean, num_valid_samples (pairs).
    Call and errors: see `LossFn`; an odd number of rows raises.

    Paper: Bradley & Terry 1952; arXiv 2203.02155.
    """

    config_class = NoConfig
    paired = True

    def __init__(self, config: NoConfig | Mapping | None = None, *, cp_layout: CPLayout = "zigzag") -> None:
        super().__init__(config, cp_layout=cp_layout)  # a scalar head has no vocabulary, so none of its options

    def compute(self, batch: TokenBatch) -> tuple[Tensor, Metrics]:
        assert batch.head is not None
        loss, metrics = _pair_terms(batch, batch.head, beta=1.0)
        return loss, Metrics({"loss": Metric("share", loss)} | metrics)

    def _complete(self, logits: Tensor, data: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        if logits.dim() == 3 or "sample_mask" not in data:
            return data
        rows = data["sample_mask"].new_ones(data["sample_mask"].numel(), 1)  # nothing of the tokens is read
        return {"input_ids": rows.to(torch.int64), "token_mask": rows, **data}

    def _layout(
        self, logits: Tensor, rows: int, width: int, context_group: ProcessGroup | None, packed_row: PackedRow | None
    ) -> SequenceLayout:
        if logits.dim() == 3:
            return super()._layout(logits, rows, width, context_group, packed_row)
        if tuple(logits.shape) not in ((rows,), (rows, 1)):
            raise ValueError(f"one reward a row must be [B] or [B, 1] with B = {rows}, got {list(logits.shape)}")
        return replace(SequenceLayout.padded(rows, width, device=logits.device), cp_size=group_size(context_group))

    def _check_head(self, logits: Tensor, data: Mapping[str, Tensor], tensor_group: ProcessGroup | None) -> None:
        if not logits.is_floating_point() or (logits.dim() == 3 and logits.shape[-1] != 1):
            raise ValueError(
                f"rewards must be floating point [B, S/cp, 1] or one a row, got {logits.dtype} {list(logits.shape)}"
            )

    def _read_head(self, batch: TokenBatch, logits: Tensor, tensor_group: ProcessGroup | None) -> TokenBatch:
        scores = logits.reshape(-1).to(math_dtype(logits.dtype))
        if logits.dim() < 3:
            return replace(batch, head=torch.where(batch.sequence_mask, scores, 0))
        # The last valid token of each row, at the position that holds it; column 0 may be it.
        mask = batch.data["token_mask"].bool() & batch.sequence_mask[:, None]
        place = torch.arange(mask.shape[1], device=mask.device)
        last = mask & (place == torch.where(mask, place, -1).amax(1, keepdim=True))
        here = batch.layout.shard(last, shift=False, fill=False)
        return replace(batch, head=batch.layout.segment_sum(torch.where(here, scores, 0), batch.context_group))


@dataclass(frozen=True)
class DPOLossConfig:
    """Options of `DPOLossFn`.

    reference_policy_kl_penalty: β. preference_loss_weight, sft_loss_weight: weights of the two terms.
    preference_average_log_probs, sft_average_log_probs: means over a response's tokens instead of sums.
    reference_logprobs_alignment: "token" stores the reference log-prob of token t at t, "predictor" at t − 1
        (NeMo-RL's DPO data).
    """

    reference_policy_kl_penalty: float = 0.05
    preference_loss_weight: float = 1.0
    sft_loss_weight: float = 0.0
    preference_average_log_probs: bool = False
    sft_average_log_probs: bool = False
    reference_logprobs_alignment: Alignment = "token"

    def __post_init__(self) -> None:
        if not self.reference_policy_kl_penalty > 0:
            raise ValueError(f"reference_policy_kl_penalty = {self.reference_policy_kl_penalty} must be positive")
        for name in ("preference_loss_weight", "sft_loss_weight"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} = {getattr(self, name)} must be at least 0")
        if self.preference_loss_weight == 0 and self.sft_loss_weight == 0:
            raise ValueError("preference_loss_weight and sft_loss_weight are both 0; the loss would be nothing")
        if self.sft_average_log_probs and self.sft_loss_weight == 0:
            raise ValueError("sft_average_log_probs = True has no effect with sft_loss_weight = 0")


class DPOLossFn(LossFn[DPOLossConfig]):
    """Direct preference optimization with a supervised term on the chosen responses; this rank's share.

        L = Σ_pairs [−w_p·log σ(β·(R_chosen − R_rejected)) + w_s·NLL_chosen] / (N_seq / 2),    R = Σ_t log π − log π_ref

    Rows are pairs: chosen even, rejected odd; sums over a response run in float64. `data` holds
    reference_policy_logprobs [B, S] beside the common fields.

    Metrics: loss, preference_loss, sft_loss, accuracy, rewards_chosen_mean, rewards_rejected_mean (without β),
    num_valid_samples (pairs). Call and errors: see `LossFn`; an odd number of rows raises.

    Paper: arXiv 2305.18290.
    """

    config_class = DPOLossConfig
    paired = True
    token_fields = ("reference_policy_logprobs",)

    @property
    def predictor_fields(self) -> tuple[str, ...]:  # type: ignore[override]
        return self.token_fields if self.config.reference_logprobs_alignment == "predictor" else ()

    def compute(self, batch: TokenBatch) -> tuple[Tensor, Metrics]:
        cfg = self.config
        reference = batch.field("reference_policy_logprobs", cfg.reference_logprobs_alignment)
        of_sequence = batch.segment_mean if cfg.preference_average_log_probs else batch.segment_sum
        preference, metrics = _pair_terms(
            batch, of_sequence(batch.logprobs - reference), cfg.reference_policy_kl_penalty
        )
        loss, sft = cfg.preference_loss_weight * preference, torch.zeros_like(preference)
        if cfg.sft_loss_weight > 0:
            sft = batch.weighted_sum(-batch.logprobs, self._sft_weights(batch))
            loss = loss + cfg.sft_loss_weight * sft
        shares = {
            "loss": Metric("share", loss),
            "preference_loss": Metric("share", preference),
            "sft_loss": Metric("share", sft),
        }
        return loss, Metrics(shares | metrics)

    def _sft_weights(self, batch: TokenBatch) -> Tensor:
        """[B] weight of a token's NLL: on chosen rows of valid pairs."""
        cfg = self.config
        weights = token_weights(
            "seq-mean-token-mean" if cfg.sft_average_log_probs else "seq-mean-token-sum",
            batch.tokens_per_sequence,
            batch.counts,
        )
        chosen = torch.arange(weights.numel(), device=weights.device) % 2 == 0
        pair = (batch.sequence_mask[::2] & batch.sequence_mask[1::2]).repeat_interleave(2, output_size=weights.numel())
        return torch.where(chosen & pair, 2 * weights, 0)
