"""`check_law` and `law_test`: any loss, on real ranks, against one float64 process, with a diagnosis."""

from __future__ import annotations

import functools
import math
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ParamSpec

import torch
from torch import Tensor

from parallel_rl.losses.core.base import LossFn
from parallel_rl.testing import faults
from parallel_rl.testing.alone import Alone, trial_of
from parallel_rl.testing.batches import make_batch, with_fields, with_shared_prefixes
from parallel_rl.testing.cases import Batch, Case, Expected, Subject, Trial, dense_error, empty_rows_on_purpose
from parallel_rl.testing.diagnosis import Finding, of_layouts, of_one_process, without_consequences
from parallel_rl.testing.layouts import Layout, default_layouts
from parallel_rl.testing.observe import Observation, observe
from parallel_rl.testing.pool import WorldError, preload
from parallel_rl.testing.report import Report, Row
from parallel_rl.testing.step import Outcome
from parallel_rl.testing.subjects import Loss, PoolRunner, Runner, sizes_of, subject_of


def errors(trial: Trial, outcomes: list[Outcome]) -> tuple[float, float]:
    """Return relative errors of the loss and of the gradient's norm, from the ranks' outcomes of a layout."""
    first = [outcome for outcome in outcomes if outcome.place[0] == 0]
    want, truth = trial.want, sum(float(outcome.maps[1].sum()) for outcome in outcomes)
    gradient = math.sqrt(sum(outcome.squared_error for outcome in outcomes) / max(truth, 1e-300))
    return abs(sum(outcome.share for outcome in first) - want.loss) / abs(want.loss), gradient


def list_faults(trial: Trial, of_layout: dict[str, list[Outcome]], tolerance: float) -> list[str]:
    """List violations of the law over a world's layouts."""
    wrong, want = [], trial.want
    for layout, outcomes in of_layout.items():
        wrong += [outcome.stray for outcome in outcomes if outcome.stray]
        first = [outcome for outcome in outcomes if outcome.place[0] == 0]
        for outcome in outcomes:
            twin = next(other for other in first if other.place[1:] == outcome.place[1:])
            if (outcome.share, outcome.metrics) != (twin.share, twin.metrics):
                wrong.append(f"{layout}: tensor ranks differ: {outcome.share} and {twin.share}")
        loss, gradient = errors(trial, outcomes)
        if not loss <= tolerance:
            wrong.append(f"{layout}: loss off by {loss:.1e}")
        if not gradient <= tolerance:
            wrong.append(f"{layout}: gradient off by {gradient:.1e}")
        if set(outcomes[0].metrics) != set(want.metrics):
            wrong.append(f"{layout}: metrics {sorted(outcomes[0].metrics)} instead of {sorted(want.metrics)}")
        for name, value in want.metrics.items():
            got = outcomes[0].metrics.get(name, math.nan)
            if not (got == value or abs(got - value) <= tolerance * max(abs(value), 1e-2)):
                wrong.append(f"{layout}: {name} {got} instead of {value}")
    return wrong


WORLDS = (1, 2, 4)
preload(__name__)
_CONSEQUENCE = re.compile("Connection (closed|reset) by peer|Broken pipe")
_TWICE = 2.0  # allowed factor on the error of unsharded low precision

DenseLoss = Callable[[Tensor, "dict[str, Tensor]"], Tensor]


