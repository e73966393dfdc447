"""Distillation from a teacher's whole distribution, on vocabulary shards or both models' hidden states."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

from torch import Tensor

from parallel_rl.counts import Aggregation, WeightedBy, check_aggregation
from parallel_rl.functional.distillation import Divergence, ForwardKL
from parallel_rl.losses.core.aggregation import with_units
from parallel_rl.losses.core.requirements import Field, Requirements
from parallel_rl.losses.core.row_loss import TEACHER, LogitRows, RowLoss, mean_of_values
from parallel_rl.losses.registry import register_loss
from parallel_rl.vocab.divergence import divergence_of_shards

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch.distributed import ProcessGroup

    from parallel_rl.losses.core.batch import TokenBatch
    from parallel_rl.metrics import Metrics


def check_temperature(teacher_temperature: float | None) -> None:
    """Raise ValueError for a teacher temperature that is not positive; None is the student's."""
    if teacher_temperature is not None and not teacher_temperature > 0:
        raise ValueError(
            f"teacher_temperature = {teacher_temperature} must be positive, or None for that of the student"
        )


@dataclass(frozen=True)
class FullDistillationLossConfig:
    """Options of `FullDistillationLossFn`.

    divergence: forward_kl, reverse_kl, jsd (beta; GKD), skew_forward_kl, skew_reverse_kl (alpha), cross_entropy or
        finite_cross_entropy, see `parallel_rl.functional.distillation`.
    teacher_temperature: of the teacher's softmax; None: the loss's `temperature`, which is the student's.
    squared_temperature: multiply by the student's temperature², so that gradients do not shrink with it.
    aggregation, max_length: how tokens are averaged, see `parallel_rl.counts.token_weights`.
    token_weights: multiply each token by data["token_weights"] [B, S] ≥ 0 (0 masks), and divide by the number of tokens with
        a weight ("count") or by the sum of the weights ("sum"), see `parallel_rl.losses.core.token_weights`; None: off.
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
        teacher, own = data[TEACHER].shape, self._columns(logits.shape[-1], tensor_group)
        if len(teacher) != 3 or self._columns(teacher[-1], tensor_group) != own:
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
        """Compute D(p, q) of each row, times temperature² if configured."""
        assert rows.teacher is not None
        cfg, temperature = self.config, rows.shard.temperature
        divergence = divergence_of_shards(
            rows.logits, rows.teacher, rows.mask, cfg.divergence, rows.shard, cfg.teacher_temperature or temperature
        )
        return (divergence * temperature**2).to(divergence.dtype) if cfg.squared_temperature else divergence
