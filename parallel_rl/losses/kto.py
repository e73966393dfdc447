"""Kahneman-Tversky optimization: responses labelled good or bad one by one, no pairs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from parallel_rl.config.strict import positive
from parallel_rl.functional.preference import kto_desirable, kto_undesirable
from parallel_rl.functional.ratio import finite_log_ratio
from parallel_rl.losses.core.base import LossFn
from parallel_rl.losses.core.batch import TokenBatch
from parallel_rl.losses.core.measures import count_true, overflow_tokens, sequence_mean
from parallel_rl.losses.core.requirements import Field, Requirements
from parallel_rl.losses.preference import response_sum
from parallel_rl.losses.registry import register_loss
from parallel_rl.metrics import Metric, Metrics
from parallel_rl.statistics import Statistics
from parallel_rl.validation import checks_values


@dataclass(frozen=True)
class KTOLossConfig:
    """Options of `KTOLossFn`.

    beta: β. desirable_weight: λ_D, of good answers; KTO's authors keep λ_D·n_D / (λ_U·n_U) in [1, 4/3].
    undesirable_weight: λ_U, of bad answers.
    baseline: source of the constant z₀ ≥ 0: "mismatched", the mean log-ratio of the rows labelled 0 (KTO); "opposite-class",
        for each class the mean log-ratio of the other (vanilla KTO); "none", 0 (APO-zero without pairs). The last two leave out
        rows labelled 0.
    """

    beta: float = 0.1
    desirable_weight: float = 1.0
    undesirable_weight: float = 1.0
    baseline: Literal["mismatched", "opposite-class", "none"] = "mismatched"

    def __post_init__(self) -> None:
        positive(self, "beta")
        positive(self, "desirable_weight", "undesirable_weight", zero=True)
        if self.desirable_weight == 0 and self.undesirable_weight == 0:
            raise ValueError(
                "desirable_weight and undesirable_weight are both 0, so the loss would be 0; set one of them"
            )


@register_loss("kto")
class KTOLossFn(LossFn[KTOLossConfig]):
    """KTO on unpaired, labelled responses; the local loss.

        L = Σ_rows λ·(1 − σ(±β·(D − z₀))) / N_labelled,    D = Σ_t log π − log π_ref,    z₀ = max(0, mean of D over KL rows)

    with + and λ_D for desirable rows, − and λ_U for undesirable ones. z₀ and N_labelled are of the whole optimizer step, so the
    loss needs `statistics=` of its `collect`. `data` holds the common fields, reference_policy_logprobs [B, S] and
    preference_labels [B]: +1 desirable, −1 undesirable, 0 a mismatched (prompt i, response j) row that only enters z₀; or
    bools, True desirable. If a file labels rows 1 and 0, pass `labels.bool()`. Without KL rows z₀ is 0. Sums run in float64.

    Metrics: loss, kl_desirable and kl_undesirable (z₀ of each class), rewards_desirable_mean, rewards_undesirable_mean (D,
    without β), num_desirable, num_undesirable, num_mismatched, overflow_tokens (with an infinite log-ratio: not in D).
    Call and errors: see `LossFn`; a label other than +1, −1 and 0 raises, and so does a step with labels 0 and none −1, unless
    the baseline is "mismatched" and as many rows are 0 as +1.
    Papers: arXiv 2402.01306 (KTO), 2408.06266 (APO-zero).

    >>> import torch
    >>> from parallel_rl import KTOLossFn, count_valid
    >>> data = {"input_ids": torch.tensor([[0, 1, 2], [0, 3, 1]]), "token_mask": torch.ones(2, 3), "sample_mask": torch.ones(2)}
    >>> data |= {"reference_policy_logprobs": torch.full((2, 3), -1.5), "preference_labels": torch.tensor([1.0, -1.0])}
    >>> loss_fn = KTOLossFn()
    >>> call = (torch.zeros(2, 3, 4), data, *count_valid(data))
    >>> loss, _ = loss_fn(*call, statistics=loss_fn.collect(*call).reduce())
    >>> round(loss.item(), 4)
    0.5
    """

    config_class = KTOLossConfig
    requirements = Requirements(
        (Field("reference_policy_logprobs"), Field("preference_labels", per="sequence", dtype="label")),
        collected=True,
    )

    def collect_from(self, batch: TokenBatch) -> Statistics:
        ratios, no_count = _log_ratios(batch)[0], torch.ones_like(batch.counts.seqs)
        sums = {}
        for side, rows in _sides(batch).items():
            sums[f"{side}_rows"] = count_true(batch, rows).value
            sums[f"{side}_log_ratio"] = sequence_mean(batch, ratios, rows, no_count).value
        return Statistics(sums)

    def compute(self, batch: TokenBatch) -> tuple[Tensor, Metrics]:
        cfg, sides = self.config, _sides(batch)
        self._check_sides(batch.statistics)
        ratios, overflow = _log_ratios(batch)
        good, bad = sides["desirable"], sides["undesirable"]
        labelled = batch.statistics["desirable_rows"] + batch.statistics["undesirable_rows"]
        z_good, z_bad = self._baselines(batch.statistics)
        losses = torch.where(
            good,
            cfg.desirable_weight * kto_desirable(ratios, z_good, cfg.beta),
            cfg.undesirable_weight * kto_undesirable(ratios, z_bad, cfg.beta),
        )
        loss = batch.sequence_sum(losses, good | bad, labelled.clamp(min=1)).to(batch.logprobs.dtype)
        metrics = {
            "loss": Metric("share", loss, per="labelled sequences"),
            "kl_desirable": Metric("max", z_good),  # the same everywhere
            "kl_undesirable": Metric("max", z_bad),
        }
        no_count = torch.ones_like(batch.counts.seqs)
        for side, rows in sides.items():
            metrics[f"num_{side}"] = number = count_true(batch, rows)
            if side != "mismatched":
                total = sequence_mean(batch, ratios, rows, no_count).value
                metrics[f"rewards_{side}_mean"] = Metric("ratio", total, number.value, f"{side} sequences")
        return loss, Metrics(metrics | overflow_tokens(batch, [overflow]))

    def _check_sides(self, statistics: Statistics) -> None:
        """Refuse a step whose labels 1 and 0 seem to mean good and bad."""
        if not checks_values(statistics["mismatched_rows"]):
            return
        good, bad, zeros = (int(statistics[f"{side}_rows"]) for side in ("desirable", "undesirable", "mismatched"))
        if zeros == 0 or bad > 0 or (zeros == good and self.config.baseline == "mismatched"):
            return
        raise ValueError(
            f"preference_labels of this step are 0 in {zeros} rows, +1 in {good} and -1 in none, but 0 marks the mismatched "
            "rows of the baseline; if 0 means undesirable, pass preference_labels.bool(), or -1 in place of 0"
        )

    def _baselines(self, statistics: Statistics) -> tuple[Tensor, Tensor]:
        def mean(side: str) -> Tensor:
            return (statistics[f"{side}_log_ratio"] / statistics[f"{side}_rows"].clamp(min=1)).clamp(min=0)

        if self.config.baseline == "opposite-class":
            return mean("undesirable"), mean("desirable")
        if self.config.baseline == "mismatched":
            return mean("mismatched"), mean("mismatched")
        zero = torch.zeros_like(statistics["mismatched_rows"])
        return zero, zero

    def check_data(self, data: Mapping[str, Tensor], needs: Requirements) -> None:
        """Raise ValueError also for labels that are no ±1 or 0, and for zeros that may mean undesirable."""
        super().check_data(data, needs)
        labels = data["preference_labels"]
        if labels.dtype == torch.bool:
            return
        wrong = (labels.abs() != 1) & (labels != 0) & data["sample_mask"].bool()
        if bool(wrong.any()):
            row = int(wrong.nonzero()[0])
            raise ValueError(
                f"preference_labels = {labels[row].item():g} at [{row}] is not valid; +1 is desirable, -1 undesirable, "
                "0 a mismatched row; of bools True is desirable, False undesirable"
            )


def _sides(batch: TokenBatch) -> dict[str, Tensor]:
    labels = batch.per_sequence("preference_labels")
    if batch.local.data["preference_labels"].dtype == torch.bool:
        labels = torch.where(batch.sequence_mask, 2 * labels.long() - 1, 0)
    return {"desirable": labels > 0, "undesirable": labels < 0, "mismatched": (labels == 0) & batch.sequence_mask}


def _log_ratios(batch: TokenBatch) -> tuple[Tensor, Tensor]:
    """Sum D [B] in float64, and mark [T_local] tokens left out for an infinite log-ratio."""
    log_ratio, overflow = finite_log_ratio(batch.logprobs, batch["reference_policy_logprobs"])
    return response_sum(batch, log_ratio), overflow
