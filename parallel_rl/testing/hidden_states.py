"""Check the law for losses on hidden states and the LM head, with the same batches and cuts."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from parallel_rl.metrics import reduce_metrics
from parallel_rl.testing import layouts as layouts_of
from parallel_rl.testing.batches import local_names, poisoned
from parallel_rl.testing.cases import Batch, Expected, Subject, Trial
from parallel_rl.testing.layouts import Layout, Piece, Rank, make_groups
from parallel_rl.testing.step import Step, cut_step, local_positions
from parallel_rl.vocab.linear.lm_head import LMHeadInput
from parallel_rl.vocab.linear.plan import LinearMode

BUDGET = 1 << 14  # bytes: several chunks, some of them kept
MODES: tuple[LinearMode, ...] = ("auto", "recompute", "resident")


def takes_head(case: Subject) -> bool:
    return case.build().requirements.reads != "scalar"


def reads_log_probs(case: Subject) -> bool:
    return case.build().requirements.reads == "log-probs"


def reads_rows(case: Subject) -> bool:
    return case.build().requirements.reads == "rows"


def reads_one_distribution(case: Subject) -> bool:
    """Return whether the loss reads one distribution, not a truncated and a whole one."""
    return not case.build().requirements.untruncated


def _mode(case: Subject, variant: int) -> LinearMode:
    if reads_rows(case):
        return MODES[variant % 2]  # keeps no logits
    return MODES[variant % len(MODES)] if reads_log_probs(case) else "auto"


class Outcome(NamedTuple):
    share: float
    metrics: dict[str, float]
    hidden_error: float  # squared, of this rank's piece of the gradient
    weight: Tensor  # [V, D] this rank's part of the weight's gradient, zeros elsewhere
    stray: str
    place: tuple[int, int, int]


def head_of(batch: Batch) -> tuple[Tensor, Tensor]:
    """Make hidden states [B, S, D] and an orthogonal weight [V, D] with the batch's logits."""
    g, vocab = torch.Generator().manual_seed(3), batch.logits.shape[-1]
    weight = torch.linalg.qr(torch.randn(vocab, vocab, generator=g, dtype=torch.float64)).Q.contiguous()
    return batch.logits @ weight, weight


def _second_head(logits: Tensor, step: Step, piece: Piece, part: slice | None, variant: int) -> LMHeadInput:
    """Make hidden states and a head of another width for logits [B, S, V]; `part` of a sequence."""
    g, vocab = torch.Generator().manual_seed(4), logits.shape[-1]
    wide = torch.linalg.qr(torch.randn(vocab + 3, vocab, generator=g, dtype=torch.float64)).Q.T.contiguous()
    weight = torch.full((len(step.columns), vocab + 3), math.nan, dtype=torch.float64)
    real = [c for c in step.columns if c is not None]
    weight[: len(real)] = wide[real]
    hidden = local_positions(logits @ wide, piece, list(range(vocab + 3)), step.carries).view(*piece.shape, -1)
    first, split = variant % 4 == 1, part is not None and part != slice(None)
    hidden = hidden[:, part] if split else hidden
    device = step.rank.device
    return LMHeadInput(
        (hidden.transpose(0, 1).contiguous() if first else hidden).to(device),
        weight.to(device),
        sequence_first=first,
        sequence_parallel=split,
    )


def run_layout(layout: Layout, trial: Trial, rank: Rank, variant: int) -> Outcome:
    """Run one optimizer step on this rank, poisoned; `variant` chooses mode, order and splitting."""
    case, batch, want, _ = trial
    step = cut_step(trial, layout, rank, torch.float64)
    whole, weight = head_of(batch)
    real = [c for c in step.columns if c is not None]
    head = torch.full((len(step.columns), whole.shape[-1]), 1e4, dtype=torch.float64)
    head[: len(real)] = weight[real]
    head = head.to(rank.device).requires_grad_()
    outputs, leaves, truths, fields = [], [], [], []
    data = poisoned(batch.data, step.loss_fn)
    for piece in step.pieces:
        hidden, truth = (
            local_positions(x, piece, list(range(whole.shape[-1])), step.carries, poison).view(*piece.shape, -1)
            for x, poison in ((whole, True), (want.gradient @ weight, False))
        )
        split = layout.tp > 1 and variant % 2 == 0 and hidden.shape[1] % layout.tp == 0
        part = slice(None)
        if split:
            tp_rank = rank.place[0]
            part = slice(tp_rank * hidden.shape[1] // layout.tp, (tp_rank + 1) * hidden.shape[1] // layout.tp)
        leaf = hidden[:, part].to(rank.device, copy=True).requires_grad_()
        first = variant % 3 == 0
        heads: dict[str, LMHeadInput] = {}
        if reads_rows(case) and variant % 4 < 3:
            kept = part if variant % 4 == 0 else None
            names = local_names(step.loss_fn)
            heads = {name: _second_head(data[name], step, piece, kept, variant) for name in names}
        fields.append(heads)
        outputs.append(
            LMHeadInput(
                leaf.transpose(0, 1).contiguous() if first else leaf * 1,
                head,
                sequence_first=first,
                sequence_parallel=split,
                mode=_mode(case, variant),
                budget=BUDGET if reads_log_probs(case) or reads_rows(case) else None,
            )
        )
        leaves.append(leaf)
        truths.append((truth[:, part], 1 if split else layout.tp))
    share, metrics, squared, stray = 0.0, [], 0.0, ""
    for (loss, parts), leaf, (truth, copies) in zip(step.run(outputs, fields), leaves, truths, strict=True):
        (loss * 4).backward()  # like a loss scale
        share += loss.item()
        metrics.append(parts)
        assert leaf.grad is not None
        grad = leaf.grad.cpu() / 4
        squared += (grad - truth).square().sum().item() / copies
        if bool((grad[truth == 0] != 0).any()):
            stray = f"{layout.name}: a row without loss has a gradient"
    assert head.grad is not None
    if bool(head.grad[len(real) :].any()):
        stray = f"{layout.name}: a padding row of the weight has a gradient"
    gradient = torch.zeros_like(weight)
    gradient[real] = head.grad[: len(real)].cpu() / 4
    reduced = {name: value.item() for name, value in reduce_metrics(metrics, rank.groups).items()}
    return Outcome(share, reduced, squared, gradient, stray, rank.place)


def layouts(world: int, number: int | None = None) -> list[Layout]:
    """List layouts with TP and CP of 1 and 2; with data parallelism in worlds of four only."""
    return [layout for layout in layouts_of.layouts(world, number) if layout.tp <= 2 and (world == 4 or layout.dp == 1)]


def check_world(rank: int, of_world: list[Layout], trials: list[Trial]) -> list[tuple[str, str, Outcome, Tensor]]:
    """Return (case, layout, outcome, the weight's gradient summed over the world)."""
    results = []
    world = dist.get_world_size()
    ranks: dict[tuple[int, int], Rank] = {}
    variant = 0
    for layout in of_world:
        key = (layout.tp, layout.cp)
        if key not in ranks:
            ranks[key] = Rank(*make_groups(rank, world, *key))
        for trial in trials:
            outcome = run_layout(layout, trial, ranks[key], variant)
            weight = outcome.weight.clone()
            dist.all_reduce(weight)
            results.append((trial.case.name, layout.name, outcome, weight))
            variant += 1
        variant += len(trials) % 2 == 0  # each case meets every variant
    return results


def faults(
    batch: Batch, want: Expected, of_layout: dict[str, list[tuple[Outcome, Tensor]]], tolerance: float
) -> list[str]:
    """List violations of the law over a world's layouts."""
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
