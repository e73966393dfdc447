"""The sections of the page, each a chart and its tables, for one step or two side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from parallel_rl.explain import charts, measures
from parallel_rl.explain.charts import Cell, Section, Sides, Table
from parallel_rl.explain.read import Step


def ratio(sides: Sides) -> Section | None:
    ratios = [measures.log_ratio(step) for step in sides.steps]
    if any(one is None for one in ratios):
        return None
    logs = [one[0] for one in ratios if one is not None]
    in_loss = all(one[1] for one in ratios if one is not None)
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
        "effective sample size, tokens": effective, "effective fraction of the tokens": effective / len(logs),
    }  # fmt: skip


def _range(step: Step) -> tuple[float, float]:
    """Estimate the clip's bounds from the nearest ratios on both sides; NaN without tokens beyond."""
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
        "Below and above: outside of the clip's range. Held back: tokens outside of it that the advantage would "
        "drive further out, so that the surrogate gives them no gradient."
    )
    svg = charts.bars("clip", shown, values, sides.labels, "fraction of the tokens of that sign")
    says += "" if svg else " Here: none; every ratio lies inside of its range."
    return Section("clip", "What the clip does, by the sign of the advantage", says, (table,), svg)


def mismatch(sides: Sides) -> Section | None:
    logs = [measures.log_mismatch(step) for step in sides.steps]
    both = [x for x in logs if x is not None]
    if len(both) < len(logs):
        return None
    edges = measures.log_edges(np.concatenate(both))
    parts = [measures.log_histogram(x, edges) for x in both]
    facts: list[dict[str, Cell]] = []
    for step, x in zip(sides.steps, both, strict=True):
        rows = measures.by_sequence(step, x)
        effective, of_rows = measures.effective_size(x), measures.effective_size(rows)
        facts.append({
            "effective sample size, tokens": effective, "effective fraction of the tokens": effective / max(len(x), 1),
            "effective sample size, sequences": of_rows, "effective fraction of the sequences": of_rows / max(len(rows), 1),
            "largest |log ω|": float(np.abs(x).max(initial=0.0)), **measures.mismatch_means(step),
        })  # fmt: skip
    says = (
        "ω = π_prev / π_generation: what the trainer makes of the tokens against what the sampler did. Both should be one "
        "policy; another kernel, dtype or stale weights pull them apart. The names are those of the logged metrics."
    )
    table = sides.compared("Trainer against sampler", "", facts)
    svg = charts.histogram("mismatch", parts, sides.labels, "ω of a token")
    return Section("mismatch", "Trainer–sampler mismatch", says, (table,), svg, (_bins(sides, parts, "ω"),))


def sections(sides: Sides) -> list[Section]:
    """Return every section that the steps have numbers for."""
    of_ratios = (ratio, clip, mismatch)
    makers = (_summary, _parts, *of_ratios[:2], _positions, _reasons, of_ratios[2], _logged)
    drawn = (make(sides) for make in makers)
    return [one for one in drawn if one is not None]


def _summary(sides: Sides) -> Section:
    facts = sides.compared("Facts of the step", "", [_facts(step) for step in sides.steps])
    return Section("summary", "The step", "", (facts,))


def _facts(step: Step) -> dict[str, Cell]:
    gradient = step.tokens.get("gradient", np.zeros(0))
    facts: dict[str, Cell] = {
        "loss function": step.meta["loss"],
        "layout": step.meta["layout"],
        "loss": step.shares["loss"],
        "sequences in the dump": len(step.lengths),
        "valid sequences of the step": step.meta["counts"]["sequences"],
        "tokens in the dump": int(step.lengths.sum()),
        "valid tokens of the step": step.meta["counts"]["tokens"],
        "tokens that the loss reads": int(step.scored.sum()),
        "tokens that carry gradient": int((gradient != 0).sum()),
    }
    if "advantages" in step.tokens:
        advantages = step.tokens["advantages"][step.scored].astype(np.float64)
        facts["mean advantage"] = float(advantages.mean()) if len(advantages) else None
    if "rewards" in step.sequences:
        facts["mean reward"] = float(step.sequences["rewards"].astype(np.float64).mean())
    return facts


