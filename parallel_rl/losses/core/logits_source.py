"""Logits as a source: of a vocabulary, of a scalar head, or of an `LMHeadInput`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from parallel_rl.agreement import shape_facts
from parallel_rl.groups import group_rank, group_size
from parallel_rl.labels import is_shifted, with_labels
from parallel_rl.layout import CPLayout, SequenceLayout
from parallel_rl.losses.core.checks import check_fields, check_lengths, check_predicts, check_temperature
from parallel_rl.losses.core.one_row import check_tree, head_of_edges, head_of_tokens, rows_of_tokens
from parallel_rl.losses.core.readers import check_declared
from parallel_rl.losses.core.source import Agreement, Placed, Source
from parallel_rl.replicated import Replicated
from parallel_rl.validation import checks_values
from parallel_rl.vocab.dtensor import shard_of_dtensor
from parallel_rl.vocab.linear.lm_head import check_whole, split_output

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch.distributed import ProcessGroup

    from parallel_rl.losses.core.batch import TokenBatch
    from parallel_rl.losses.core.call import LossCall
    from parallel_rl.losses.core.local_batch import LocalBatch
    from parallel_rl.losses.core.loss import Loss, Reader
    from parallel_rl.losses.core.options import VocabOptions
    from parallel_rl.losses.core.requirements import Requirements
    from parallel_rl.vocab.linear.lm_head import LMHeadInput


@dataclass(frozen=True, eq=False)
class Logits(Source):
    """Logits of a call with its data completed, or hidden states: `head`, whose stand-in is `template`."""

    call: LossCall
    reader: Reader
    head: LMHeadInput | None

    @classmethod
    def of(cls, loss: Loss, call: LossCall, output: Tensor | LMHeadInput) -> Logits:
        """Split a call's output and complete its data without reading values."""
        head, logits = split_output(output, call.tensor_group)
        reader, data = loss.reader, with_labels(call.data)
        return cls(loss, logits, replace(call, data=reader.add_fields(logits, data)), reader, head)

    def needs(self) -> Requirements:
        return needs_of(self.loss, self.call.data)

    def agreement(self, needs: Requirements, counts: dict[str, float]) -> Agreement:
        call, options = self.call, self.loss.options
        facts = shape_facts(self.template, options.vocab_size, options.vocab_start)
        if call.cut_length is not None:  # the parts need not be even
            facts["the number of local tokens"] = self.template.shape[0] * call.cut_length
        names = ("input_ids", "token_mask", "sample_mask", *(f.name for f in needs.fields if f.per != "local"))
        alike = Replicated([call.data], names, counts, shards=self.template)
        return Agreement((call.tensor_group, call.context_group), facts, alike)

    def check_reads(self, needs: Requirements) -> None:
        name, call = type(self.loss).__name__, self.call
        if self.head is not None:
            check_lm_head(name, needs, self.loss.options, self.head, call.tensor_group)
        check_predicts(name, self.loss.requirements, call.data)
        names = ("input_ids", "token_mask", "sample_mask", *needs.names)
        heads = {field: call.heads[field] for field in names if field in call.heads}
        check_declared(self.loss)
        self.reader.check_heads(self.head, heads, call.tensor_group)

    def place(self, needs: Requirements) -> Placed:
        call, logits = self.call, self.template
        rows, width = check_fields(call.data, needs, logits)
        layout = self.reader.layout(logits, rows, width, call.context_group)
        layout = layout or layout_of(call, logits, rows, width, self.loss.options.cp_layout)
        return Placed(call.data, needs, layout, call.data)

    def check_output(self, placed: Placed) -> None:
        data, layout, call = placed.data, placed.layout, self.call
        if checks_values(data["token_mask"]):
            if self.loss.options.per_sample:
                check_temperature(data, placed.needs)
            if call.packed_sequences is not None:
                check_lengths(self.loss.scored(data), layout.lengths)
        self.reader.check(self.template, data, call.tensor_group)
        if call.tree is not None:
            check_tree(call.tree, data, self.loss.scored(data))
        if self.head is not None and layout.tree is None:
            keep = layout.shard(self.loss.scored(data), placed.needs.shift, fill=False)
            self.head.check_rows(keep, call.tensor_group)

    def read(self, local: LocalBatch, placed: Placed) -> tuple[TokenBatch, Tensor | None]:
        group = self.call.tensor_group
        self.loss.options.check_spans(self.template, group)
        head, logits, layout = self.head, self.template, local.layout
        if head is not None:
            if layout.tree is not None and self.reader.reads_tree:
                return self.reader.read_head(local, head_of_edges(head, layout.tree, group), group)
            return self.reader.read_head(local, head_of_tokens(head, layout, group), group)
        if layout.tree is not None and not self.reader.reads_tree:
            logits = rows_of_tokens(logits, layout)
        return self.reader.read(local, logits, group), None


def needs_of(loss: Loss, data: Mapping[str, object]) -> Requirements:
    needs = loss.requirements.given(data)
    needs = needs.on_rows() if is_shifted(data) else needs
    needs = needs.with_kept_ids() if loss.options.truncation.kept_sets else needs
    return needs.with_temperature() if loss.options.per_sample else needs


@lru_cache(maxsize=8)
def kept_layout(
    rows: int,
    width: int,
    cp_size: int,
    cp_rank: int,
    cp_layout: CPLayout,
    uneven: bool,
    device: torch.device,
    inference: bool,
) -> SequenceLayout:
    """Lay out padded rows once; `inference` separates inference tensors, which no backward may use."""
    return SequenceLayout.padded(
        rows, width, cp_size=cp_size, cp_rank=cp_rank, cp_layout=cp_layout, uneven=uneven, device=device
    )


