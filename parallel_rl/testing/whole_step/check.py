"""Check one subject: choose its layouts, its precision, and the one-process run for each layout; report the outcome."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from parallel_rl.testing.pool import WorldError
from parallel_rl.testing.report import LawBroken
from parallel_rl.testing.whole_step.causes import Facts, StepFinding, diagnose
from parallel_rl.testing.whole_step.compare import Compared
from parallel_rl.testing.whole_step.layouts import StepLayout, check_layout, default_layouts
from parallel_rl.testing.whole_step.ranks import Ranks
from parallel_rl.testing.whole_step.shrink import VOCABULARY, layers_for
from parallel_rl.testing.whole_step.subject import StepSubject
from parallel_rl.testing.whole_step.worlds import ModelFacts, Worlds, look


@dataclass(frozen=True)
class WholeStepReport:
    """The outcome of a check of one model's step.

    Attributes:
        name: of the model. rows: one for each layout. findings: differences from one process and their causes.
        notes: what was shrunk, turned off, or not compared. bound: the relative error that passes. seconds: of the check.
    """

    name: str
    rows: tuple[Compared, ...]
    findings: tuple[StepFinding, ...]
    notes: tuple[str, ...]
    bound: float
    seconds: float

    @property
    def ok(self) -> bool:
        """Return whether at least one layout ran, and each that ran matches one process."""
        return not self.findings and any(not row.error for row in self.rows)

    def raise_if_broken(self) -> None:
        """Raise LawBroken with the diagnosis if a layout differs or none could run."""
        if not self.ok:
            raise LawBroken(str(self))

    def as_json(self) -> dict[str, object]:
        """Return plain lists, mappings, numbers and strings; numbers that are not finite become None."""
        return {
            "model": self.name,
            "ok": self.ok,
            "seconds": round(self.seconds, 2),
            "bound": self.bound,
            "layouts": [
                {
                    "layout": row.layout.name,
                    **{
                        f"{what}_error": value if math.isfinite(value) else None
                        for what, value in zip(("loss", "gradient", "norm", "weights"), _numbers(row), strict=True)
                    },
                    "verdict": self.verdict(row),
                }
                for row in self.rows
            ],
            "findings": [
                {**vars(finding), "weights": list(finding.weights), "layouts": list(finding.layouts)}
                for finding in self.findings
            ],
            "notes": list(self.notes),
        }

    def verdict(self, row: Compared) -> str:
        """Return "ok", "not run", or the first difference."""
        if row.refused:
            return "not run"
        named = [finding.what for finding in self.findings if row.layout.name in finding.layouts]
        return named[0] if named else "ok"

    def table(self) -> str:
        """Lay out a line for each layout: relative errors and the verdict."""
        width = max((len(row.layout.name) for row in self.rows), default=6)
        lines = [f"{'layout':<{width}}  {'loss':>8} {'gradient':>8} {'norm':>8} {'weights':>8}  verdict"]
        for row in self.rows:
            numbers = " ".join(f"{_shown(value):>8}" for value in _numbers(row))
            lines.append(f"{row.layout.name:<{width}}  {numbers}  {self.verdict(row)}")
        return "\n".join(lines)

    def __str__(self) -> str:
        ran = sum(not row.error for row in self.rows)
        if self.ok:
            head = f"{self.name}: the step is that of one process on {ran} layouts ({self.seconds:.0f} s)"
        else:
            head = f"{self.name}: the step differs from one process ({self.seconds:.0f} s)"
        lines = [f"  {line}" for finding in self.findings for line in str(finding).splitlines()]
        if not ran:
            lines.append("  no layout could be run")
        return "\n".join([self.table(), "", head, *lines, *(f"  note: {note}" for note in self.notes)])


def _numbers(row: Compared) -> tuple[float, float, float, float]:
    return row.loss, row.gradient, row.norm, row.weights


def _shown(value: float) -> str:
    return "–" if math.isnan(value) else f"{value:.0e}"


_MOST_HUNG = 2  # layouts whose time is waited for


def check_subject(
    subject: StepSubject,
    ranks: Ranks,
    layouts: Sequence[StepLayout] | None = None,
    show: Callable[[str], None] | None = None,
) -> WholeStepReport:
    """Run the check of `check_step`; raises its ValueErrors."""
    if subject.forward_step is not None and subject.loss_callback is not None:
        raise ValueError("forward_step and loss_callback are both given; a forward step returns its own callback")
    for layout in layouts or ():
        check_layout(layout)
    start = time.monotonic()
    model = look(subject, ranks)
    chosen = list(layouts) if layouts is not None else default_layouts(model.experts, model.balanced)
    if subject.is_script:
        chosen = _for_script(chosen, model, subject.forward_step is not None)
    worlds, notes = _worlds(subject, chosen, model, ranks)
    vocabulary = next(iter(worlds.truths.values())).vocabulary
    if vocabulary > VOCABULARY:
        notes.append(f"the vocabulary stays at {vocabulary}: the provider takes no vocab_size")
    rows: list[Compared] = []
    local: set[bool] = set()  # settings whose micro-batches weigh differently: one process runs as many
    bound = worlds.bound
    for layout in chosen:
        hung = [row.layout.name for row in rows if row.hung]
        if len(hung) == _MOST_HUNG:
            rows.append(
                Compared(layout, error=f"{' and '.join(hung)} gave no answer, so the rest is left out", refused=True)
            )
            continue
        key = layout.truth(model.balanced, layout.per_token in local)
        row = worlds.compared(layout, key)
        if subject.is_script and layout.world == 1 and not layout.packed and row.broken(bound):
            local.add(layout.per_token)
        rows.append(row)
        if show is not None:
            show(f"{len(rows)}/{len(chosen)} {layout.name}")
    truth = next(iter(worlds.truths.values()))
    number = len(truth.gradients)
    random = worlds.randomness() if any(row.broken(bound) and not row.error for row in rows) else ""
    facts = Facts(subject.is_script, model.heads, model.experts, number, number < len(truth.before), random)
    findings = diagnose(rows, bound, facts)
    notes += [f"{row.layout.name} was not run: {row.error}" for row in rows if row.refused]
    if subject.is_script and any(not row.layout.per_token for row in rows):
        notes.append(f"this config has calculate_per_token_loss = {model.per_token}; both settings were run")
    provider = getattr(subject.provider, "func", subject.provider)  # of a functools.partial
    name = str(getattr(provider, "__name__", type(provider).__name__))
    return WholeStepReport(name, tuple(rows), tuple(findings), tuple(notes), bound, time.monotonic() - start)


def _for_script(layouts: Sequence[StepLayout], model: ModelFacts, padded: bool) -> list[StepLayout]:
    """Put one-process layouts with several micro-batches first, one for each setting in use."""
    if padded:
        layouts = [layout._replace(packed=False) for layout in layouts]
    settings = sorted({layout.per_token for layout in layouts}, reverse=True)
    first = [StepLayout(per_token=per_token, balance=not model.balanced) for per_token in settings]
    return list(dict.fromkeys([*first, *layouts]))


def _worlds(
    subject: StepSubject, layouts: Sequence[StepLayout], model: ModelFacts, ranks: Ranks
) -> tuple[Worlds, list[str]]:
    """Choose the one-process step's precision: float64, or float32 if a module refuses it."""
    notes, layers = list(model.notes), layers_for(list(layouts))
    worlds = Worlds(subject, layers, torch.float64, ranks)
    key = layouts[0].truth(model.balanced)
    try:
        worlds.truth(key)
    except ValueError as error:
        if isinstance(error.__cause__, WorldError) and error.__cause__.silent:
            raise
        worlds = Worlds(subject, layers, torch.float32, ranks)
        try:
            worlds.truth(key)
        except ValueError:
            raise error from None
        how = worlds.measure_bound(key)
        notes.append(f"float32, with a bound of {worlds.bound:.0e}, {how}. float64 fails: {error}")
    return worlds, notes
