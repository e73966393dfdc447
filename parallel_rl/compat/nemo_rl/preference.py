"""NeMo-RL's losses of likelihoods and pairs: NLL, reward model, DPO."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from parallel_rl.compat.dense import Count, as_count
from parallel_rl.compat.nemo_rl.base import LogProbLoss, Result, batch_of, checked, floats, shifted
from parallel_rl.compat.nemo_rl.interfaces import DPOLossConfig, LossFunction, LossInputType, LossType, normalizers
from parallel_rl.functional.preference import dpo
from parallel_rl.losses.nll import NLLLoss as LibraryNLL
from parallel_rl.losses.preference import response_sum
from parallel_rl.vocab.backends.torch_backend import math_dtype

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch.distributed import ProcessGroup

    from parallel_rl.compat.nemo_rl.base import Data
    from parallel_rl.vocab.linear.lm_head import LMHeadInput


class NLLLossFn(LogProbLoss):
    """Negative log-likelihood of the valid tokens by the present call; metrics as of `NLLLoss`."""

    loss_type = LossType.TOKEN_LEVEL

    def __init__(self, use_fused_linear_logprobs: bool = False) -> None:
        self.use_fused_linear_logprobs = use_fused_linear_logprobs
        tokens, _, none = normalizers()
        self.metric_normalizations = {"loss": tokens, "num_unmasked_tokens": none, "num_valid_samples": none}

    def __call__(  # type: ignore[override]
        self,
        next_token_logprobs: Tensor,
        data: Data,
        global_valid_seqs: Count | None,
        global_valid_toks: Count | None,
        dpo_loss: bool = False,
        dpo_average_log_probs: bool = False,
    ) -> Result:
        """Return the loss and its metrics, see `NLLLoss`, from next_token_logprobs [B, S − 1]."""
        data = checked(data)
        if dpo_loss:
            return _nll_of_rows(next_token_logprobs, data, dpo_average_log_probs)
        return self.from_logprobs(next_token_logprobs, data, global_valid_seqs, global_valid_toks)

    def from_logprobs(
        self, logprobs: Tensor, data: Data, seqs: Count | None, toks: Count | None, by_row: bool = False
    ) -> Result:
        loss, metrics = LibraryNLL().compute(batch_of(logprobs, data, counts=(seqs, toks)))
        return loss, floats(metrics)


class NLLLoss(NLLLossFn):
    """NLL of the valid tokens, −Σ mask·log π / global_valid_toks; gives num_unmasked_tokens too."""

    def __call__(  # type: ignore[override]
        self,
        next_token_logits: Tensor | LMHeadInput | None = None,
        data: Data | None = None,
        global_valid_seqs: Count | None = None,
        global_valid_toks: Count | None = None,
        vocab_parallel_rank: int | None = None,
        vocab_parallel_group: ProcessGroup | None = None,
        context_parallel_group: ProcessGroup | None = None,
        dpo_loss: bool = False,
        dpo_average_log_probs: bool = False,
        *,
        next_token_logprobs: Tensor | None = None,
    ) -> Result:
        """Return the loss and its metrics; with dpo_loss each row's NLL [B], perhaps per valid token."""
        data = checked(data)
        groups = vocab_parallel_rank, vocab_parallel_group, context_parallel_group
        logprobs = self.logprobs(next_token_logits, next_token_logprobs, data, groups)
        return super().__call__(logprobs, data, global_valid_seqs, global_valid_toks, dpo_loss, dpo_average_log_probs)


