"""Distillation from a teacher's top-k, or from its whole distribution."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from parallel_rl.counts import Aggregation, WeightedBy, check_aggregation
from parallel_rl.functional.distillation import Divergence, ForwardKL, mixed_kl, reverse_tail, with_tail
from parallel_rl.labels import is_shifted
from parallel_rl.losses.core.aggregation import with_units
from parallel_rl.losses.core.requirements import Alignment, Field, Requirements
from parallel_rl.losses.core.row_loss import TEACHER, LogitRows, RowLoss, mean_of_values
from parallel_rl.losses.registry import register_loss
from parallel_rl.validation import checks_values
from parallel_rl.vocab.backends.torch_backend import math_dtype
from parallel_rl.vocab.divergence import divergence_of_shards
from parallel_rl.vocab.topk import bucketed_log_probs, check_columns, column_log_probs, gather_columns, top_columns

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch.distributed import ProcessGroup

    from parallel_rl.losses.core.batch import TokenBatch
    from parallel_rl.metrics import Metrics


def check_temperature(teacher_temperature: float | None) -> None:
    if teacher_temperature is not None and not teacher_temperature > 0:
        raise ValueError(f"teacher_temperature = {teacher_temperature} must be positive, or None for the student's")


@dataclass(frozen=True)
class FullDistillationLossConfig:
    """Options of `FullDistillationLossFn`.

    divergence: forward_kl, reverse_kl, jsd (beta; GKD), skew_forward_kl, skew_reverse_kl (alpha), cross_entropy or
        finite_cross_entropy, see `parallel_rl.functional.distillation`.
    teacher_temperature: divides the teacher's logits; None: the student's, `temperature` of the loss.
    squared_temperature: multiply the loss by the student's temperature², so that gradients do not shrink with it.
    aggregation: how tokens are averaged, see `parallel_rl.counts.token_weights`. max_length: divisor of "constant-length".
    token_weights: factors data["token_weights"] [B, S] ≥ 0; divide by the "count" of positive ones or their "sum".
    """

    divergence: Divergence = field(default_factory=ForwardKL)
    teacher_temperature: float | None = None
    squared_temperature: bool = False
    aggregation: Aggregation = "token-mean"
    max_length: int | None = None
    token_weights: WeightedBy | None = None

    def __post_init__(self) -> None:
        check_aggregation(self.aggregation, self.max_length, self.token_weights)
        check_temperature(self.teacher_temperature)


@register_loss("full_distillation")
class FullDistillationLossFn(RowLoss[FullDistillationLossConfig]):
    """Divergence of the student from the teacher over the whole vocabulary; the local loss.

        L = AGG(D(p, q)),    p = softmax(teacher_logits / T_p), q = softmax(logits / T_q)

    `data["teacher_logits"]` has the shape and split of the logits, on this rank only: [B, S/cp, V/tp], packed [1, T/cp,
    V/tp]; a position holds the distribution of the token that it predicts. Padding columns are never read. Two collectives
    forward, none backward; both logits are read in blocks of rows. With an `LMHeadInput` of the student, the teacher's may be
    an `LMHeadInput` too, of any hidden size: neither makes whole logits.

    Metrics: loss, num_valid_samples. Call and errors: see `LossFn`.
    Papers: arXiv 1503.02531; GKD arXiv 2306.13649; MiniLLM arXiv 2306.08543; DistiLLM arXiv 2402.03898.

    >>> import torch
    >>> from parallel_rl import FullDistillationLossFn, count_valid
    >>> data = {"input_ids": torch.tensor([[0, 1, 2]]), "token_mask": torch.ones(1, 3), "sample_mask": torch.ones(1)}
    >>> data["teacher_logits"] = torch.tensor([2.0, 1.0, 0.0, 0.0]).expand(1, 3, 4)
    >>> loss, _ = FullDistillationLossFn()(torch.zeros(1, 3, 4), data, *count_valid(data))
    >>> round(loss.item(), 4)
    0.3376
    >>> from parallel_rl import LMHeadInput
    >>> data["teacher_logits"] = LMHeadInput(torch.ones(1, 3, 2), torch.tensor([[2.0, 0], [1, 0], [0, 0], [0, 0]]))
    >>> loss, _ = FullDistillationLossFn()(LMHeadInput(torch.ones(1, 3, 5), torch.zeros(4, 5)), data, *count_valid(data))
    >>> round(loss.item(), 4)
    0.3376
    """

    config_class = FullDistillationLossConfig
    in_place = True

    @cached_property
    def requirements(self) -> Requirements:
        needs = Requirements((Field("teacher_logits", per="local"),), reads="rows")
        return with_units(needs, self.config.aggregation, self.config.token_weights)

    def compute(self, batch: TokenBatch) -> tuple[Tensor, Metrics]:
        return mean_of_values(batch, self.config.aggregation, self.config.max_length)

    def check_rows(self, logits: Tensor, data: Mapping[str, Tensor], tensor_group: ProcessGroup | None) -> None:
        teacher, columns = data[TEACHER].shape, self._columns(logits.shape[-1], tensor_group)
        if len(teacher) != 3 or self._columns(teacher[-1], tensor_group) != columns:
            raise ValueError(
                f"teacher_logits has shape {list(teacher)}; it must be that of the student's logits, {list(logits.shape)}"
            )

    def _columns(self, width: int, tensor_group: ProcessGroup | None) -> tuple[int, int] | None:
        """Return first id and number of real columns of a shard, whose padding may differ; None if invalid."""
        try:
            shard = self.options.shard(width, tensor_group)
        except ValueError:
            return None
        return shard.start, shard.valid

    def value(self, rows: LogitRows) -> Tensor:
        assert rows.teacher is not None
        cfg, temperature = self.config, rows.shard.temperature
        divergence = divergence_of_shards(
            rows.logits, rows.teacher, rows.mask, cfg.divergence, rows.shard, cfg.teacher_temperature or temperature
        )
        return (divergence * temperature**2).to(divergence.dtype) if cfg.squared_temperature else divergence


@dataclass(frozen=True)
class DistillationLossConfig:
    """Options of `DistillationLossFn`.

    kl_type: "forward" KL(teacher ‖ student), "reverse", or "mixed": w·forward + (1 − w)·reverse.
    mixed_kl_weight: w.
    zero_outside_topk: False: both sides are renormalised inside the top-k, and other tokens have no effect. True: the student
        is normalised over the whole vocabulary, and the teacher's log-prob of any other token is −100 in the reverse KL.
    bucket_tail: make all tokens outside the top-k one bucket on both sides: a lower bound of the KL over the vocabulary that
        includes the tail's mass. Reads teacher_logsumexp [B, S], of the teacher's logits over its temperature. The teacher's
        tail is 1 − Σ_k p, so a tail below 1e-5 needs that field in float64.
    overlap: log how far student and teacher agree on likely tokens, at the cost of one more pass over the logits. With T the
        teacher's top-k ids of a token and S the student's k largest logits: teacher_mass = Σ_{v∈T} p_v and student_mass =
        Σ_{v∈T} q_v over the whole vocabulary, overlap = |T ∩ S| / k. Reads teacher_logsumexp.
    topk_alignment: "token" stores the teacher's distribution of token t at t, "predictor" at t − 1 (NeMo-RL's data).
    teacher_temperature: divides the teacher's logits; None: the student's, `temperature` of the loss.
    aggregation: how tokens are averaged, see `parallel_rl.counts.token_weights`. max_length: divisor of "constant-length".
    token_weights: factors data["token_weights"] [B, S] ≥ 0; divide by the "count" of positive ones or their "sum".
    """

    kl_type: Literal["forward", "reverse", "mixed"] = "mixed"
    mixed_kl_weight: float = 0.5
    zero_outside_topk: bool = False
    bucket_tail: bool = False
    overlap: bool = False
    topk_alignment: Alignment = "token"
    teacher_temperature: float | None = None
    aggregation: Aggregation = "token-mean"
    max_length: int | None = None
    token_weights: WeightedBy | None = None

    def __post_init__(self) -> None:
        check_aggregation(self.aggregation, self.max_length, self.token_weights)
        check_temperature(self.teacher_temperature)
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
        return {"forward": 1.0, "reverse": 0.0, "mixed": self.mixed_kl_weight}[self.kl_type]


@register_loss("distillation")
class DistillationLossFn(RowLoss[DistillationLossConfig]):
    """KL between a teacher's top-k distribution and the student's; the local loss.

        L = AGG(w·Σ_k p(log p − log q) + (1 − w)·Σ_k q(log q − log p))

    `data` holds teacher_topk_logits [B, S, K] and teacher_topk_indices [B, S, K] (whole on every context rank), and with
    `bucket_tail` teacher_logsumexp [B, S]. Collectives: [T, K] floats forward, and [T, 4] if the student is normalised over
    the whole vocabulary; none backward.

    Metrics: loss, num_valid_samples; with `overlap` teacher_mass, student_mass and overlap.
    Call and errors: see `LossFn`; an id outside the vocabulary raises.
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

    @property
    def measured(self) -> tuple[str, ...]:
        return ("teacher_mass", "student_mass", "overlap") if self.config.overlap else ()

    @property
    def in_place(self) -> bool:  # type: ignore[override]
        return self.config.zero_outside_topk or self.config.bucket_tail

    @cached_property
    def requirements(self) -> Requirements:
        at = self.config.topk_alignment
        top = (
            Field("teacher_topk_logits", alignment=at, width=True),
            Field("teacher_topk_indices", dtype="integer", alignment=at, width=True),
        )
        tail = (Field("teacher_logsumexp", alignment=at),) if self.config.bucket_tail or self.config.overlap else ()
        return with_units(Requirements((*top, *tail), reads="rows"), self.config.aggregation, self.config.token_weights)

    def compute(self, batch: TokenBatch) -> tuple[Tensor, Metrics]:
        return mean_of_values(batch, self.config.aggregation, self.config.max_length, self.measured)

    def check_rows(self, logits: Tensor, data: Mapping[str, Tensor], tensor_group: ProcessGroup | None) -> None:
        ids, teacher = data["teacher_topk_indices"], data["teacher_topk_logits"]
        if ids.shape != teacher.shape:
            raise ValueError(
                f"teacher_topk_indices has shape {list(ids.shape)}, teacher_topk_logits {list(teacher.shape)}; they must agree"
            )
        valid = self.scored(data)
        before = self.config.topk_alignment == "predictor" and not is_shifted(data)
        valid = valid.roll(-1, 1) if before else valid
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

    def value(self, rows: LogitRows) -> Tensor:
        cfg, shard, flat, ids = self.config, rows.shard, rows.logits, rows.field("teacher_topk_indices")
        entropy = None
        if cfg.bucket_tail:
            log_q = bucketed_log_probs(flat, ids, rows.mask, shard)
        elif cfg.zero_outside_topk:
            log_q, entropy = column_log_probs(flat, ids, rows.mask, shard)
        else:
            log_q = _log_softmax(gather_columns(flat, ids, rows.mask, shard))
        teacher = rows.field("teacher_topk_logits").to(log_q.dtype)
        teacher = (teacher / (cfg.teacher_temperature or shard.temperature_of_rows)).to(log_q.dtype)
        if cfg.bucket_tail:
            log_p = teacher - rows.field("teacher_logsumexp").to(log_q.dtype)[:, None]
            kl = mixed_kl(with_tail(log_p), log_q, cfg.forward_weight).to(math_dtype(flat.dtype))
        else:
            kl = mixed_kl(teacher.log_softmax(-1), log_q, cfg.forward_weight)
        if entropy is not None and cfg.forward_weight < 1:
            kl = kl + (1 - cfg.forward_weight) * reverse_tail(log_q, entropy)
        return torch.cat([kl[:, None], self._agreement(rows, teacher).to(kl.dtype)], 1) if cfg.overlap else kl

    def _agreement(self, rows: LogitRows, teacher: Tensor) -> Tensor:
        """Return [n, 3]: both sides' mass on the teacher's top-k, and the part that is in the student's own."""
        ids, logits, shard = rows.field("teacher_topk_indices"), rows.logits.detach(), rows.shard
        log_q, _ = column_log_probs(logits, ids, rows.mask, replace(shard, consume_logits=False))
        log_p = teacher - rows.field("teacher_logsumexp").to(teacher.dtype)[:, None]
        top = top_columns(torch.where(rows.mask[:, None], logits, 0), ids.shape[1], shard)[1].sort(1).values
        place = torch.searchsorted(top, ids.contiguous()).clamp(max=ids.shape[1] - 1)
        both = (top.gather(1, place) == ids).to(log_q.dtype)
        return torch.stack([log_p.exp().sum(1).to(log_q.dtype), log_q.exp().sum(1), both.mean(1)], 1)


def _log_softmax(z: Tensor) -> Tensor:
    """Compute log softmax over the last dimension; a row of −inf only stays so, without gradient."""
    none = (z == -torch.inf).all(-1, keepdim=True)
    return z.masked_fill(none, 0).log_softmax(-1).masked_fill(none, -torch.inf)
