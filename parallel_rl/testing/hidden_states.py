"""The law for losses on hidden states and the LM head in place of logits, with the same batches, cuts and truths."""

from __future__ import annotations

import math
from typing import NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor

from parallel_rl.counts import count_valid
from parallel_rl.groups import ParallelGroups
from parallel_rl.metrics import reduce_metrics
from parallel_rl.packing import SequencePackingLossWrapper
from parallel_rl.testing import layouts as layouts_of
from parallel_rl.testing.batches import ROWS, VOCAB, WIDTH, carries_loss, local_names, poisoned
from parallel_rl.testing.cases import Batch, Case, Expected, step_statistics
from parallel_rl.testing.layouts import Layout, Piece, cut_rows, make_groups
from parallel_rl.testing.sharded import local_logits, sharded_loss
from parallel_rl.vocab.linear.lm_head import LMHeadInput
from parallel_rl.vocab.linear.plan import LinearMode

BUDGET = 1 << 14  # bytes: several chunks, of which a few are kept
MODES: tuple[LinearMode, ...] = ("auto", "recompute", "resident")


def takes_head(case: Case) -> bool:
    """Whether the loss reads logits, or what comes of them."""
    return case.build().requirements.reads != "scalar"


def reads_log_probs(case: Case) -> bool:
    """Whether it reads what `token_stats` gives, not rows of logits."""
    return case.build().requirements.reads == "log-probs"


def reads_rows(case: Case) -> bool:
    """Whether it reads rows of logits, for which whole logits are not needed."""
    return case.build().requirements.reads == "rows"


def reads_one_distribution(case: Case) -> bool:
    """Not the truncated one and, for a KL, the whole."""
    return not case.build().requirements.untruncated


def _mode(case: Case, variant: int) -> LinearMode:
    if reads_rows(case):
        return MODES[variant % 2]  # it keeps no logits
    return MODES[variant % len(MODES)] if reads_log_probs(case) else "auto"


class Outcome(NamedTuple):
    share: float
    metrics: dict[str, float]
    hidden_error: float  # squared, of this rank's piece of the gradient
    weight: Tensor  # [V, D] this rank's part of the weight's gradient, zeros elsewhere
    stray: str
    place: tuple[int, int, int]


def head_of(batch: Batch) -> tuple[Tensor, Tensor]:
    """Hidden states [ROWS, WIDTH, D] and a weight [V, D] whose logits are those of the batch: W is orthogonal."""
    g = torch.Generator().manual_seed(3)
    weight = torch.linalg.qr(torch.randn(VOCAB, VOCAB, generator=g, dtype=torch.float64)).Q.contiguous()
    return batch.logits @ weight, weight


def _second_head(
    logits: Tensor, columns: list[int | None], piece: Piece, carries: Tensor, part: slice | None, variant: int
) -> LMHeadInput:
    """Hidden states and a head of logits [ROWS, WIDTH, V], of another width; `part` of the sequence under its parallelism."""
    g = torch.Generator().manual_seed(4)
    wide = torch.linalg.qr(torch.randn(VOCAB + 3, VOCAB, generator=g, dtype=torch.float64)).Q.T.contiguous()
    weight = torch.full((len(columns), VOCAB + 3), math.nan, dtype=torch.float64)
    real = [c for c in columns if c is not None]
    weight[: len(real)] = wide[real]
    rows = 1 if piece.cu_seqlens is not None else len(piece.rows)
    width: list[int | None] = list(range(VOCAB + 3))
    hidden = local_logits(logits @ wide, piece, width, carries).view(rows, -1, len(width))
    first, split = variant % 4 == 1, part is not None and part != slice(None)
    hidden = hidden[:, part] if split else hidden
    return LMHeadInput(
        hidden.transpose(0, 1).contiguous() if first else hidden,
        weight,
        sequence_first=first,
        sequence_parallel=split,
    )


