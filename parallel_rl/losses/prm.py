"""Losses of reward models: pairs of scores, and classes of steps at a placeholder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from parallel_rl.config.strict import positive
from parallel_rl.counts import check_zeros_and_ones
from parallel_rl.functional.preference import cross_entropy, hps, log_exp, log_sigmoid
from parallel_rl.layout import valid_tokens
from parallel_rl.losses.core.base import LossFn
from parallel_rl.losses.core.batch import ModelOutput, TokenBatch
from parallel_rl.losses.core.loss import Reader
from parallel_rl.losses.core.measures import count_true
from parallel_rl.losses.core.requirements import Field, Requirements
from parallel_rl.losses.preference import pair_mean, pair_metrics
from parallel_rl.losses.registry import register_loss
from parallel_rl.losses.value import PooledHeadLoss
from parallel_rl.metrics import Metric, Metrics
from parallel_rl.statistics import Statistics
from parallel_rl.validation import checks_values
from parallel_rl.vocab.stats import check_logits, check_targets, stats_of_shard
from parallel_rl.vocab.topk import gather_columns, top_columns

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from parallel_rl.losses.core.local_batch import LocalBatch


@dataclass(frozen=True)
class PRMLossConfig:
    """Options of `PRMLossFn`.

    placeholder_token_id: the input token at the end of each step.
    reward_token_ids: tokens that name a step's reward; the softmax is restricted to them. None: the whole vocabulary.
    soft_labels: labels are probabilities of the first of exactly two reward tokens, not token ids.
    ignore_index: the label of a placeholder that is not scored.
    """

    placeholder_token_id: int
    reward_token_ids: tuple[int, ...] | None = None
    soft_labels: bool = False
    ignore_index: int = -100

    def __post_init__(self) -> None:
        ids = self.reward_token_ids
        if self.placeholder_token_id < 0:
            raise ValueError(f"placeholder_token_id = {self.placeholder_token_id} must be a token id, at least 0")
        if ids is not None and (len(ids) < 2 or len(set(ids)) < len(ids) or min(ids) < 0):
            raise ValueError(f"reward_token_ids = {list(ids)} must be two or more different token ids")
        if self.soft_labels and (ids is None or len(ids) != 2):
            raise ValueError(
                f"soft_labels = True needs exactly two reward_token_ids, the positive one first; got {ids and list(ids)}"
            )
        if self.ignore_index >= 0 and (self.soft_labels or ids is None or self.ignore_index in ids):
            raise ValueError(f"ignore_index = {self.ignore_index} is a label too; choose a negative number")


@register_loss("prm")
class PRMLossFn(LossFn[PRMLossConfig]):
    """Cross-entropy of step rewards at the placeholders; the local loss.

        L = −Σ_placeholders log softmax(z)[label] / N_scored,    soft labels p: −p·log softmax(z)₀ − (1 − p)·log softmax(z)₁

    z are the logits at the placeholder itself, of the whole vocabulary or the `reward_token_ids`. N_scored counts the step's
    valid placeholders whose label is not `ignore_index`, so the loss needs `statistics=` of its `count`. `data` holds the
    common fields and reward_labels [B, S]: token ids, or with `soft_labels` probabilities of any floating dtype, read at
    placeholders only. Without a scored placeholder loss and gradient are 0.

    Metrics: loss, accuracy (the largest logit is the label's; soft labels: the more likely side), num_steps.
    Call and errors: see `LossFn`; a label that is neither a reward token (a probability) nor `ignore_index` raises, and so does
    a reward token outside the vocabulary.
    Papers: arXiv 2305.20050; 2312.08935.

    >>> import torch
    >>> from parallel_rl import PRMLossFn, count_valid
    >>> data = {"input_ids": torch.tensor([[0, 1, 2]]), "token_mask": torch.ones(1, 3), "sample_mask": torch.ones(1)}
    >>> data["reward_labels"] = torch.tensor([[-100, 2, -100]])
    >>> loss_fn = PRMLossFn({"placeholder_token_id": 1, "reward_token_ids": (2, 3)})
    >>> call = (torch.zeros(1, 3, 4), data, *count_valid(data))
    >>> loss, _ = loss_fn(*call, statistics=loss_fn.count(data))
    >>> round(loss.item(), 4)
    0.6931
    """

    config_class = PRMLossConfig

    @cached_property
    def requirements(self) -> Requirements:
        labels = Field("reward_labels", dtype="float" if self.config.soft_labels else "integer")
        return Requirements((labels,), reads="logits", counted=True, shift=False)

    def count_from(self, batch: TokenBatch) -> Statistics:
        return Statistics({"steps": count_true(batch, batch.valid).value})

    def compute(self, batch: TokenBatch) -> tuple[Tensor, Metrics]:
        steps, labels = batch.statistics["steps"].clamp(min=1), batch["reward_labels"]
        if self.config.reward_token_ids is None:
            losses, correct = -batch.logprobs, batch.head == labels
        else:
            target = self.target(labels).to(batch.head.dtype)
            losses, correct = cross_entropy(batch.head, target), batch.head.argmax(1) == target.argmax(1)
        loss = batch.weighted_sum(losses, (1 / steps).expand(batch.shape[0]))
        accuracy = torch.where(batch.mask, correct, False).sum(dtype=torch.float64) / steps
        metrics = {
            "loss": Metric("share", loss, per="steps"),
            "accuracy": Metric("share", accuracy, per="steps"),
            "num_steps": Metric("count", batch.mask.sum(dtype=torch.float64)),
        }
        return loss, Metrics(metrics)

    def target(self, labels: Tensor) -> Tensor:
        """Make target probabilities of the reward tokens, [T_local, K], from [T_local] labels."""
        assert self.config.reward_token_ids is not None
        if self.config.soft_labels:
            return torch.stack([labels, 1 - labels], 1)
        return torch.stack([labels == token for token in self.config.reward_token_ids], 1)

    def scored(self, data: Mapping[str, Tensor]) -> Tensor:
        placeholder = data["input_ids"] == self.config.placeholder_token_id
        return valid_tokens(data, shift=False) & placeholder & (data["reward_labels"] != self.config.ignore_index)

    def check_data(self, data: Mapping[str, Tensor], needs: Requirements) -> None:
        check_zeros_and_ones(data)
        super().check_data({**data, "token_mask": self.scored(data)}, needs)

    def narrowed(self, local: LocalBatch) -> LocalBatch:
        return replace(local, data={**local.data, "token_mask": self.scored(local.data)})

    @property
    def reader(self) -> PRMReader:
        return PRMReader(self)


@dataclass(frozen=True, eq=False)
class PRMReader(Reader):
    """Reader at the placeholders: the K rewards' logits, or log-probs and the most likely token."""

    loss: PRMLossFn

    def check(self, logits: Tensor, data: Mapping[str, Tensor], tensor_group: ProcessGroup | None) -> None:
        cfg, options = self.loss.config, self.loss.options
        check_logits(logits, options.consume_logits, options.backend)
        vocab_size = options.shard(logits.shape[-1], tensor_group).vocab_size
        if cfg.reward_token_ids is not None and max(cfg.reward_token_ids) >= vocab_size:
            raise ValueError(
                f"reward_token_ids = {list(cfg.reward_token_ids)} must lie in the vocabulary [0, {vocab_size})"
            )
        labels, scored = data["reward_labels"], self.loss.scored(data)
        if not checks_values(labels):
            return
        if cfg.soft_labels:
            wrong, right = (labels < 0) | (labels > 1), "a probability"
        elif cfg.reward_token_ids is not None:
            wrong, right = ~self.loss.target(labels.flatten()).any(1).view_as(labels), "one of reward_token_ids"
        else:
            return check_targets(torch.where(scored, labels, 0), vocab_size, ignore_index=None)
        if bool((wrong & scored).any()):
            row, column = (wrong & scored).nonzero()[0].tolist()
            value = labels[row, column].item()
            raise ValueError(
                f"reward_labels = {value:g} at [{row}, {column}], a placeholder, is neither {right} nor "
                f"ignore_index = {cfg.ignore_index}"
            )

    def read(self, local: LocalBatch, logits: Tensor, tensor_group: ProcessGroup | None) -> TokenBatch:
        cfg, shard = self.loss.config, self.loss.options.for_batch(local).shard(logits.shape[-1], tensor_group)
        flat = logits.flatten(0, 1)
        if cfg.reward_token_ids is not None:
            ids = torch.stack([torch.full_like(local.layout.positions, token) for token in cfg.reward_token_ids], 1)
            return TokenBatch(local, ModelOutput(head=gather_columns(flat, ids, local.mask, shard)))
        labels = local.layout.shard(local.data["reward_labels"], shift=False)
        best = top_columns(flat.detach(), 1, shard)[1][:, 0]
        return TokenBatch(local, ModelOutput(stats_of_shard(flat, labels, local.mask, shard), head=best))


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
