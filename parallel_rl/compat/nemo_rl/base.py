"""The call of NeMo-RL's losses on log-probs, in its documented and its present form."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from parallel_rl.compat.dense import Count, Step, as_count, dense_batch
from parallel_rl.compat.nemo_rl.interfaces import LossFunction, LossInputType
from parallel_rl.compat.nemo_rl.reading import Data, ShardedOutput
from parallel_rl.losses.core.batch import TokenBatch
from parallel_rl.metrics import Metric
from parallel_rl.validation import checks_values
from parallel_rl.vocab.linear.lm_head import LMHeadInput

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

Result = tuple[Tensor, dict[str, "float | Tensor"]]


class LogProbLoss(LossFunction, ABC):
    """Loss on the log-probs of the next tokens.

    The first argument is logits with groups (documented call) or [B, S − 1] log-probs from `prepare_loss_input` (present call).
    Every context rank gets the whole loss of its rows. The gradient of its logits is the sum over all context ranks' losses, so
    loss / cp has the right gradient. All but extrema add up over data ranks and micro-batches.
    """

    input_type = LossInputType.LOGPROB

    def __call__(
        self,
        next_token_logits: Tensor | LMHeadInput | None = None,
        data: Data | None = None,
        global_valid_seqs: Count | None = None,
        global_valid_toks: Count | None = None,
        vocab_parallel_rank: int | None = None,
        vocab_parallel_group: ProcessGroup | None = None,
        context_parallel_group: ProcessGroup | None = None,
        *,
        next_token_logprobs: Tensor | None = None,
    ) -> Result:
        """Return the loss, divided by counts of the whole step, and its metrics.

        Args:
            next_token_logits: [B, S/cp, V/tp], a DTensor, an `LMHeadInput`, or [B, S − 1] log-probs.
            data: whole on every context rank, see the data dict of the class.
            global_valid_seqs, global_valid_toks: of the whole step; None if the loss does not read it.

        Raises:
            ValueError: shapes that do not match, a missing field, a mask with other values than 0 and 1.
        """
        data = checked(data)
        groups = vocab_parallel_rank, vocab_parallel_group, context_parallel_group
        logprobs = self.logprobs(next_token_logits, next_token_logprobs, data, groups)
        return self.from_logprobs(logprobs, data, global_valid_seqs, global_valid_toks)

    @abstractmethod
    def from_logprobs(
        self, logprobs: Tensor, data: Data, seqs: Count | None, toks: Count | None, by_row: bool = False
    ) -> Result:
        """Return the loss and metrics of [B, S − 1]; by_row: divide per row what the origin divides per call."""

    def rows(self, data: Data) -> Tensor:
        """Return [B] bool: the rows that the loss reads."""
        return data["sample_mask"] != 0

    def logprobs(
        self,
        first: Tensor | LMHeadInput | None,
        given: Tensor | None,
        data: Data,
        groups: tuple[int | None, ProcessGroup | None, ProcessGroup | None],
    ) -> Tensor:
        """Return log-probs [B, S − 1], passed or computed from logits; ValueError for both or neither."""
        if (first is None) == (given is None):
            raise ValueError("give next_token_logits, or next_token_logprobs in their place, and not both")
        if given is not None:
            return given
        assert first is not None
        if isinstance(first, Tensor) and first.dim() == 2:
            return first
        return ShardedOutput.of(first, *groups).next_token_logprobs(data, self.rows(data))


def checked(data: Data | None) -> Data:
    """Return the data; refuse a missing mask or, if values are checked, one that is not of 0 and 1."""
    for name in ("token_mask", "sample_mask"):
        if data is None or name not in data:
            raise ValueError(f"data lacks the field {name!r}")
        mask = data[name]
        if mask.dtype != torch.bool and checks_values(mask) and bool(((mask != 0) & (mask != 1)).any()):
            raise ValueError(f"{name} must hold 0 and 1 only; weights belong in the advantages")
    assert data is not None
    return data


def shifted(data: Data, names: Mapping[str, str]) -> dict[str, Tensor]:
    """Return [B, S − 1] fields of predicted tokens, each at "token" or "predictor"; refuse missing ones."""
    for name in names:
        if name not in data:
            raise ValueError(f"data lacks the field {name!r}; this loss needs {', '.join(names)}")
    return {name: data[name][:, 1:] if at == "token" else data[name][:, :-1] for name, at in names.items()}


def batch_of(
    logprobs: Tensor,
    data: Data,
    fields: Mapping[str, Tensor] | None = None,
    counts: tuple[Count | None, Count | None] = (None, None),
    rows: Tensor | None = None,
) -> TokenBatch:
    """Build the batch that the library's losses read; counts None: not read, 0 counts as 1.

    rows: [B] bool, rows that count; None: those of sample_mask.
    """
    seqs, toks = (as_count(1 if n is None else n, logprobs.device).clamp(min=1) for n in counts)
    rows = data["sample_mask"] != 0 if rows is None else rows
    return dense_batch(logprobs, data["token_mask"][:, 1:] != 0, fields, Step(seqs, toks), rows=rows)


def floats(values: Mapping[str, Tensor | Metric]) -> dict[str, float | Tensor]:
    tensors = [x.value if isinstance(x, Metric) else x for x in values.values()]
    numbers = torch.stack([x.detach().double() for x in tensors]).tolist()
    return dict(zip(values, numbers, strict=True))