def _parts(sides: Sides) -> Section:
    of_steps: list[dict[str, tuple[float, float | None]]] = []
    for step in sides.steps:
        names = [name.removeprefix("part/") for name in step.shares if name.startswith("part/")]
        gradients = {name: step.tokens.get(f"gradient/{name}" if len(names) > 1 else "gradient") for name in names}
        sums = {name: None if x is None else float(np.abs(x.astype(np.float64)).sum()) for name, x in gradients.items()}
        of_steps.append({name: (step.shares[f"part/{name}"], sums[name]) for name in names})
    every = list(dict.fromkeys(name for one in of_steps for name in one))
    rows: list[tuple[Cell, ...]] = []
    rows += [(name, *(x for one in of_steps for x in one.get(name, (None, None)))) for name in every]
    rows.append(("the loss", *(x for step in sides.steps for x in (step.shares["loss"], None))))
    table = Table("Parts of the loss", sides.head("part", "contribution", "Σ|∂/∂log π|"), tuple(rows))
    values = [[one.get(name, (0.0, None))[0] for name in every] for one in of_steps]
    svg = charts.bars("parts", every, values, sides.labels, "contribution to the loss, with its coefficient")
    nothing = "" if svg else " Here: none; every part is 0."
    says = (
        "Each part with its coefficient, as the loss computed it; the parts add up to the loss. Beside it, the sum over tokens "
        "of the size of its gradient with respect to the log-prob (or the head's output): what it pulls with."
    )
    return Section("parts", "What the loss is made of", says + nothing, (table,), svg)


def _positions(sides: Sides) -> Section | None:
    of_steps = [measures.of_position(step) for step in sides.steps]
    names = [name for name in of_steps[0] if all(name in one for one in of_steps)]
    places = [measures.positions(step) for step in sides.steps]
    longest = max((int(place.max()) for place in places if len(place)), default=0)
    if not names or not longest:
        return None
    edges = measures.position_bins(longest)
    middles, panels = (edges[:-1] + edges[1:] - 1) / 2, {}
    means: dict[str, list[np.ndarray]] = {}
    for name in names:
        curves = [
            measures.means_by_position(place, one[name], edges) for place, one in zip(places, of_steps, strict=True)
        ]
        panels[name], means[name] = [(middles, mean) for mean, _ in curves], [mean for mean, _ in curves]
    counts = [measures.means_by_position(place, np.zeros(len(place)), edges)[1] for place in places]
    rows: list[tuple[Cell, ...]] = []
    for index in range(len(edges) - 1):
        first, last = int(edges[index]), int(edges[index + 1]) - 1
        cells = [
            (int(count[index]), *(float(means[name][side][index]) for name in names))
            for side, count in enumerate(counts)
        ]
        rows.append((str(first) if first == last else f"{first}–{last}", *(x for cell in cells for x in cell)))
    table = Table("Means by position", sides.head("position", "tokens", *names), tuple(rows))
    says = "Means over the tokens that the loss reads, by their number in the response, from 1; in nats."
    svg = charts.lines("positions", panels, sides.labels, "number of the token in the response")
    return Section("positions", "Entropy and KL by position", says, (), svg, (table,))


def _reasons(sides: Sides) -> Section:
    of_steps = [{one.words: one for one in measures.reasons(step)} for step in sides.steps]
    every = list(dict.fromkeys(words for one in of_steps for words in one))
    shown = [words for words in every if any(words in one and one[words].every.any() for one in of_steps)]
    rows: list[tuple[Cell, ...]] = []
    for words in shown:
        cells: list[Cell] = []
        for step, one in zip(sides.steps, of_steps, strict=True):
            if words not in one:
                cells += [None] * 4
                continue
            first = one[words].first
            pull = (
                np.abs(step.tokens["gradient"][first].astype(np.float64)).sum() if "gradient" in step.tokens else np.nan
            )
            cells += [int(first.sum()), float(first.mean()), int(one[words].every.sum()), float(pull)]
        rows.append((words, *cells))
    head = sides.head("reason", "tokens", "fraction", "all it holds for", "Σ|∂L/∂log π|")
    says = (
        "Every token of the dump stands in one row: that of the first reason for which the loss, or its surrogate, takes "
        "something from it. The last columns count all tokens that a reason holds for, and sum up what still pulls on those of "
        "the row, such as a KL on tokens that the clip holds back."
    )
    table = Table("Who masked which token", head, tuple(rows))
    shares = [[float(one[words].first.mean()) if words in one else 0.0 for words in shown] for one in of_steps]
    svg = charts.bars("masks", shown, shares, sides.labels, "fraction of the tokens")
    says += "" if svg else " Here: none."
    return Section("masks", "Who masked which token, and why", says, (table,), svg)


def _logged(sides: Sides) -> Section:
    metrics = sides.compared("Metrics as logged", "metric", [step.meta["metrics"] for step in sides.steps])
    configs = [_flat(step.meta["config"]) for step in sides.steps]
    rows = tuple(
        (name, *(one.get(name) for one in configs)) for name in dict.fromkeys(n for one in configs for n in one)
    )
    options = Table("Options of the loss", sides.head("option", "value"), rows)
    return Section(
        "logged",
        "Metrics and options",
        "The step's metrics, reduced over all ranks, and the loss's config.",
        (),
        "",
        (metrics, options),
    )


def _flat(tree: Mapping[str, object], prefix: str = "") -> dict[str, Cell]:
    flat: dict[str, Cell] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = str(value)
    return flat
