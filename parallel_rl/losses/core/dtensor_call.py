"""A call on logits that are a DTensor: what its shards say takes the place of options that would."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from parallel_rl.vocab.dtensor import shard_of_dtensor

if TYPE_CHECKING:
    from parallel_rl.losses.core.call import LossCall
    from parallel_rl.losses.core.options import VocabOptions


def on_shard(call: LossCall, options: VocabOptions) -> tuple[LossCall, VocabOptions]:
    """The call on this rank's shard of a DTensor, and the options with its columns.

    Raises:
        ValueError: placements that do not fit the groups, see `shard_of_dtensor`, or the options.
    """
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
        # top-k and top-p write in forward already, and autograd forbids that in a DTensor's shard, a view
        consume_logits=options.consume_logits and rule.top_k is None and rule.top_p is None,
    )  # fmt: skip
    return replace(call, output=shard.logits, cut_length=uneven), columns