def run_layout(
    layout: Layout,
    case: Case,
    batch: Batch,
    want: Expected,
    groups: ParallelGroups,
    place: tuple[int, int, int],
    variant: int,
) -> Outcome:
    """One optimizer step on this rank; what carries no loss is poisoned. `variant` chooses mode, order and splitting."""
    tp_rank, cp_rank, dp_rank = place
    loss_fn, columns = sharded_loss(case, layout, tp_rank, False, consume=False)
    whole, weight = head_of(batch)
    width: list[int | None] = list(range(whole.shape[-1]))
    rows = torch.full((len(columns), whole.shape[-1]), 1e4, dtype=torch.float64)
    real = [c for c in columns if c is not None]
    rows[: len(real)] = weight[real]
    head = rows.requires_grad_()
    data = poisoned(batch.data, case)
    mine = list(range(ROWS))[dp_rank * ROWS // layout.dp : (dp_rank + 1) * ROWS // layout.dp]
    size = len(mine) // layout.micro_batches
    pieces = [cut_rows(mine[i : i + size], batch.lengths, WIDTH, layout, cp_rank) for i in range(0, len(mine), size)]
    datas = [
        {name: value[piece.rows] for name, value in data.items() if name not in local_names(loss_fn)}
        for piece in pieces
    ]
    counts, carries = count_valid(datas, groups.data), carries_loss(batch.data, case)
    truth_of_hidden = want.gradient @ weight
    calls, leaves, cuts = [], [], []
    for piece, local in zip(pieces, datas, strict=True):
        shape = (len(piece.rows), -1) if piece.cu_seqlens is None else (1, -1)
        hidden, truth = (
            local_logits(x, piece, width, carries, poison=poison).view(*shape, len(width))
            for x, poison in ((whole, True), (truth_of_hidden, False))
        )
        split = layout.tp > 1 and variant % 2 == 0 and hidden.shape[1] % layout.tp == 0
        part = slice(None)
        if split:
            part = slice(tp_rank * hidden.shape[1] // layout.tp, (tp_rank + 1) * hidden.shape[1] // layout.tp)
        leaf = hidden[:, part].clone().requires_grad_()
        first, fields = variant % 3 == 0, cast("dict[str, Tensor | LMHeadInput]", {**local})
        for name in local_names(loss_fn):
            fields[name] = local_logits(data[name], piece, columns, carries).view(*shape, len(columns))
            if reads_rows(case) and variant % 4 < 3:
                fields[name] = _second_head(
                    data[name], columns, piece, carries, part if variant % 4 == 0 else None, variant
                )
        given = LMHeadInput(
            leaf.transpose(0, 1).contiguous() if first else leaf * 1,
            head,
            sequence_first=first,
            sequence_parallel=split,
            mode=_mode(case, variant),
            budget=BUDGET if reads_log_probs(case) or reads_rows(case) else None,
        )
        leaves.append(leaf)
        cuts.append(truth[:, part])
        call = loss_fn if piece.cu_seqlens is None else SequencePackingLossWrapper(
            loss_fn, piece.cu_seqlens, piece.cu_seqlens_padded
        )  # fmt: skip
        calls.append((call, (given, fields, *counts, groups.tp_rank, groups.tensor, groups.context)))
    statistics = step_statistics(calls, groups)
    share, metrics, squared, stray = 0.0, [], 0.0, ""
    for (fn, arguments), leaf, truth in zip(calls, leaves, cuts, strict=True):
        loss, parts = fn(*arguments, statistics=statistics)
        (loss * 4).backward()  # as a loss scale would
        share += loss.item()
        metrics.append(parts)
        assert leaf.grad is not None
        squared += (leaf.grad / 4 - truth).square().sum().item() / (1 if split else layout.tp)
        if bool((leaf.grad[truth == 0] != 0).any()):
            stray = f"{layout.name}: a row without loss has a gradient"
    assert head.grad is not None
    if bool(head.grad[len(real) :].any()):
        stray = f"{layout.name}: a padding row of the weight has a gradient"
    gradient = torch.zeros_like(weight)
    gradient[real] = head.grad[: len(real)] / 4
    reduced = {name: value.item() for name, value in reduce_metrics(metrics, groups).items()}
    return Outcome(share, reduced, squared, gradient, stray, place)


def layouts(world: int, number: int | None = None) -> list[Layout]:
    """TP and CP of 1 and 2; data parallelism, which is nothing to the head, in worlds of four only."""
    return [layout for layout in layouts_of.layouts(world, number) if layout.tp <= 2 and (world == 4 or layout.dp == 1)]


def check_world(
    rank: int, of_world: list[Layout], given: list[tuple[Case, Batch, Expected]]
) -> list[tuple[str, str, Outcome, Tensor]]:
    """(case, layout, outcome, the weight's gradient summed over the world)."""
    found = []
    world = dist.get_world_size()
    groups_of: dict[tuple[int, int], tuple[ParallelGroups, tuple[int, int, int]]] = {}
    variant = 0
    for layout in of_world:
        key = (layout.tp, layout.cp)
        if key not in groups_of:
            groups_of[key] = make_groups(rank, world, *key)
        for case, batch, want in given:
            outcome = run_layout(layout, case, batch, want, *groups_of[key], variant=variant)
            weight = outcome.weight.clone()
            dist.all_reduce(weight)
            found.append((case.name, layout.name, outcome, weight))
            variant += 1
        variant += len(given) % 2 == 0  # a case meets every variant
    return found


def faults(
    batch: Batch, want: Expected, of_layout: dict[str, list[tuple[Outcome, Tensor]]], tolerance: float
) -> list[str]:
    """What breaks the law, over all layouts of a world."""
    whole, weight = head_of(batch)
    of_weight = want.gradient.flatten(0, 1).T @ whole.flatten(0, 1)
    of_hidden = (want.gradient @ weight).norm().item()
    wrong = []
    for layout, outcomes in of_layout.items():
        wrong += [outcome.stray for outcome, _ in outcomes if outcome.stray]
        loss = sum(outcome.share for outcome, _ in outcomes if outcome.place[0] == 0)
        errors = {
            "loss": abs(loss - want.loss) / abs(want.loss),
            "gradient of the hidden states": math.sqrt(sum(o.hidden_error for o, _ in outcomes)) / of_hidden,
            "gradient of the weight": ((outcomes[0][1] - of_weight).norm() / of_weight.norm()).item(),
        }
        metrics = outcomes[0][0].metrics
        errors |= {
            name: abs(metrics[name] - value) / max(abs(value), 1e-2)
            for name, value in want.metrics.items()
            if metrics[name] != value
        }
        wrong += [f"{layout}: {name} off by {error:.1e}" for name, error in errors.items() if not error <= tolerance]
    return wrong
