"""Losses of outcome reward models: pairs of scores."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from torch import Tensor

from parallel_rl.config.strict import positive
from parallel_rl.functional.preference import hps, log_exp, log_sigmoid
from parallel_rl.losses.core.batch import TokenBatch
from parallel_rl.losses.core.requirements import Field, Requirements
from parallel_rl.losses.core.scalar_head import PooledHeadLoss
from parallel_rl.losses.pairs import pair_mean, pair_metrics
from parallel_rl.losses.registry import register_loss
from parallel_rl.metrics import Metric, Metrics


@dataclass(frozen=True)
class PreferenceLossConfig:
    """Options of `PreferenceLoss`.

    kind: "sigmoid" −log σ(r_w − r_l − m); "log-exp" log(1 + e^{r_l − r_w}), the same without a margin, as in arXiv
        2204.05862; "hps" −log σ((r_w − r_l)/T), a softmax over the two scores.
    margin: the constant part of m, kind "sigmoid" only.
    pair_margins: adds the field `preference_margins` [B] of the data to m, read at the chosen rows; kind "sigmoid" only.
    score_temperature: T of kind "hps".
    """

    kind: Literal["sigmoid", "log-exp", "hps"] = "sigmoid"
    margin: float = 0.0
    pair_margins: bool = False
    score_temperature: float = 1.0

    def __post_init__(self) -> None:
        for name in ("margin", "pair_margins"):
            if self.kind != "sigmoid" and getattr(self, name):
                raise ValueError(
                    f"{name} = {getattr(self, name)} has no effect with kind = {self.kind!r}; use 'sigmoid'"
                )
        positive(self, "score_temperature")
        if self.kind != "hps" and self.score_temperature != 1:
            raise ValueError(
                f"score_temperature = {self.score_temperature} has no effect with kind = {self.kind!r}; use 'hps'"
            )


@register_loss("preference")
class PreferenceLoss(PooledHeadLoss[PreferenceLossConfig]):
    """Bradley-Terry loss of a reward model; the local loss.

        L = −Σ_pairs log σ(r_chosen − r_rejected − m) / (N_seq / 2)

    Rows are pairs: chosen even, rejected odd. In place of logits it takes the reward head's output, equal on tensor ranks:
    [B] or [B, 1], one reward a row, whole on every context rank (`data` then needs only `sample_mask`); or [B, S/cp, 1]
    (packed: [1, T/cp, 1]), read at a row's last valid token.

    Metrics: loss, accuracy (ties count as wrong), rewards_chosen_mean, rewards_rejected_mean, num_valid_samples (pairs).
    Call and errors: see `LossFn`; an odd number of rows raises.
    Papers: Bradley & Terry 1952; arXiv 2203.02155; margins: arXiv 2307.09288.

    >>> import torch
    >>> from parallel_rl import PreferenceLoss, count_valid
    >>> data = {"token_mask": torch.ones(2, 1), "sample_mask": torch.ones(2)}
    >>> loss, _ = PreferenceLoss()(torch.tensor([1.0, 0.0]), data, *count_valid(data))
    >>> round(loss.item(), 4)
    0.3133
    """

    config_class = PreferenceLossConfig

    @cached_property
    def requirements(self) -> Requirements:
        margins = (Field("preference_margins", per="sequence"),) if self.config.pair_margins else ()
        return Requirements(margins, reads="scalar", paired=True)

    def compute(self, batch: TokenBatch) -> tuple[Tensor, Metrics]:
        chosen, rejected = batch.head[::2], batch.head[1::2]
        loss = pair_mean(batch, self._per_pair(batch, chosen, rejected))
        return loss, Metrics({"loss": Metric("share", loss, per="pairs")} | pair_metrics(batch, chosen, rejected))

    def _per_pair(self, batch: TokenBatch, chosen: Tensor, rejected: Tensor) -> Tensor:
        cfg = self.config
        if cfg.kind == "log-exp":
            return log_exp(chosen, rejected)
        if cfg.kind == "hps":
            return hps(chosen, rejected, cfg.score_temperature)
        margin = cfg.margin + (batch.per_sequence("preference_margins")[::2] if cfg.pair_margins else 0.0)
        return log_sigmoid(chosen, rejected, margin)