@dataclass(frozen=True)
class Limits:
    """Tolerance and timeout of a check.

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
    loss: Loss,
    worlds: Sequence[int] = WORLDS,
    *,
    layouts: Sequence[Layout] | None = None,
    reference: DenseLoss | None = None,
    limits: Limits = LIMITS,
) -> Report:
    """Check that a loss gives the same loss, gradient and metrics on every layout, on real gloo ranks.

    The reference is the loss on one float64 process with the whole batch, or `reference`. The batch is ragged,
    with empty rows and micro-batches, and NaN, inf and wild ids at places without loss. One process also checks finite
    differences, permuted and doubled rows, a fully masked batch, and the loss's claims.

        report = check_law(MyLoss)
        print(report)              # the broken axes, their factors, and the cure
        report.raise_if_broken()   # in a test

    >>> check_law("nll", worlds=[1]).ok
    True

    Args:
        loss: a registered name, a subclass or instance of `LossFn`, a `Case`, or a function with the call of `LossFn`, see
            `FunctionLoss`. It may be defined in a notebook.
        worlds: numbers of ranks, 1 to 8, each with its `default_layouts`.
        layouts: replace the default ones.
        reference: (logits [B, S, V], data) → the loss, dense and in float64; autograd gives the gradient.
        limits: tolerance and timeout.

    Raises:
        ValueError: no loss, or a number of ranks that this machine cannot start.
    """
    subject = subject_of(loss)
    of_world = layouts_of(worlds, subject) if layouts is None else by_world(layouts)
    return check_subject(subject, of_world, PoolRunner(limits.timeout), limits, reference)


@empty_rows_on_purpose()
def check_subject(
    subject: Subject,
    of_world: Mapping[int, Sequence[Layout]],
    runner: Runner,
    limits: Limits = LIMITS,
    reference: DenseLoss | None = None,
) -> Report:
    """Run `check_law` on the pool's ranks or a job's, where every rank calls it and gets the same report."""
    began, batch = time.monotonic(), batch_for(subject, of_world)
    try:
        result = runner.alone(subject, batch)
    except WorldError as error:
        result = Alone(None, first_line(error))
    findings = of_one_process(result)
    if result.want is None:
        return Report(subject.name, findings=tuple(findings), seconds=time.monotonic() - began)
    if reference is not None:
        result = result._replace(want=_referenced(reference, batch, result.want))
    trial = trial_of(subject, batch, result)
    observations = [seen for world in of_world.values() for seen in _observed(trial, world, runner, limits)]
    findings = without_consequences(
        [*findings, *of_layouts(trial, _finite(trial, observations, runner, limits), limits.tolerance)]
    )
    many = max(of_world)
    if not findings and many > 1 and of_world[many]:
        findings += _low_precision(trial, of_world[many][:1], runner)
    rows = tuple(Row.of(seen, findings, limits.tolerance) for seen in observations)
    return Report(subject.name, rows, tuple(findings), _skipped(subject, result), time.monotonic() - began)


def layouts_of(worlds: Sequence[int], subject: Subject) -> dict[int, list[Layout]]:
    """Return the default layouts of these numbers of ranks that the subject supports."""
    return {world: [layout for layout in default_layouts(world) if runs_on(subject, layout)] for world in worlds}


def runs_on(subject: Subject, layout: Layout) -> bool:
    """Return whether the subject's call can express the layout."""
    return layout.axes <= subject.axes and (layout.cp_layout == "zigzag" or "contiguous context" in subject.axes)


def by_world(layouts: Sequence[Layout]) -> dict[int, list[Layout]]:
    groups: dict[int, list[Layout]] = {}
    for layout in layouts:
        groups.setdefault(layout.world, []).append(layout)
    return groups


def batch_for(subject: Subject, of_world: Mapping[int, Sequence[Layout]], dtype: torch.dtype = torch.float64) -> Batch:
    """Make a batch that all these layouts can cut, with the loss's fields."""
    loss_fn = subject.build()
    kind = type(loss_fn) if isinstance(loss_fn, LossFn) else LossFn
    truncated = isinstance(loss_fn, LossFn) and bool(loss_fn.options.truncation)
    sizes = sizes_of(subject, [layout for layouts in of_world.values() for layout in layouts])
    batch = with_fields(make_batch(5, False, kind, dtype, truncated=truncated, sizes=sizes), loss_fn)
    trees = any(layout.packing == "tree" for layouts in of_world.values() for layout in layouts)
    return with_shared_prefixes(batch, loss_fn) if trees else batch


def _observed(trial: Trial, layouts: Sequence[Layout], runner: Runner, limits: Limits) -> list[Observation]:
    """Run a trial on layouts of one number of ranks; dead and hung ranks give observations, too."""
    if not layouts:
        return []
    try:
        outcomes = runner.run(trial, layouts, torch.float64)
    except WorldError as error:
        return [Observation(layout, error=first_line(error)) for layout in layouts]
    return [
        observe(trial, layout, of_ranks, limits.tolerance) for layout, of_ranks in zip(layouts, outcomes, strict=True)
    ]


