"""Distillation: from the teacher's whole distribution on vocabulary shards, or from its top-k."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from parallel_rl.counts import Aggregation, check_aggregation, token_weights
from parallel_rl.functional.distillation import Divergence, ForwardKL, mixed_kl, reverse_tail, with_tail
from parallel_rl.layout import valid_tokens
from parallel_rl.losses.core.base import LossFn
from parallel_rl.losses.core.batch import ModelOutput, TokenBatch
from parallel_rl.losses.core.measures import count_true
from parallel_rl.losses.core.requirements import Alignment, Field, Requirements
from parallel_rl.losses.registry import register_loss
from parallel_rl.metrics import Metric, Metrics
from parallel_rl.validation import checks_values
from parallel_rl.vocab.backends.torch_backend import math_dtype
from parallel_rl.vocab.buckets import bucketed_log_probs
from parallel_rl.vocab.divergence import divergence_of_shards
from parallel_rl.vocab.topk import check_columns, column_log_probs, gather_columns

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch.distributed import ProcessGroup

    from parallel_rl.losses.core.local_batch import LocalBatch


def _mean_of_head(batch: TokenBatch, mode: Aggregation, max_length: int | None) -> tuple[Tensor, Metrics]:
    weights = token_weights(mode, batch.tokens_per_sequence, batch.counts, max_length)
    loss = batch.weighted_sum(batch.head, weights)
    return loss, Metrics({"loss": Metric("share", loss), "num_valid_samples": count_true(batch, batch.sequence_mask)})


def _check_temperature(teacher_temperature: float | None) -> None:
    if teacher_temperature is not None and not teacher_temperature > 0:
        raise ValueError(
            f"teacher_temperature = {teacher_temperature} must be positive, or None for that of the student"
        )


@dataclass(frozen=True)
class FullDistillationLossConfig:
    """Options of `FullDistillationLossFn`.

    divergence: forward_kl, reverse_kl, jsd (beta; GKD), skew_forward_kl, skew_reverse_kl (alpha), cross_entropy or
        finite_cross_entropy, see `parallel_rl.functional.distillation`.
    teacher_temperature: the teacher is softmax(logits / it); None: the loss's `temperature`, which is the student's.
    squared_temperature: multiply by the student's temperature², so that gradients do not shrink with it.
    aggregation, max_length: how tokens are averaged, see `parallel_rl.counts.token_weights`.
    """

    divergence: Divergence = field(default_factory=ForwardKL)
    teacher_temperature: float | None = None
    squared_temperature: bool = False
    aggregation: Aggregation = "token-mean"
    max_length: int | None = None

    def __post_init__(self) -> None:
        check_aggregation(self.aggregation, self.max_length)
        _check_temperature(self.teacher_temperature)


@register_loss("full_distillation")
class FullDistillationLossFn(LossFn[FullDistillationLossConfig]):
    """Divergence of the student from the teacher over the whole vocabulary; this rank's share.

        L = AGG(D(p, q)),    p = softmax(teacher_logits / T_p), q = softmax(logits / T_q)

    `data["teacher_logits"]` is shaped and sharded like the logits, on this rank only: [B, S/cp, V/tp], packed
    [1, T/cp, V/tp]; the teacher's distribution at a position is of the token that the position predicts. Its padding
    columns are never read. Two collectives forward, none backward; both sets of logits are read a block of rows at a time.

    Metrics: loss, num_valid_samples. Call and errors: see `LossFn`.

    Papers: arXiv 1503.02531; GKD arXiv 2306.13649; MiniLLM arXiv 2306.08543; DistiLLM arXiv 2402.03898.

    >>> import torch
    >>> from parallel_rl import FullDistillationLossFn, count_valid
    >>> data = {"input_ids": torch.tensor([[0, 1, 2]]), "token_mask": torch.ones(1, 3), "sample_mask": torch.ones(1)}
    >>> data["teacher_logits"] = torch.tensor([2.0, 1.0, 0.0, 0.0]).expand(1, 3, 4)
    >>> loss, _ = FullDistillationLossFn()(torch.zeros(1, 3, 4), data, *count_valid(data))
    >>> round(loss.item(), 4)
    0.3376
    """

    config_class = FullDistillationLossConfig
    requirements = Requirements((Field("teacher_logits", per="local"),), reads="logits")

    def compute(self, batch: TokenBatch) -> tuple[Tensor, Metrics]:
        return _mean_of_head(batch, self.config.aggregation, self.config.max_length)

    def _check_output(self, logits: Tensor, data: Mapping[str, Tensor], tensor_group: ProcessGroup | None) -> None:
        super()._check_output(logits, data, tensor_group)
        if data["teacher_logits"].shape != logits.shape:
            raise ValueError(
                f"teacher_logits has shape {list(data['teacher_logits'].shape)}; it must be that of the student's logits, "
                f"{list(logits.shape)}"
            )

    def _read_output(self, local: LocalBatch, logits: Tensor, tensor_group: ProcessGroup | None) -> TokenBatch:
        cfg, options = self.config, self.options
        divergence = divergence_of_shards(
            logits.flatten(0, -2),
            local.unmasked("teacher_logits"),
            local.mask,
            cfg.divergence,
            options.shard(logits.shape[-1], tensor_group),
            cfg.teacher_temperature or options.temperature,
        )
        return TokenBatch(
            local, ModelOutput(head=divergence * options.temperature**2 if cfg.squared_temperature else divergence)
        )


@dataclass(frozen=True)
class DistillationLossConfig:
    """Options of `DistillationLossFn`.

    kl_type: "forward" KL(teacher ‖ student), "reverse", or "mixed": mixed_kl_weight·forward + (1 − it)·reverse.
    zero_outside_topk: False: both sides are renormalised inside the top-k, where what the student gives to other words is
        invisible. True: the student is normalised over the whole vocabulary, and the teacher's log-prob of any other word
        counts as −100 in the reverse KL.
    bucket_tail: all words outside the top-k are one symbol on both sides: a lower bound of the KL over the vocabulary that sees
        the mass of the tail. Reads the field teacher_logsumexp [B, S], of the teacher's logits over its temperature: the
        teacher's tail is 1 − Σ_k p, so a tail below 1e-5 needs it in float64.
    topk_alignment: "token" stores the teacher's distribution of token t at t, "predictor" at t − 1 (NeMo-RL's data).
    teacher_temperature: the teacher is softmax(logits / it); None: the loss's `temperature`, which is the student's.
    aggregation, max_length: how tokens are averaged, see `parallel_rl.counts.token_weights`.
    """

    kl_type: Literal["forward", "reverse", "mixed"] = "mixed"
    mixed_kl_weight: float = 0.5
    zero_outside_topk: bool = False
    bucket_tail: bool = False
    topk_alignment: Alignment = "token"
    teacher_temperature: float | None = None
    aggregation: Aggregation = "token-mean"
    max_length: int | None = None

    def __post_init__(self) -> None:
        check_aggregation(self.aggregation, self.max_length)
        _check_temperature(self.teacher_temperature)
        if not 0 <= self.mixed_kl_weight <= 1:
            raise ValueError(f"mixed_kl_weight = {self.mixed_kl_weight} must lie in [0, 1]")
        if self.mixed_kl_weight != 0.5 and self.kl_type != "mixed":
            raise ValueError(
                f"mixed_kl_weight = {self.mixed_kl_weight} has no effect with kl_type = {self.kl_type!r}; it goes with 'mixed'"
            )
        if self.zero_outside_topk and self.bucket_tail:
            raise ValueError("zero_outside_topk and bucket_tail are two treatments of the tail; choose one")

    @property
    def forward_weight(self) -> float:
        """Weight of the forward KL."""
        return {"forward": 1.0, "reverse": 0.0, "mixed": self.mixed_kl_weight}[self.kl_type]


@register_loss("distillation")
class DistillationLossFn(LossFn[DistillationLossConfig]):
    """KL between a teacher's top-k distribution and the student's; this rank's share.

        L = AGG(w·Σ_k p(log p − log q) + (1 − w)·Σ_k q(log q − log p))

    `data` holds teacher_topk_logits [B, S, K] and teacher_topk_indices [B, S, K] (whole on every context rank), and with
    `bucket_tail` teacher_logsumexp [B, S]. One collective of [T, K] floats forward, and one of [T, 4] where the student is
    normalised over the whole vocabulary; none backward.

    Metrics: loss, num_valid_samples. Call and errors: see `LossFn`; an id outside the vocabulary raises.

    Papers: arXiv 1503.02531; the options are those of NeMo-RL.

    >>> import torch
    >>> from parallel_rl import DistillationLossFn, count_valid
    >>> data = {"input_ids": torch.tensor([[0, 1, 2]]), "token_mask": torch.ones(1, 3), "sample_mask": torch.ones(1)}
    >>> data["teacher_topk_logits"] = torch.tensor([1.0, 0.0]).expand(1, 3, 2)
    >>> data["teacher_topk_indices"] = torch.tensor([0, 1]).expand(1, 3, 2)
    >>> loss, _ = DistillationLossFn()(torch.zeros(1, 3, 4), data, *count_valid(data))
    >>> round(loss.item(), 4)
    0.1155
    """

    config_class = DistillationLossConfig

    @cached_property
    def requirements(self) -> Requirements:
        at = self.config.topk_alignment
        top = (
            Field("teacher_topk_logits", alignment=at, width=True),
            Field("teacher_topk_indices", dtype="integer", alignment=at, width=True),
        )
        tail = (Field("teacher_logsumexp", alignment=at),) if self.config.bucket_tail else ()
        return Requirements((*top, *tail), reads="logits")

    def compute(self, batch: TokenBatch) -> tuple[Tensor, Metrics]:
        return _mean_of_head(batch, self.config.aggregation, self.config.max_length)

    def _check_output(self, logits: Tensor, data: Mapping[str, Tensor], tensor_group: ProcessGroup | None) -> None:
        super()._check_output(logits, data, tensor_group)
        ids, teacher = data["teacher_topk_indices"], data["teacher_topk_logits"]
        if ids.shape != teacher.shape:
            raise ValueError(
                f"teacher_topk_indices has shape {list(ids.shape)}, teacher_topk_logits {list(teacher.shape)}; they must agree"
            )
        valid = valid_tokens(data)
        valid = valid.roll(-1, 1) if self.config.topk_alignment == "predictor" else valid
        vocab_size = self.options.shard(logits.shape[-1], tensor_group).vocab_size
        check_columns("teacher_topk_indices", torch.where(valid[..., None], ids, 0), vocab_size)
        if checks_values(ids):
            ordered = ids.sort(-1).values
            twice = (ordered[..., 1:] == ordered[..., :-1]).any(-1) & valid
            if bool(twice.any()):
                row, column = twice.nonzero()[0].tolist()
                raise ValueError(
                    f"teacher_topk_indices = {ids[row, column].tolist()} at [{row}, {column}] names a token twice; "
                    "the top-k are different tokens"
                )

    def _read_output(self, local: LocalBatch, logits: Tensor, tensor_group: ProcessGroup | None) -> TokenBatch:
        """The divergence of each position becomes the head."""
        cfg, options = self.config, self.options
        shard = options.shard(logits.shape[-1], tensor_group)
        flat, ids = logits.flatten(0, -2), local.field("teacher_topk_indices")
        entropy = None
        if cfg.bucket_tail:
            log_q = bucketed_log_probs(flat, ids, local.mask, shard)
        elif cfg.zero_outside_topk:
            log_q, entropy = column_log_probs(flat, ids, local.mask, shard)
        else:
            log_q = gather_columns(flat, ids, local.mask, shard).log_softmax(-1)
        teacher = local.field("teacher_topk_logits").to(log_q.dtype)
        teacher = teacher / (cfg.teacher_temperature or options.temperature)
        if cfg.bucket_tail:
            log_p = teacher - local.field("teacher_logsumexp").to(log_q.dtype)[:, None]
            kl = mixed_kl(with_tail(log_p), log_q, cfg.forward_weight).to(math_dtype(flat.dtype))
        else:
            kl = mixed_kl(teacher.log_softmax(-1), log_q, cfg.forward_weight)
        if entropy is not None and cfg.forward_weight < 1:
            kl = kl + (1 - cfg.forward_weight) * reverse_tail(log_q, entropy)
        return TokenBatch(local, ModelOutput(head=kl))
