"""The step's rows: ragged, unevenly masked, cut into micro-batches of few and of many tokens."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from parallel_rl.testing.whole_step.layouts import ROWS, WIDTH, StepLayout

# neighbours fill a packed row of 24 positions without padding, whose place would depend on the layout
_LENGTHS = (16, 8, 12, 12, 8, 16, 16, 8)
_KEPT = (0.9, 0.3, 0.5, 0.2, 0.9, 0.9, 0.1, 0.7)  # of each row's tokens; neighbours share a micro-batch
Rows = dict[str, Tensor]


def make_rows(vocabulary: int) -> Rows:
    """Draw eight rows of token ids with masks [8, 16]; the second half of two rows carries all of their loss."""
    g = torch.Generator().manual_seed(11)
    column, lengths = torch.arange(WIDTH), torch.tensor(_LENGTHS)
    kept = torch.rand(ROWS, WIDTH, generator=g) < torch.tensor(_KEPT)[:, None]
    kept[0, : WIDTH // 2] = kept[3, : WIDTH // 2] = False
    mask = kept & (column < lengths[:, None])
    mask[torch.arange(ROWS), lengths - 1] = True  # every row has a token that carries loss
    return {
        "input_ids": torch.randint(0, vocabulary, (ROWS, WIDTH), generator=g),
        "token_mask": mask.double(),
        "sample_mask": torch.ones(ROWS, dtype=torch.float64),
        "lengths": lengths,
    }


def micro_batches(rows: Rows, layout: StepLayout, data_rank: int) -> list[Rows]:
    """Return a data rank's micro-batches: every dp-th of the step's."""
    size = ROWS // layout.micro
    cuts = [{name: field[i * size : (i + 1) * size] for name, field in rows.items()} for i in range(layout.micro)]
    return cuts[data_rank % layout.dp :: layout.dp]  # in a job, data ranks of one process's run hold the same rows


def packed_width(rows: int) -> int:
    """Return the positions of a packed micro-batch of so many rows: the same for each, since stages exchange one shape."""
    return 12 * rows if rows % 2 == 0 else WIDTH * rows


def megatron_rows(batches: list[Rows], dtype: torch.dtype) -> Iterator[dict[str, Tensor | None]]:
    """Iterate over micro-batches as Megatron's datasets give them: labels and masks are those of the next token."""
    for batch in batches:
        ids, mask = batch["input_ids"], batch["token_mask"] * batch["sample_mask"][:, None]
        yield {
            "tokens": ids.clone(),
            "labels": torch.nn.functional.pad(ids[:, 1:], (0, 1)),
            "loss_mask": torch.nn.functional.pad(mask[:, 1:], (0, 1)).to(dtype),
            "attention_mask": None,
            "position_ids": torch.arange(ids.shape[1]).expand_as(ids).contiguous(),
        }
