"""Which vocabulary columns this rank's shard holds."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from parallel_rl.groups import group_rank, group_size

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class ShardRange(NamedTuple):
    """Global id of the shard's first column, how many of its columns are real, and the true vocabulary size."""

    start: int
    valid: int
    vocab_size: int


def shard_range(
    width: int, group: ProcessGroup | None = None, vocab_size: int | None = None, vocab_start: int | None = None
) -> ShardRange:
    """The columns of a shard of `width` columns, told on the host without communication.

    Even shards, padded or not (`width · tp >= vocab_size`, Megatron), start at `rank · width`. Narrower ones follow
    `torch.chunk` (DTensor): `ceil(vocab_size / tp)` columns a rank, the last ranks fewer. Any other split names its
    `vocab_start`. Columns at or beyond `vocab_size` are padding: they never enter a softmax and get no gradient.

    Raises:
        ValueError: a width that fits neither rule, `vocab_size` < 1 or `vocab_start` outside [0, vocab_size].
    """
    tp, rank = group_size(group), group_rank(group)
    if vocab_size is None:
        if vocab_start is not None:
            raise ValueError(
                f"vocab_start = {vocab_start} needs vocab_size, the true number of columns over all shards"
            )
        return ShardRange(rank * width, width, tp * width)
    if vocab_size < 1:
        raise ValueError(f"vocab_size = {vocab_size} must be at least 1")
    if vocab_start is not None:
        if not 0 <= vocab_start <= vocab_size:
            raise ValueError(f"vocab_start = {vocab_start} must lie in [0, vocab_size = {vocab_size}]")
        start = vocab_start
    elif width * tp >= vocab_size:
        start = rank * width
    else:
        chunk = -(-vocab_size // tp)
        start = min(rank * chunk, vocab_size)
        if width != min(chunk, vocab_size - start):
            raise ValueError(
                f"the logits' last dimension is {width} on tensor rank {rank} of {tp}, but vocab_size = {vocab_size} splits "
                f"into {chunk} columns a rank ({min(chunk, vocab_size - start)} here); give vocab_start for another split"
            )
    return ShardRange(start, max(0, min(width, vocab_size - start)), vocab_size)