def _finite(trial: Trial, observations: Sequence[Observation], runner: Runner, limits: Limits) -> list[Observation]:
    """Rerun layouts with nonfinite results without NaN in the batch, for more informative numbers."""
    again = (
        []
        if trial.clean
        else [seen.layout for seen in observations if not (seen.error or math.isfinite(seen.gradient))]
    )
    clean = [
        seen
        for layouts in by_world(again).values()
        for seen in _observed(trial._replace(clean=True), layouts, runner, limits)
    ]
    better = {seen.layout: seen for seen in clean if seen.broken(limits.tolerance)}
    return [better.get(seen.layout, seen) for seen in observations]


def first_line(error: WorldError) -> str:
    """Join the ranks' errors in one line, without those that follow from another rank's."""
    causes = {rank: text for rank, text in error.errors.items() if not _CONSEQUENCE.search(text)} or error.errors
    of_text = {text: [rank for rank in sorted(causes) if causes[rank] == text] for text in causes.values()}
    lines = [f"rank {', '.join(map(str, ranks))}: {text}" for text, ranks in sorted(of_text.items())]
    return "; ".join(lines) if lines else str(error).splitlines()[0]


def _referenced(reference: DenseLoss, batch: Batch, want: Expected) -> Expected:
    logits = batch.logits.clone().requires_grad_()
    loss = reference(logits, batch.data)
    [gradient] = torch.autograd.grad(loss, logits)
    return Expected(loss.item(), gradient, want.metrics)


def _low_precision(trial: Trial, layouts: Sequence[Layout], runner: Runner) -> list[Finding]:
    """Report bfloat16 logits that hurt the sharded loss more than the unsharded one."""
    batch = batch_for(trial.case, by_world(layouts), torch.bfloat16)
    alone = runner.alone(trial.case, batch)
    if alone.want is None:
        return []
    low = Trial(trial.case, batch, alone.want)
    dense_loss, dense_gradient = dense_error(low, torch.bfloat16)
    findings = []
    for layout, outcomes in zip(layouts, runner.run(low, layouts, torch.bfloat16), strict=True):
        loss, gradient = errors(low, outcomes)
        if not (loss <= _TWICE * dense_loss + 1e-6 and gradient <= _TWICE * dense_gradient + 1e-6):
            text = (
                f"With bfloat16 logits on {layout.name} the loss is off by {loss:.1e} and the gradient by {gradient:.1e}; "
                f"unsharded they are {dense_loss:.1e} and {dense_gradient:.1e} off."
            )
            findings.append(Finding(faults.PRECISION, " × ".join(sorted(layout.axes)), text, (layout.name,)))
    return findings


def _skipped(subject: Subject, result: Alone) -> tuple[str, ...]:
    checks = {"finite differences": result.derivative, "permuted rows": result.permuted, "doubled rows": result.doubled}
    skipped = [name for name, value in checks.items() if math.isnan(value)]
    missing = sorted(Case("nll").axes - subject.axes)
    return (*skipped, *(f"{axis}: the call has no argument for it" for axis in missing))


P = ParamSpec("P")


def law_test(
    worlds: Sequence[int] = WORLDS, limits: Limits = LIMITS
) -> Callable[[Callable[P, Loss]], Callable[P, None]]:
    """Make a test of a function that returns a loss; a failure prints the diagnosis.

        @law_test()
        def test_my_loss():
            return MyLoss({"beta": 0.1})

    The function may take fixtures and parameters, as any test.

    >>> @law_test(worlds=[1])
    ... def test_nll():
    ...     return "nll"
    >>> test_nll()

    Args:
        worlds, limits: of `check_law`.
    """

    def decorate(make: Callable[P, Loss]) -> Callable[P, None]:
        @functools.wraps(make)
        def test(*args: P.args, **kwargs: P.kwargs) -> None:
            check_law(make(*args, **kwargs), worlds, limits=limits).raise_if_broken()

        return test

    return decorate
