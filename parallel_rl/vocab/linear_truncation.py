"""The truncated policy of a fused head: what a chunk's rule or record drops becomes −inf before its statistics."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from parallel_rl.vocab.backends.torch_backend import _rows_per_block
from parallel_rl.vocab.threshold import kept_floor

if TYPE_CHECKING:
    from torch import Tensor

    from parallel_rl.vocab.linear.params import LinearParams
    from parallel_rl.vocab.truncation import Truncation


class HeadTruncation(NamedTuple):
    """Of all rows, in the gathered order."""

    rule: Truncation
    kept_ids: Tensor | None  # [N, K] recorded sets
    inv_t: Tensor  # [1, 1] float64
    vocab_size: int


def drop_(z: Tensor, case: LinearParams, places: Tensor) -> None:
    """Writes −inf over the logits [n, W] of some rows that the policy does not keep. A row's target counts as recorded."""
    cut = case.cut
    if cut is None:
        return
    if cut.kept_ids is None:
        rule = cut.rule
        floor = kept_floor(z, rule.top_k, rule.top_p, cut.inv_t, cut.vocab_size, case.group, case.backend)
        block = _rows_per_block(z) if z.shape[1] else max(1, len(z))
        for i in range(0, len(z), block):  # the mask is never whole
            z[i : i + block].masked_fill_(z[i : i + block] < floor[i : i + block], -torch.inf)
    elif z.shape[1]:
        local = torch.cat([cut.kept_ids[places], case.targets[places, None]], 1).to(torch.int64) - case.start
        here = (local >= 0) & (local < z.shape[1]) & (local + case.start >= 0)
        column = torch.where(here, local, 0)
        kept = torch.where(here, z.gather(1, column), -torch.inf)
        z.fill_(-torch.inf).scatter_reduce_(1, column, kept, "amax")
