"""The sections on ratios: how far the policy went, what the clip does, how far trainer and sampler are apart."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from parallel_rl.explain import charts, measures
from parallel_rl.explain.read import Step
from parallel_rl.explain.tables import Cell, Section, Sides, Table


def ratio(sides: Sides) -> Section | None:
    found = [measures.log_ratio(step) for step in sides.steps]
    if any(one is None for one in found):
        return None
    logs = [one[0] for one in found if one is not None]
    in_loss = all(one[1] for one in found if one is not None)
    edges = measures.log_edges(np.concatenate(logs))
    parts = [measures.log_histogram(x, edges) for x in logs]
    facts = [_of_ratio(x) for x in logs]
    ranges = [_range(step) for step in sides.steps]
    name = "ρ at the loss's level" if in_loss else "π / π_prev; this loss has no ratio"
    says = (
        "How far the policy has moved from the one that the step began with; both axes are logarithmic, so that both tails "
        "show. Dotted lines: the range of the clip, where the loss drew it."
    )
    table = sides.compared("The importance ratio", "", facts)
    svg = charts.histogram("ratio", parts, sides.labels, name, ranges)
    return Section("ratio", "Importance ratio", says, (table,), svg, (_bins(sides, parts, "ρ"),))


def _of_ratio(logs: np.ndarray) -> dict[str, Cell]:
    if not len(logs):
        return {}
    ratio = np.exp(logs)
    quantiles = {f"{100 * q:g} %": float(np.quantile(ratio, q)) for q in (0.01, 0.5, 0.99)}
    effective = measures.effective_size(logs)
    return {
        "smallest": float(ratio.min()), **quantiles, "largest": float(ratio.max()), "mean": float(ratio.mean()),
        "effective sample size, tokens": effective, "effective share of the tokens": effective / len(logs),
    }  # fmt: skip


def _range(step: Step) -> tuple[float, float]:
    """Return the clip's bounds, between the ratios on both sides of each; infinite without tokens beyond."""
    ratio, bounds = step.value("ratio"), [np.nan, np.nan]
    if ratio is None:
        return np.nan, np.nan
    for index, (name, inner, outer) in enumerate((("below_range", np.min, np.max), ("above_range", np.max, np.min))):
        beyond = measures.held_back(step, name)
        if beyond is None:
            continue
        inside = step.scored & ~beyond
        if beyond.any() and inside.any():
            bounds[index] = float((outer(ratio[beyond]) + inner(ratio[inside])) / 2)
    return bounds[0], bounds[1]


def _bins(sides: Sides, parts: Sequence[measures.LogHistogram], what: str) -> Table:
    edges = parts[0].edges
    rows: list[tuple[Cell, ...]] = [(f"below {edges[0]:.4g}", *(part.below for part in parts))]
    for index in range(len(edges) - 1):
        counts = [int(part.counts[index]) for part in parts]
        if any(counts):
            rows.append((f"{edges[index]:.4g} to {edges[index + 1]:.4g}", *counts))
    rows.append((f"above {edges[-1]:.4g}", *(part.above for part in parts)))
    return Table(
        f"{what}: tokens in each bin that is not empty", sides.head("bin", "tokens"), tuple(rows), on_paper=False
    )


def clip(sides: Sides) -> Section | None:
    if any("advantages" not in step.tokens for step in sides.steps):
        return None
    of_steps = [dict(measures.clip_by_sign(step)) for step in sides.steps]
    names = [name for name in ("below_range", "above_range", "clipped", "dual_clipped") if name in of_steps[0]["A > 0"]]
    if not names or any(set(one["A > 0"]) != set(of_steps[0]["A > 0"]) for one in of_steps):
        return None
    words = {"below_range": "below", "above_range": "above", "clipped": "held back", "dual_clipped": "second bound"}
    rows: list[tuple[Cell, ...]] = []
    for sign in of_steps[0]:
        cells = [
            (one[sign]["tokens"], *(one[sign][name] / max(one[sign]["tokens"], 1) for name in names))
            for one in of_steps
        ]
        rows.append((sign, *(x for cell in cells for x in cell)))
    table = Table(
        "Share of the tokens by the sign of the advantage",
        sides.head("", "tokens", *(words[n] for n in names)),
        tuple(rows),
    )
    held = [name for name in names if name not in ("below_range", "above_range")]
    shown = [f"{sign}, {words[name]}" for sign in ("A > 0", "A < 0") for name in (*names[:2], *held)]
    values = [
        [one[sign][name] / max(one[sign]["tokens"], 1) for sign in ("A > 0", "A < 0") for name in (*names[:2], *held)]
        for one in of_steps
    ]
    says = (
        "Below and above: outside of the range, whatever the advantage. Held back: those of them that the advantage would "
        "drive further out, so that the surrogate gives them no gradient."
    )
    svg = charts.bars("clip", shown, values, sides.labels, "share of the tokens of that sign")
    says += "" if svg else " Here: none; every ratio lies inside of its range."
    return Section("clip", "What the clip does, by the sign of the advantage", says, (table,), svg)


def mismatch(sides: Sides) -> Section | None:
    logs = [measures.log_mismatch(step) for step in sides.steps]
    found = [x for x in logs if x is not None]
    if len(found) < len(logs):
        return None
    edges = measures.log_edges(np.concatenate(found))
    parts = [measures.log_histogram(x, edges) for x in found]
    facts: list[dict[str, Cell]] = []
    for step, x in zip(sides.steps, found, strict=True):
        rows = measures.by_sequence(step, x)
        effective, of_rows = measures.effective_size(x), measures.effective_size(rows)
        facts.append({
            "effective sample size, tokens": effective, "effective share of the tokens": effective / max(len(x), 1),
            "effective sample size, sequences": of_rows, "effective share of the sequences": of_rows / max(len(rows), 1),
            "largest |log ω|": float(np.abs(x).max(initial=0.0)), **measures.mismatch_means(step),
        })  # fmt: skip
    says = (
        "ω = π_prev / π_generation: what the trainer makes of the tokens against what the sampler did. Both should be one "
        "policy; another kernel, dtype or stale weights pull them apart. The names are those of the logged metrics."
    )
    table = sides.compared("Trainer against sampler", "", facts)
    svg = charts.histogram("mismatch", parts, sides.labels, "ω of a token")
    return Section("mismatch", "Trainer–sampler mismatch", says, (table,), svg, (_bins(sides, parts, "ω"),))
