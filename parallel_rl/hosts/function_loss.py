"""Losses of other frameworks as a `FunctionLoss`: with the call of `LossFn`, or on whole rows' log-probs."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from parallel_rl.layout import CPLayout
from parallel_rl.losses.core.call import LossCall, LossFunction
from parallel_rl.losses.core.requirements import Field, Requirements
from parallel_rl.metrics import Metric, Metrics
from parallel_rl.statistics import Statistics

# (next_token_logits, data, n_seqs, n_toks, tensor rank, tensor group, context group) -> the loss, perhaps with metrics
LossCallable = Callable[..., "Tensor | tuple[Tensor, Mapping[str, float | Tensor]]"]


_CALL = (
    "next_token_logits", "data", "global_valid_seqs", "global_valid_toks",
    "vocab_parallel_rank", "vocab_parallel_group", "context_parallel_group",
)  # fmt: skip


@dataclass(frozen=True, eq=False)
class FunctionLoss:
    """A function or object with the seven arguments of `LossFn`'s call, such as a loss of NeMo-RL.

    >>> import torch
    >>> def doubled(logits, data, seqs, toks, rank=None, tensor=None, context=None):
    ...     return 2 * logits.logsumexp(-1).mean(), {}
    >>> FunctionLoss(doubled, axes=frozenset({"data", "micro-batches"})).name
    'doubled'

    Attributes:
        call: returns the loss, alone or with a mapping of metrics, numbers that are summed over ranks.
        fields: of the data, in addition to input_ids, token_mask and sample_mask.
        axes: supported axes; the call knows no contiguous context layout, packing or padding columns.

    Raises:
        ValueError: a function that does not take these arguments, such as an objective that is not registered.
    """

    call: LossCallable
    fields: tuple[str, ...] = ()
    axes: frozenset[str] = frozenset({"tensor", "context", "data", "micro-batches"})

    def __post_init__(self) -> None:
        try:
            signature = inspect.signature(self.call)
        except (TypeError, ValueError):  # of a builtin
            return
        try:
            signature.bind(*_CALL)
        except TypeError:
            raise ValueError(
                f"{self.name}({', '.join(signature.parameters)}) does not take the {len(_CALL)} arguments of a loss's call "
                f"({', '.join(_CALL)}); an "
                f'objective (logprobs, batch) becomes a loss by @register_objective("{self.name}", token_fields=(...)) above it'
            ) from None

    @property
    def name(self) -> str:
        return getattr(self.call, "__name__", type(self.call).__name__)

    def build(
        self, *, vocab_size: int | None = None, cp_layout: CPLayout = "zigzag", consume_logits: bool = False
    ) -> LossFunction:
        """Return the function itself: its call knows neither padding columns nor the context layout."""
        return _Called(self)


class _Called(LossFunction):
    def __init__(self, subject: FunctionLoss) -> None:
        self.subject = subject

    @property
    def requirements(self) -> Requirements:
        return Requirements(tuple(Field(name) for name in self.subject.fields))

    def run(self, call: LossCall) -> tuple[Tensor, Metrics]:
        result = self.subject.call(
            call.output, call.data, call.global_valid_seqs, call.global_valid_toks,
            call.tensor_rank, call.tensor_group, call.context_group,
        )  # fmt: skip
        loss, metrics = result if isinstance(result, tuple) else (result, {})
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            got = f"a tensor {list(loss.shape)}" if isinstance(loss, Tensor) else repr(loss)
            raise ValueError(f"{self.subject.name} must return a scalar tensor, and metrics if any; got {got}")
        numbers = {name: torch.as_tensor(value, dtype=torch.float64) for name, value in metrics.items()}
        return loss, Metrics({name: Metric("share", value) for name, value in {"loss": loss, **numbers}.items()})

    def count(
        self,
        batches: Mapping[str, Tensor] | Sequence[Mapping[str, Tensor]],
        data_parallel_group: ProcessGroup | None = None,
    ) -> Statistics:
        return Statistics({})

    def run_collect(self, call: LossCall) -> Statistics:
        raise ValueError(f"{self.subject.name} needs no statistics of the step")


ROWS = frozenset({"data", "micro-batches"})


# (log-probs [B, S], mask [B, S], data, n_seqs, n_toks) -> the loss of these rows
RowsLoss = Callable[[Tensor, Tensor, Mapping[str, Tensor], Tensor, Tensor], Tensor]


def on_rows(loss: RowsLoss, fields: tuple[str, ...] = ()) -> FunctionLoss:
    """Adapt a loss on whole rows' log-probs: (logprobs, mask, data, valid_seqs, valid_toks) → loss.

    `logprobs` [B, S] are token-aligned, 0 and without gradient where `mask` is False. Its axes are `ROWS`.

    >>> on_rows(lambda logprobs, mask, data, seqs, toks: -logprobs.sum() / toks).axes == ROWS
    True
    """

    def run(logits: Tensor, data: Mapping[str, Tensor], seqs: Tensor, toks: Tensor) -> Tensor:
        logprobs, mask = row_logprobs(logits, data)
        return loss(logprobs, mask, data, seqs, toks)

    return named(loss, run, fields)


def named(loss: object, run: Callable[..., Tensor | tuple[Tensor, Mapping]], fields: tuple[str, ...]) -> FunctionLoss:
    """Wrap `run` (logits, data, counts) in a loss's call, under the name of `loss`."""

    def call(
        logits: Tensor, data: Mapping[str, Tensor], seqs: Tensor, toks: Tensor,
        rank: int | None = None, tensor: object = None, context: object = None,
    ) -> Tensor | tuple[Tensor, Mapping]:  # fmt: skip
        return run(logits, data, seqs, toks)

    call.__name__ = getattr(loss, "__name__", type(loss).__name__)
    return FunctionLoss(call, fields, ROWS)


def row_logprobs(logits: Tensor, data: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return log-probs [B, S] of `input_ids` and their loss mask; masked ones are exactly 0."""
    mask = (data["token_mask"] != 0) & (data["sample_mask"] != 0)[:, None]
    mask = torch.cat([torch.zeros_like(mask[:, :1]), mask[:, 1:]], 1)
    ids, here = torch.where(mask, data["input_ids"], 0)[:, 1:], mask[:, 1:]
    z = torch.where(here[..., None], logits[:, :-1], 0).to(torch.promote_types(logits.dtype, torch.float32))
    picked = torch.where(here, z.log_softmax(-1).gather(-1, ids[..., None])[..., 0], 0)
    return torch.cat([torch.zeros_like(picked[:, :1]), picked], 1), mask
