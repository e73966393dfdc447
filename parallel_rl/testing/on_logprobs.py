"""Check losses called on log-probs, which must give the numbers of the call on logits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from parallel_rl.groups import group_size
from parallel_rl.layout import CPLayout, SequenceLayout, valid_tokens
from parallel_rl.losses.core.base import LossFn
from parallel_rl.losses.core.call import LossCall, LossFunction
from parallel_rl.losses.core.component import Component, ComponentsLoss
from parallel_rl.losses.core.log_prob_rows import Values
from parallel_rl.losses.core.logits_source import layout_of
from parallel_rl.losses.core.requirements import Requirements
from parallel_rl.metrics import Metrics
from parallel_rl.statistics import Statistics
from parallel_rl.testing.cases import EVERY_AXIS, Case
from parallel_rl.vocab.stats import stats_of_shard


@dataclass(frozen=True, eq=False)
class OnLogProbs:
    """A case called on its logits' log-probs, in every form in turn, with NaN at places without loss.

    >>> OnLogProbs(Case("nll")).name
    'nll on log-probs'
    """

    case: Case

    @property
    def name(self) -> str:
        return f"{self.case.name} on log-probs"

    @property
    def axes(self) -> frozenset[str]:
        """Return a host's axes, without context ranks if the loss reads places in a sequence."""
        cut = {"context", "contiguous context"} if self.case.build().requirements.reads_places else set()
        return EVERY_AXIS - cut - {"prefix trees"}

    def build(
        self, *, vocab_size: int | None = None, cp_layout: CPLayout = "zigzag", consume_logits: bool = False
    ) -> LossFunction:
        """Build the loss; log-probs consume no logits."""
        return _OnLogProbs(self.case.build(vocab_size=vocab_size, cp_layout=cp_layout))


Pair = tuple[Tensor, Tensor]  # log-probs and entropy


class _Form(NamedTuple):
    """Arguments that a host would pass."""

    logprobs: Values
    entropy: Values
    data: Mapping[str, Values]
    cu_seqlens: Tensor | None = None


class _OnLogProbs(LossFunction):
    def __init__(self, loss_fn: LossFn) -> None:
        self.loss_fn = loss_fn

    @property
    def requirements(self) -> Requirements:
        needs = self.loss_fn.requirements
        return replace(needs, counted=False, collected=needs.statistics)

    @property
    def components(self) -> tuple[Component, ...]:
        return self.loss_fn.components if isinstance(self.loss_fn, ComponentsLoss) else ()

    def count(
        self,
        batches: Mapping[str, Tensor] | Sequence[Mapping[str, Tensor]],
        data_parallel_group: ProcessGroup | None = None,
    ) -> Statistics:
        return Statistics({})

    def run(self, call: LossCall) -> tuple[Tensor, Metrics]:
        form = self._form(call)
        return self.loss_fn.from_logprobs(
            form.logprobs, data=form.data, global_valid_seqs=call.global_valid_seqs,
            global_valid_toks=call.global_valid_toks, context_parallel_group=call.context_group,
            cu_seqlens=form.cu_seqlens, entropy=form.entropy, statistics=call.statistics,
        )  # fmt: skip

    def run_collect(self, call: LossCall) -> Statistics:
        form = self._form(call)
        return self.loss_fn.collect_from_logprobs(
            form.logprobs, data=form.data, global_valid_seqs=call.global_valid_seqs,
            global_valid_toks=call.global_valid_toks, context_parallel_group=call.context_group,
            cu_seqlens=form.cu_seqlens, entropy=form.entropy,
        )  # fmt: skip

    def _form(self, call: LossCall) -> _Form:
        logits, options = call.output, self.loss_fn.options
        assert isinstance(logits, Tensor)
        rows, width = call.data["input_ids"].shape
        layout = layout_of(call, logits, rows, width, options.cp_layout)
        keep = layout.shard(self.loss_fn.scored(call.data), fill=False)
        shard = options.shard(logits.shape[-1], call.tensor_group, entropy=True)
        stats = stats_of_shard(logits.flatten(0, -2), layout.take(call.data["input_ids"]), keep, shard)
        assert stats.entropy is not None
        values = torch.where(keep, stats.logprobs, torch.nan), torch.where(keep, stats.entropy, torch.nan)
        data = {name: call.data[name] for name in ("token_mask", "sample_mask", *self.requirements.names)}
        for name in self.requirements.given(call.data).names:
            data[name] = call.data[name]
        if group_size(call.context_group) == 1:
            return _whole(values, data, layout, call)
        return _held(values, data, layout, call) if options.cp_layout == "contiguous" else _cut(values, data, layout)


def _whole(values: Pair, data: Mapping[str, Tensor], layout: SequenceLayout, call: LossCall) -> _Form:
    """Return rows [B, S], or one flat row with its alignment padding after the last bound."""
    logprobs, entropy = (x.roll(1) for x in values)  # column 0 gets another row's end, and is never read
    if call.packed_sequences is None:
        return _Form(logprobs.view(layout.shape), entropy.view(layout.shape), data)
    bounds, rooms = call.packed_sequences.cu_seqlens, call.packed_sequences.cu_seqlens_padded
    if rooms is not None:
        bounds = torch.cat([rooms[:-1], rooms[-2:-1] + bounds.diff()[-1:]])
    return _Form(logprobs, entropy, _along(data, layout, shift=False), bounds)


def _held(values: Pair, data: Mapping[str, Tensor], layout: SequenceLayout, call: LossCall) -> _Form:
    """Cut rows between tokens, each log-prob at its token, after an exchange over context ranks."""

    def moved(x: Tensor) -> Tensor:
        return layout.shard(layout.unshard(x.nan_to_num(0.0), call.context_group), shift=False, fill=torch.nan)

    logprobs, entropy = (moved(x) for x in values)
    flat, packed = _along(data, layout, shift=False), call.packed_sequences
    if packed is not None:
        bounds = packed.cu_seqlens if packed.cu_seqlens_padded is None else packed.cu_seqlens_padded
        return _Form(logprobs, entropy, flat, bounds)
    shape = layout.local_shape
    rows = {name: x if data[name].dim() == 1 else x.unflatten(0, shape) for name, x in flat.items()}
    return _Form(logprobs.view(shape), entropy.view(shape), rows)


def _cut(values: Pair, data: Mapping[str, Tensor], layout: SequenceLayout) -> _Form:
    """Return this rank's responses: a tensor each, or rows if all have one length."""
    flat = _along({**data, "token_mask": valid_tokens(data)}, layout, shift=True)
    sizes = layout.offsets.diff().tolist()

    def split(x: Tensor) -> Values:
        return x.unflatten(0, layout.local_shape) if layout.local_shape[0] > 1 else list(x.split(sizes))

    cut: dict[str, Values] = {name: x if data[name].dim() == 1 else split(x) for name, x in flat.items()}
    cut["response_mask"] = cut.pop("token_mask")
    logprobs, entropy = (split(x) for x in values)
    return _Form(logprobs, entropy, cut)


def _along(data: Mapping[str, Tensor], layout: SequenceLayout, shift: bool) -> dict[str, Tensor]:
    """Reorder token fields to the local positions; sequence fields are unchanged."""
    flat = {name: x if x.dim() == 1 else layout.take(x, shift) for name, x in data.items()}
    return flat | {"token_mask": layout.shard(data["token_mask"], shift)}
