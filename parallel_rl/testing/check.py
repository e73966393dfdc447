"""`check_law`: any loss, on real ranks, against one float64 process, with a diagnosis."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from parallel_rl.losses.core.base import LossFn
from parallel_rl.testing import faults
from parallel_rl.testing.alone import Alone, check_alone, trial_of
from parallel_rl.testing.batches import make_batch, with_fields
from parallel_rl.testing.cases import Batch, Case, Expected, Subject, Trial, dense_error
from parallel_rl.testing.compare import errors
from parallel_rl.testing.diagnosis import Finding, of_layouts, of_one_process, without_consequences
from parallel_rl.testing.layouts import Layout, default_layouts
from parallel_rl.testing.observe import Observation, observe
from parallel_rl.testing.pool import WorldError, run_world
from parallel_rl.testing.report import Report, Row
from parallel_rl.testing.sharded import Outcome, check_world
from parallel_rl.testing.subjects import SeedCall, sizes_of, subject_of

WORLDS = (1, 2, 4)
_LOW_PRECISION_FACTOR = 2.0  # what sharding may add to the error of unsharded low precision

DenseLoss = Callable[[Tensor, "dict[str, Tensor]"], Tensor]


@dataclass(frozen=True)
class Limits:
    """How exact and how long.

    >>> Limits(timeout=10).tolerance
    1e-09

    Attributes:
        tolerance: relative, of loss, gradient and metrics in float64.
        timeout: seconds for all layouts of one number of ranks.
    """

    tolerance: float = 1e-9
    timeout: float = 120.0


LIMITS = Limits()


def check_law(
    loss: str | type[LossFn] | LossFn | Subject | SeedCall,
    worlds: Sequence[int] = WORLDS,
    *,
    layouts: Sequence[Layout] | None = None,
    reference: DenseLoss | None = None,
    limits: Limits = LIMITS,
) -> Report:
    """Check that a loss gives the same loss, gradient and metrics on every layout, on real gloo ranks of this machine.

    The truth is the loss itself on one float64 process with the whole batch, or `reference`. The batch is ragged, has empty
    rows and micro-batches, and NaN, inf and wild ids wherever no loss is carried. Beside the layouts, one process checks finite
    differences, permuted and doubled rows, a batch that is masked throughout, and what the loss claims of itself.

        report = check_law(MyLoss)
        print(report)              # what breaks, by what factor, and what mends it
        report.raise_if_broken()   # in a test

    >>> check_law("nll", worlds=[1]).ok
    True

    Args:
        loss: a registered name, a subclass of `LossFn`, an instance with its options, a `Case`; or any function with the call
            of `LossFn`, see `SeedLoss`. It may be defined in a notebook.
        worlds: numbers of ranks, 1 to 8, each with the layouts that `default_layouts` has for it.
        layouts: these in place of the default ones.
        reference: (logits [B, S, V], data) → the loss, dense and in float64; the gradient follows by autograd.
        limits: tolerance and timeout.

    Raises:
        ValueError: what is no loss; a number of ranks that this machine does not start.
    """
    began, subject = time.monotonic(), subject_of(loss)
    of_world = layouts_of(worlds, subject) if layouts is None else _by_world(layouts)
    batch = batch_for(subject)
    found = _alone(subject, batch, limits)
    findings = of_one_process(found)
    if found.want is None:
        return Report(subject.name, findings=tuple(findings), seconds=time.monotonic() - began)
    if reference is not None:
        found = found._replace(want=_referenced(reference, batch, found.want))
    trial = trial_of(subject, batch, found)
    seen: list[Observation] = []
    for world, of_this in of_world.items():
        seen += run_layouts(trial, world, of_this, limits)
    findings = without_consequences([*findings, *of_layouts(trial, _finite(trial, seen, limits), limits.tolerance)])
    if not findings and max(of_world) > 1:
        findings += _low_precision(trial, max(of_world), of_world[max(of_world)][:1], limits)
    rows = tuple(Row.of(one, findings, limits.tolerance) for one in seen)
    return Report(subject.name, rows, tuple(findings), _skipped(subject, found), time.monotonic() - began)


def layouts_of(worlds: Sequence[int], subject: Subject) -> dict[int, list[Layout]]:
    """The default layouts on these numbers of ranks, of those that the subject can be run on."""
    return {world: [one for one in default_layouts(world) if runs_on(subject, one)] for world in worlds}


def runs_on(subject: Subject, layout: Layout) -> bool:
    """Whether the subject's call can say all that the layout asks for."""
    return layout.axes <= subject.axes and (layout.cp_layout == "zigzag" or "contiguous context" in subject.axes)