def layout_of(call: LossCall, logits: Tensor, rows: int, width: int, cp_layout: CPLayout) -> SequenceLayout:
    """Return the layout of logits [B, S/cp, V/tp], or packed [1, T/cp, V/tp], for data [rows, width]."""
    if logits.dim() != 3:
        raise ValueError(
            f"next_token_logits must be [B, S/cp, V/tp] (packed: [1, T/cp, V/tp]), got {list(logits.shape)}"
        )
    cp_size, cp_rank = group_size(call.context_group), group_rank(call.context_group)
    if call.tree is not None:
        layout = call.tree.layout(cp_size=cp_size, cp_rank=cp_rank, cp_layout=cp_layout, device=logits.device)
        if layout.shape != (rows, width):
            raise ValueError(
                f"the tree has sequences of shape {list(layout.shape)}, the data has {[rows, width]}; build it from them"
            )
    elif call.packed_sequences is not None:
        if logits.shape[0] != 1:
            raise ValueError(f"packed logits must be [1, T/cp, V/tp], got {list(logits.shape)}")
        total = logits.shape[1] * cp_size
        layout = call.packed_sequences.layout(width, total, cp_size, cp_rank, cp_layout, logits.device)
    else:
        kept = type(logits) is Tensor and not torch.compiler.is_compiling()  # no traced tensor
        kept = kept and not (logits.is_cuda and torch.cuda.is_current_stream_capturing())
        build = kept_layout if kept else kept_layout.__wrapped__
        uneven, inference = call.cut_length is not None, torch.is_inference_mode_enabled()
        layout = build(rows, width, cp_size, cp_rank, cp_layout, uneven, logits.device, inference)
    if layout.shape[0] != rows:
        raise ValueError(f"cu_seqlens describes {layout.shape[0]} sequences, the data has {rows} rows")
    if tuple(logits.shape[:2]) != layout.local_shape:
        looks_packed = call.packed_sequences is None and call.tree is None and logits.shape[0] == 1 < rows
        wrap = "; for a packed row wrap the loss: SequencePackingLossWrapper(loss_fn, cu_seqlens)"
        raise ValueError(
            f"the logits have leading shape {list(logits.shape[:2])}; data of shape {[rows, width]} over cp = {cp_size} "
            f"needs {list(layout.local_shape)}{wrap if looks_packed else ''}"
        )
    return layout


def on_shard(call: LossCall, options: VocabOptions) -> tuple[LossCall, VocabOptions]:
    """Take this rank's shard of a DTensor and its columns; ValueError if placements or options misfit."""
    shard = shard_of_dtensor(call.output, call.tensor_group, call.context_group)  # type: ignore[arg-type]
    if shard.cut and options.cp_layout != "contiguous":
        raise ValueError(
            f"logits that are Shard(1) are cut into contiguous parts, not as cp_layout = {options.cp_layout!r} does; make the "
            "loss with cp_layout='contiguous'"
        )
    size = shard.vocab_size if options.vocab_size is None else options.vocab_size
    if size > shard.vocab_size:
        raise ValueError(f"vocab_size = {size} is more than the logits have, {shard.vocab_size} over all tensor ranks")
    uneven = shard.length if shard.cut and call.packed_sequences is None else None
    rule = options.truncation
    columns = replace(
        options, vocab_size=size, vocab_start=min(shard.vocab_start, size),
        # top-k and top-p write in forward, which autograd forbids in a DTensor's shard, a view
        consume_logits=options.consume_logits and rule.top_k is None and rule.top_p is None,
    )  # fmt: skip
    return replace(call, output=shard.logits, cut_length=uneven), columns


def check_lm_head(
    loss: str, needs: Requirements, options: VocabOptions, head: LMHeadInput, tensor_group: ProcessGroup | None
) -> None:
    if needs.reads == "scalar":
        raise ValueError(
            f"{loss} reads one number a position, so it takes no LMHeadInput; give it the scalar head's output"
        )
    if needs.untruncated:
        raise ValueError(
            f"{options.truncation} with a KL to a reference reads two distributions of a token, the truncated one and "
            "the whole; an LMHeadInput gives one: take logits, or the KL against 'prev'"
        )
    if options.consume_logits:
        raise ValueError("consume_logits = True has no effect with an LMHeadInput, which has no logits; leave it out")
    if options.logit_scale != 1:
        raise ValueError(
            f"logit_scale = {options.logit_scale} is of logits; an LMHeadInput has its own, LMHeadInput(..., logit_scale=)"
        )
    if head.hidden.dim() != 3:
        raise ValueError(
            f"hidden must be [B, S/cp, D] (packed: [1, T/cp, D]; sequence_first: [S/cp, B, D]), got "
            f"{list(head.hidden.shape)}"
        )
    if head.mode == "in_forward" and not (needs.separates(options.truncation) or needs.reads == "rows"):
        why = " in this configuration"
        if needs.token_separable:
            why = f" with {options.truncation}, which changes the weight of the tokens that stay, or may do so,"
        raise ValueError(
            f"mode = 'in_forward' needs a loss that is a sum over tokens; {loss}{why} is not. 'auto' keeps or recomputes "
            "logits for it"
        )
    head.check(tensor_group, options.vocab_size)
    if needs.reads == "logits":
        check_whole(head, tensor_group)
