"""The call of NeMo-RL's losses on log-probs, in its documented form and in that of its present release."""

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
    """A loss on the log-probs of the next tokens.

    The documented call gives logits and groups, the present release's [B, S − 1] log-probs, as `prepare_loss_input` makes
    them: the first argument may be either. The metrics are floats, with one copy from the device.

    Every context rank gets the whole loss of its rows, the same one; the gradients of its logits sum those of all context
    ranks' losses, so that loss / cp has the right gradient, as in the origin. Over data ranks and micro-batches losses,
    gradients and metrics add up (extrema do not).
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
        """The loss, divided by counts of the whole step, and its metrics.

        Args:
            next_token_logits: [B, S/cp, V/tp], a DTensor, an `LMHeadInput`, or in their place [B, S − 1] log-probs.
            data: whole on every context rank, see the data dict of the class.
            global_valid_seqs, global_valid_toks: of the whole step; one that the loss does not read may be None.
            next_token_logprobs: the log-probs by their name.

        Raises:
            ValueError: shapes that do not match, a field that is missing, a mask with other values than 0 and 1.
        """
        data = checked(data)
        groups = vocab_parallel_rank, vocab_parallel_group, context_parallel_group
        logprobs = self.logprobs(next_token_logits, next_token_logprobs, data, groups)
        return self.from_logprobs(logprobs, data, global_valid_seqs, global_valid_toks)

    @abstractmethod
    def from_logprobs(
        self, logprobs: Tensor, data: Data, seqs: Count | None, toks: Count | None, by_row: bool = False
    ) -> Result:
        """The loss and its metrics from [B, S − 1]; by_row: what the origin divides by the call's own rows is of each row."""

    def rows(self, data: Data) -> Tensor:
        """[B] bool: the rows that the loss reads."""
        return data["sample_mask"] != 0

    def logprobs(
        self,
        first: Tensor | LMHeadInput | None,
        given: Tensor | None,
        data: Data,
        groups: tuple[int | None, ProcessGroup | None, ProcessGroup | None],
    ) -> Tensor:
        """[B, S − 1] log-probs of a call: those that it gives, or of its logits.

        Raises:
            ValueError: both of them, or neither.
        """
        if (first is None) == (given is None):
            raise ValueError("give next_token_logits, or next_token_logprobs in their place, and not both")
        if given is not None:
            return given
        assert first is not None
        if isinstance(first, Tensor) and first.dim() == 2:
            return first
        return ShardedOutput.of(first, *groups).next_token_logprobs(data, self.rows(data))


def checked(data: Data | None) -> Data:
    """The data, with masks of 0 and 1 (where values are looked at).

    Raises:
        ValueError: a mask that is missing or has other values: the origin multiplies by them.
    """
    for name in ("token_mask", "sample_mask"):
        if data is None or name not in data:
            raise ValueError(f"data lacks the field {name!r}")
        mask = data[name]
        if mask.dtype != torch.bool and checks_values(mask) and bool(((mask != 0) & (mask != 1)).any()):
            raise ValueError(f"{name} must hold 0 and 1 only; weights belong in the advantages")
    assert data is not None
    return data


def shifted(data: Data, names: Mapping[str, str]) -> dict[str, Tensor]:
    """Fields [B, S − 1] of predicted tokens, by their names here: "token" or "predictor" says where the data has them.

    Raises:
        ValueError: a field that is missing.
    """
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
    """The batch that the library's losses read.

    Args:
        counts: sequences and tokens of the step, None for one that is not read; 0 counts as 1.
        rows: [B] bool, those that carry loss; None are those of sample_mask.
    """
    seqs, toks = (as_count(1 if n is None else n, logprobs.device).clamp(min=1) for n in counts)
    rows = data["sample_mask"] != 0 if rows is None else rows
    return dense_batch(logprobs, data["token_mask"][:, 1:] != 0, fields, Step(seqs, toks), rows=rows)


def floats(values: Mapping[str, Tensor | Metric]) -> dict[str, float | Tensor]:
    """Numbers on the host, with one copy from the device."""
    tensors = [x.value if isinstance(x, Metric) else x for x in values.values()]
    numbers = torch.stack([x.detach().double() for x in tensors]).tolist()
    return dict(zip(values, numbers, strict=True))