def _by_world(layouts: Sequence[Layout]) -> dict[int, list[Layout]]:
    found: dict[int, list[Layout]] = {}
    for layout in layouts:
        found.setdefault(layout.tp * layout.cp * layout.dp, []).append(layout)
    return found


def batch_for(subject: Subject, dtype: torch.dtype = torch.float64) -> Batch:
    """A batch with every field that the loss reads."""
    loss_fn = subject.build()
    kind = type(loss_fn) if isinstance(loss_fn, LossFn) else LossFn
    truncated = isinstance(loss_fn, LossFn) and bool(loss_fn.options.truncation)
    batch = make_batch(5, False, kind, dtype, truncated=truncated, sizes=sizes_of(subject))
    return with_fields(batch, loss_fn)


def _alone(subject: Subject, batch: Batch, limits: Limits) -> Alone:
    try:
        return run_world(1, check_alone, subject, batch, timeout=limits.timeout)[0]
    except WorldError as error:
        return Alone(None, first_line(error))


def run_layouts(trial: Trial, world: int, layouts: Sequence[Layout], limits: Limits) -> list[Observation]:
    """Run a trial on layouts of `world` ranks; a rank that dies or hangs is an observation, too."""
    if not layouts:
        return []
    try:
        of_ranks = run_world(world, check_world, list(layouts), [trial], torch.float64, True, timeout=limits.timeout)
    except WorldError as error:
        return [Observation(layout, error=first_line(error)) for layout in layouts]
    return [
        observe(trial, layout, [entries[i][2] for entries in of_ranks], limits.tolerance)
        for i, layout in enumerate(layouts)
    ]


def _finite(trial: Trial, seen: Sequence[Observation], limits: Limits) -> list[Observation]:
    """Run layouts whose result is not finite again, without NaN in the batch: the numbers then tell more."""
    again = [] if trial.clean else [one.layout for one in seen if not (one.error or math.isfinite(one.gradient))]
    clean = [
        one
        for world, layouts in _by_world(again).items()
        for one in run_layouts(trial._replace(clean=True), world, layouts, limits)
    ]
    better = {one.layout: one for one in clean if one.broken(limits.tolerance)}
    return [better.get(one.layout, one) for one in seen]


def first_line(error: WorldError) -> str:
    """What the ranks said, in a line."""
    said = sorted(set(error.errors.values()))
    return "; ".join(said) if said else str(error).splitlines()[0]


def _referenced(reference: DenseLoss, batch: Batch, own: Expected) -> Expected:
    logits = batch.logits.clone().requires_grad_()
    loss = reference(logits, batch.data)
    [gradient] = torch.autograd.grad(loss, logits)
    return Expected(loss.item(), gradient, own.metrics)


def _low_precision(trial: Trial, world: int, layouts: Sequence[Layout], limits: Limits) -> list[Finding]:
    """Whether bfloat16 logits hurt the sharded loss more than the unsharded one."""
    batch = batch_for(trial.case, torch.bfloat16)
    alone = run_world(1, check_alone, trial.case, batch, timeout=limits.timeout)[0]
    if alone.want is None:
        return []
    low = Trial(trial.case, batch, alone.want)
    dense_loss, dense_gradient = dense_error(low, torch.bfloat16)
    found = []
    of_ranks = run_world(world, check_world, list(layouts), [low], torch.bfloat16, True, timeout=limits.timeout)
    for i, layout in enumerate(layouts):
        outcomes: list[Outcome] = [entries[i][2] for entries in of_ranks]
        loss, gradient = errors(low, outcomes)
        if not (loss <= 2 * dense_loss + 1e-6 and gradient <= _LOW_PRECISION_FACTOR * dense_gradient + 1e-6):
            text = (
                f"With bfloat16 logits on {layout.name} the loss is off by {loss:.1e} and the gradient by {gradient:.1e}; "
                f"unsharded they are {dense_loss:.1e} and {dense_gradient:.1e} off."
            )
            found.append(Finding(faults.PRECISION, " × ".join(sorted(layout.axes)), text, (layout.name,)))
    return found


def _skipped(subject: Subject, found: Alone) -> tuple[str, ...]:
    checks = {"finite differences": found.derivative, "permuted rows": found.permuted, "doubled rows": found.doubled}
    skipped = [name for name, value in checks.items() if math.isnan(value)]
    missing = sorted(Case("nll").axes - subject.axes)
    return (*skipped, *(f"{axis}: the call cannot tell of it" for axis in missing))
