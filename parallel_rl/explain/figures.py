"""The sections of the page: each a chart and the tables of its numbers, for one step or for two side by side."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from parallel_rl.explain import charts, measures, ratio_figures
from parallel_rl.explain.read import Step
from parallel_rl.explain.tables import Cell, Section, Sides, Table


def sections(sides: Sides) -> list[Section]:
    """Return every section that the steps have numbers for."""
    of_ratios = (ratio_figures.ratio, ratio_figures.clip, ratio_figures.mismatch)
    makers = (_summary, _parts, *of_ratios[:2], _positions, _reasons, of_ratios[2], _logged)
    made = (make(sides) for make in makers)
    return [one for one in made if one is not None]


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
    table = Table("Parts of the loss", sides.head("part", "share", "Σ|∂/∂log π|"), tuple(rows))
    values = [[one.get(name, (0.0, None))[0] for name in every] for one in of_steps]
    svg = charts.bars("parts", every, values, sides.labels, "share of the loss, with its coefficient")
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
        found = [
            measures.means_by_position(place, one[name], edges) for place, one in zip(places, of_steps, strict=True)
        ]
        panels[name], means[name] = [(middles, mean) for mean, _ in found], [mean for mean, _ in found]
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
    head = sides.head("reason", "tokens", "share", "all it holds for", "Σ|∂L/∂log π|")
    says = (
        "Every token of the dump stands in one row: that of the first reason for which the loss, or its surrogate, takes "
        "something from it. The last columns count all tokens that a reason holds for, and sum up what still pulls on those of "
        "the row, such as a KL on tokens that the clip holds back."
    )
    table = Table("Who masked which token", head, tuple(rows))
    shares = [[float(one[words].first.mean()) if words in one else 0.0 for words in shown] for one in of_steps]
    svg = charts.bars("masks", shown, shares, sides.labels, "share of the tokens")
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
