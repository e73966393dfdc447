"""Layouts of a whole optimizer step, and its ragged, unevenly masked rows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

ROWS, MICRO_BATCHES, WIDTH = 8, 4, 16  # of the whole step; eight data ranks have a micro-batch each


class StepLayout(NamedTuple):
    """One way to run the step: `vp` model chunks a pipeline stage, `micro` micro-batches in all."""

    tp: int = 1
    cp: int = 1
    pp: int = 1
    dp: int = 1
    vp: int = 1
    ep: int = 1
    etp: int | None = None
    sp: bool = False
    packed: bool = False
    per_token: bool = True
    recompute: bool = False
    micro: int = MICRO_BATCHES
    balance: bool = True  # the losses that routers add

    @property
    def world(self) -> int:
        """Return the number of ranks."""
        return self.tp * self.cp * self.pp * self.dp

    @property
    def axes(self) -> frozenset[str]:
        """Return the differences from one process with one micro-batch of padded rows."""
        used = {
            "tensor": self.tp > 1,
            "sequence": self.sp,
            "context": self.cp > 1,
            "pipeline": self.pp > 1,
            "virtual stages": self.vp > 1,
            "expert": self.ep > 1,
            "expert tensor": self.etp not in (None, self.tp),
            "data": self.dp > 1,
            "micro-batches": self.micro > 1,
            "packed": self.packed,
            "recompute": self.recompute,
            "calculate_per_token_loss=False": not self.per_token,
        }
        return frozenset(name for name, differs in used.items() if differs)

    @property
    def name(self) -> str:
        """Return the short spelling, as in `tp2.cp2.sp.packed.mb4`."""
        sizes = {"tp": self.tp, "cp": self.cp, "pp": self.pp, "vp": self.vp, "ep": self.ep, "dp": self.dp}
        parts = [f"{name}{size}" for name, size in sizes.items() if size > 1]
        parts += [f"etp{self.etp}"] if self.etp not in (None, self.tp) else []
        parts += ["sp"] if self.sp else []
        parts += ["packed" if self.packed else "padded", f"mb{self.micro}"]
        parts += [] if self.per_token else ["mean"]
        parts += ["recompute"] if self.recompute else []
        parts += [] if self.balance else ["no-balance"]
        return ".".join(parts)

    def truth(self, balanced: bool, local: bool = False) -> StepLayout:
        """Return the one-process run that this layout is compared with.

        Args:
            balanced: routers add losses, which are defined per micro-batch and count all tokens of their rows.
            local: micro-batches weigh differently, so the one-process run uses the same number.
        """
        if balanced and self.balance:
            return StepLayout(packed=self.packed, per_token=self.per_token, micro=self.micro)
        micro = self.micro if local else 1
        return StepLayout(per_token=self.per_token, micro=micro, balance=self.balance)


def default_layouts(experts: bool = False, balanced: bool = False) -> list[StepLayout]:
    """List ten layouts on 1, 2 and 4 ranks, and four more for a mixture of experts.

    >>> [layout.name for layout in default_layouts()][:2]
    ['padded.mb4', 'packed.mb4.mean.recompute']
    """
    plain = StepLayout()
    dense = [
        plain._replace(balance=not balanced),
        plain._replace(packed=True, per_token=False, recompute=True),
        StepLayout(tp=2),
        StepLayout(tp=2, sp=True, packed=True),
        StepLayout(cp=2, per_token=False),
        StepLayout(pp=2),
        StepLayout(dp=2, packed=True, per_token=False),
        StepLayout(tp=2, cp=2, sp=True, packed=True),
        StepLayout(tp=2, pp=2, vp=2, recompute=True, per_token=False),
        StepLayout(cp=2, dp=2, packed=True),
    ]
    of_experts = [
        StepLayout(dp=2, ep=2),
        StepLayout(cp=2, ep=2, packed=True),
        StepLayout(tp=2, dp=2, ep=2, etp=1, sp=True),
        StepLayout(pp=2, dp=2, ep=2, per_token=False),
    ]
    if not experts:
        return dense
    # Megatron trains experts under tensor parallelism with sequence parallelism only
    return [layout._replace(sp=layout.tp > 1) for layout in dense + of_experts]


def check_layout(layout: StepLayout) -> None:
    """Raise ValueError for sizes that do not divide each other."""
    experts = (layout.tp if layout.etp is None else layout.etp) * layout.ep
    stage = layout.tp * layout.cp * layout.dp
    if layout.vp > 1 and layout.pp == 1:
        raise ValueError(f"{layout.name}: vp = {layout.vp} needs pp above 1, whose stages it divides into chunks")
    if layout.sp and layout.tp == 1:
        raise ValueError(f"{layout.name}: sp needs tp above 1, over whose ranks it cuts sequences")
    if stage % experts:
        raise ValueError(
            f"{layout.name}: ep {layout.ep} × etp {experts // layout.ep} does not divide the {stage} ranks of a stage"
        )
    if layout.micro % layout.dp or ROWS % layout.micro:
        raise ValueError(
            f"{layout.name}: micro = {layout.micro} must be a multiple of dp = {layout.dp} and divide {ROWS} rows"
        )
    if layout.vp > 1 and layout.micro // layout.dp % layout.pp:
        raise ValueError(
            f"{layout.name}: with interleaved stages, micro / dp = {layout.micro // layout.dp} must be a multiple of pp = "
            f"{layout.pp}"
        )
    if WIDTH % (2 * layout.cp * layout.tp):
        raise ValueError(
            f"{layout.name}: rows of {WIDTH} tokens cannot be cut for cp = {layout.cp} and tp = {layout.tp}"
        )


_LENGTHS = (16, 8, 12, 12, 8, 16, 16, 8)  # neighbours fill a packed row of 24: padding would differ by layout
_KEPT = (0.9, 0.3, 0.5, 0.2, 0.9, 0.9, 0.1, 0.7)  # of each row's tokens; neighbours share a micro-batch
Rows = dict[str, Tensor]


def make_rows(vocabulary: int) -> Rows:
    """Draw eight rows of token ids and masks [8, 16]; two rows have loss only in their second half."""
    g = torch.Generator().manual_seed(11)
    column, lengths = torch.arange(WIDTH), torch.tensor(_LENGTHS)
    kept = torch.rand(ROWS, WIDTH, generator=g) < torch.tensor(_KEPT)[:, None]
    kept[0, : WIDTH // 2] = kept[3, : WIDTH // 2] = False
    mask = kept & (column < lengths[:, None])
    mask[torch.arange(ROWS), lengths - 1] = True  # every row has a token with loss
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
    """Return the positions of a packed micro-batch; pipeline stages exchange one shape."""
    return 12 * rows if rows % 2 == 0 else WIDTH * rows


def megatron_rows(batches: list[Rows], dtype: torch.dtype) -> Iterator[dict[str, Tensor | None]]:
    """Iterate over micro-batches as Megatron's datasets give them: labels and masks of the next token."""
    for batch in batches:
        ids, mask = batch["input_ids"], batch["token_mask"] * batch["sample_mask"][:, None]
        yield {
            "tokens": ids.clone(),
            "labels": torch.nn.functional.pad(ids[:, 1:], (0, 1)),
            "loss_mask": torch.nn.functional.pad(mask[:, 1:], (0, 1)).to(dtype),
            "attention_mask": None,
            "position_ids": torch.arange(ids.shape[1]).expand_as(ids).contiguous(),
        }