class _PairLoss(LossFunction):
    loss_type = LossType.SEQUENCE_LEVEL

    def split_output_tensor(self, tensor: Tensor) -> tuple[Tensor, Tensor]:
        """Split [2P, ...] into chosen (even) and rejected (odd) rows."""
        return tensor[::2], tensor[1::2]

    def _pairs(
        self, rewards: Tensor, sample_mask: Tensor, seqs: Count | None, beta: float = 1.0
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Average −log σ(β·(r_chosen − r_rejected)) etc. over pairs; a pair counts if its chosen row does."""
        if rewards.shape != sample_mask.shape:
            raise ValueError(
                f"rewards {list(rewards.shape)} and sample_mask {list(sample_mask.shape)} must be [2P], one per row"
            )
        (chosen, rejected), (chosen_mask, rejected_mask) = map(self.split_output_tensor, (rewards, sample_mask))
        count = as_count(1 if seqs is None else seqs, rewards.device).clamp(min=1) / 2

        def mean(x: Tensor, mask: Tensor) -> Tensor:
            return torch.where(mask, x, 0).sum(dtype=torch.float64) / count

        chosen, rejected = torch.where(chosen_mask, chosen, 0), torch.where(chosen_mask | rejected_mask, rejected, 0)
        return mean(dpo(chosen, rejected, beta, 0.0), chosen_mask), {
            "accuracy": mean((chosen > rejected).double(), chosen_mask),
            "rewards_chosen_mean": mean(chosen, chosen_mask),
            "rewards_rejected_mean": mean(rejected, rejected_mask),
            "num_valid_samples": sample_mask.sum() / 2,
        }


class PreferenceLoss(_PairLoss):
    """Bradley-Terry loss of a reward model, by the documented call; whole on every context rank.

    Metrics: loss, accuracy (ties count as wrong), rewards_chosen_mean, rewards_rejected_mean, num_valid_samples (pairs). Where
    a pair's rows differ in sample_mask, the chosen row decides.
    """

    input_type = LossInputType.LOGIT

    def __call__(
        self, rewards: Tensor, data: Data, global_valid_seqs: Count, global_valid_toks: Count | None = None
    ) -> Result:
        """Return the mean loss of global_valid_seqs / 2 pairs, and metrics, from rewards [2P] or [2P, 1]."""
        if "sample_mask" not in data:
            raise ValueError("data lacks the field 'sample_mask'")
        rewards = rewards.squeeze(-1)
        rewards = rewards.to(math_dtype(rewards.dtype))
        loss, metrics = self._pairs(rewards, _paired(data["sample_mask"]), global_valid_seqs)
        loss = loss.to(rewards.dtype)
        return loss, floats({"loss": loss, **metrics})


class PreferenceLossFn(PreferenceLoss):
    """`PreferenceLoss` by the present call, with the rewards as `logits`."""

    def __call__(
        self, logits: Tensor, data: Data, global_valid_seqs: Count, global_valid_toks: Count | None = None
    ) -> Result:
        return super().__call__(logits, data, global_valid_seqs, global_valid_toks)


class DPOLossFn(_PairLoss, LogProbLoss):
    """DPO with an NLL on the chosen responses, w_p·L_pref + w_s·L_sft; see the library's `DPOLossFn`.

    Column t of `data["reference_policy_logprobs"]` is of token t + 1; global_valid_toks is not read. It may run in a packing
    wrapper (Q9: the origin's separates pairs). Metrics: loss, sft_loss, preference_loss, and those of `PreferenceLoss`, rewards
    without β.
    """

    def __init__(self, cfg: DPOLossConfig | Mapping[str, object], use_fused_linear_logprobs: bool = False) -> None:
        self.cfg = DPOLossConfig.read(cfg)
        vars(self).update(self.cfg)
        self.use_fused_linear_logprobs = use_fused_linear_logprobs

    def rows(self, data: Data) -> Tensor:
        """Return [2P] bool: both rows of a pair if either counts."""
        sample_mask = _paired(data["sample_mask"])
        return (sample_mask[::2] | sample_mask[1::2]).repeat_interleave(2, output_size=len(sample_mask))

    def from_logprobs(
        self, logprobs: Tensor, data: Data, seqs: Count | None, toks: Count | None, by_row: bool = False
    ) -> Result:
        cfg, sample_mask = self.cfg, _paired(data["sample_mask"])
        fields = shifted(data, {"reference_policy_logprobs": "predictor"})
        batch = batch_of(logprobs, data, fields, rows=self.rows(data))
        log_ratio = batch.logprobs - batch["reference_policy_logprobs"]
        ratios = response_sum(batch, log_ratio, bool(cfg["preference_average_log_probs"]))
        preferred, metrics = self._pairs(ratios, sample_mask, seqs, cfg.number("reference_policy_kl_penalty"))
        sft = torch.zeros_like(preferred)
        if cfg.number("sft_loss_weight") > 0:
            nll = response_sum(batch, -batch.logprobs, bool(cfg["sft_average_log_probs"]))[::2]
            count = as_count(1 if seqs is None else seqs, nll.device).clamp(min=1) / 2
            sft = torch.where(sample_mask[::2], nll, 0).sum() / count
        loss = cfg.number("preference_loss_weight") * preferred + cfg.number("sft_loss_weight") * sft
        metrics = {"loss": loss, "sft_loss": sft, "preference_loss": preferred, **metrics}
        return loss.to(batch.output.dtype), floats(metrics)


def _nll_of_rows(logprobs: Tensor, data: Data, average: bool) -> Result:
    batch = batch_of(logprobs, data)
    loss = response_sum(batch, -batch.logprobs, average).to(batch.output.dtype)
    counts = floats({"num_unmasked_tokens": batch.mask.sum(), "num_valid_samples": batch.sequence_mask.sum()})
    return loss, {"loss": loss.detach(), **counts}


def _paired(sample_mask: Tensor) -> Tensor:
    if sample_mask.dim() != 1 or len(sample_mask) % 2:
        raise ValueError(f"pairs are (even, odd) rows: sample_mask must be [2P], got {list(sample_mask.shape)}")
    return sample_mask != 0
