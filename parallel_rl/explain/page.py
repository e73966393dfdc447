"""The page: one HTML file that loads nothing, with the sections and the text of chosen samples."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import NamedTuple

import numpy as np

from parallel_rl.explain import measures
from parallel_rl.explain.charts import Sides
from parallel_rl.explain.figures import sections
from parallel_rl.explain.read import Step

LEVELS = 5  # of a colour
_TOP = 10  # tokens in a sample's table
_SHOWN = (
    ("logprobs", "log π"), ("prev_logprobs", "log π_prev"), ("generation_logprobs", "log π_generation"),
    ("advantages", "A"), ("entropy", "entropy"), ("head", "output"), ("gradient", "∂L/∂log π"),
)  # fmt: skip


@dataclass(frozen=True)
class Token:
    """A token; `mark` is its CSS class, such as "p3" or "n1" for sign and size of ∂L/∂log π."""

    text: str
    mark: str


@dataclass(frozen=True)
class Sample:
    """One sequence: its name, why it was chosen, its tokens, and their numbers by column, for the panel."""

    key: str
    title: str
    why: str
    tokens: list[Token]
    head: list[str]
    numbers: list[list[float | str | None]]
    top: list[tuple[int, str, float]]


def choose(step: Step, most: int) -> dict[int, str]:
    """Choose up to `most` sequences by largest gradient, ratio farthest from 1, and most tokens held back."""
    gradient = np.abs(step.tokens.get("gradient", np.zeros(len(step.row))).astype(np.float64))
    pull = np.bincount(step.row, gradient, minlength=len(step.lengths))
    chosen: dict[int, str] = {}
    if most >= len(step.lengths):
        return {int(row): "" for row in np.arange(len(step.lengths))}
    ratio, logs = measures.log_ratio(step), np.zeros(len(step.row))
    if ratio is not None:
        logs[step.scored] = np.abs(ratio[0])
    clipped = [x for name, x in step.tokens.items() if name.startswith("held/") and name.endswith("clipped")]
    held = np.bincount(step.row, np.logical_or.reduce(clipped), minlength=len(step.lengths)) if clipped else pull * 0
    extreme = int(step.row[int(logs.argmax())])
    for row, why, there in (
        (extreme, "the ratio farthest from 1", logs.max() > 0),
        (int(held.argmax()), "most tokens held back by the clip", held.max() > 0),
    ):
        if there and len(chosen) < most - 1:
            chosen.setdefault(row, why)
    for row in np.argsort(-pull, kind="stable"):
        if len(chosen) >= most:
            break
        chosen.setdefault(int(row), "among the largest Σ|∂L/∂log π|")
    return dict(sorted(chosen.items(), key=lambda item: -pull[item[0]]))


def samples(step: Step, chosen: Mapping[int, str], label: str) -> list[Sample]:
    """Render the chosen sequences of a step; colours have one scale."""
    gradient = step.tokens.get("gradient", np.zeros(len(step.row))).astype(np.float64)
    read = step.tokens.get("logprobs", step.tokens.get("head", gradient))
    gradient = np.where(np.isfinite(read), gradient, np.nan)  # a clamp may give NaN the gradient 0
    sizes = np.abs(gradient[(gradient != 0) & np.isfinite(gradient)])
    scale = float(np.quantile(sizes, 0.99)) if len(sizes) else 1.0
    columns = [(words, step.tokens[name]) for name, words in _SHOWN if name in step.tokens]
    ratio = step.value("ratio")
    if ratio is not None:
        columns.append(("ratio", ratio))
    numbers = _Numbers(gradient, scale, _reason_of_each(step), columns)
    return [_sample(step, row, text, label, numbers) for row, text in chosen.items()]


class _Numbers(NamedTuple):
    """Numbers of all tokens of a step: gradients, their scale, reasons for none, and columns."""

    gradient: np.ndarray
    scale: float
    reasons: Sequence[str]
    columns: Sequence[tuple[str, np.ndarray]]


def _sample(step: Step, row: int, why: str, label: str, of_step: _Numbers) -> Sample:
    gradient, scale, reasons, columns = of_step
    first, last = int(step.starts[row]), int(step.starts[row] + step.lengths[row])
    ids, texts = step.tokens["input_ids"], step.texts
    tokens, numbers = [], []
    for place in range(first, last):
        token = int(ids[place])
        tokens.append(
            Token(
                (texts.get(token) or f"⟨{token}⟩").replace("\n", "↵\n"),
                _mark(gradient[place], scale, bool(step.scored[place])),
            )
        )
        values = [_shortened(x[place]) if step.scored[place] else None for _, x in columns]
        numbers.append([token, *values, reasons[place]])
    order = np.argsort(-np.abs(gradient[first:last]), kind="stable")[:_TOP]
    top = [(int(i), tokens[i].text, float(gradient[first + i])) for i in order if gradient[first + i] != 0]
    facts = [f"{last - first} tokens"]
    facts += [
        f"{name} {_shortened(step.sequences[key][row])}"
        for key, name in (("rewards", "reward"), ("group_ids", "group"))
        if key in step.sequences
    ]
    scored = slice(first, last)
    if "advantages" in step.tokens and step.scored[scored].any():
        facts.append(f"mean advantage {_shortened(step.tokens['advantages'][scored][step.scored[scored]].mean())}")
    if why:
        facts.append(why)
    name = step.sequences["sample_ids"][row] if "sample_ids" in step.sequences else row
    title = f"{label} sample {name}".strip()
    return Sample(
        f"s{label}{row}",
        title[0].upper() + title[1:],
        "; ".join(facts),
        tokens,
        ["id", *(w for w, _ in columns), "why"],
        numbers,
        top,
    )


def _mark(gradient: float, scale: float, scored: bool) -> str:
    if not scored:
        return "m"
    if not math.isfinite(gradient):
        return "x"
    if gradient == 0:
        return "z"
    level = min(LEVELS, 1 + int(LEVELS * math.sqrt(min(abs(gradient) / scale, 1.0)) * 0.999))
    return f"{'p' if gradient > 0 else 'n'}{level}"


def _reason_of_each(step: Step) -> list[str]:
    words, rejected = np.full(len(step.row), "", dtype=object), np.zeros(len(step.row), bool)
    for one in measures.reasons(step):
        words[one.first] = one.words
        if measures.REJECTED in one.words:
            words[one.every & rejected] += f"; {one.words.partition(measures.REJECTED)[2]}"
            rejected |= one.first
    return list(words)


def _shortened(x: float) -> float | int | None:
    x = float(x)
    if x == int(x) if math.isfinite(x) else False:
        return int(x)
    return float(f"{x:.4g}") if math.isfinite(x) else None


_ROOM = "parallel_rl.explain"
_EXTRA = "pip install matplotlib jinja2"


def check_extras() -> None:
    """Raise ValueError for a missing library of the page; the message names the extra to install."""
    for name in ("jinja2", "matplotlib"):
        try:
            __import__(name)
        except ImportError:
            raise ValueError(f"`parallel-rl explain` needs {name}: {_EXTRA}") from None


def page(steps: Sequence[Step], *, most_samples: int = 8, version: str = "") -> str:
    """Return the HTML of one step, or of two of one kind side by side.

    Args:
        steps: one or two. version: of the program, for the footer.
        most_samples: of each step, whose text is shown.

    Raises:
        ValueError: two steps of different kinds, or a library is missing.
    """
    check_extras()
    from jinja2 import Environment, StrictUndefined
    from markupsafe import Markup

    if not 1 <= len(steps) <= 2:
        raise ValueError(f"{len(steps)} steps are not valid; give one, or two side by side")
    kinds = [step.kind for step in steps]
    if len(set(kinds)) > 1:
        what = " and ".join(f"{step.name} of {step.meta['loss']} ({step.kind})" for step in steps)
        raise ValueError(f"{what} have nothing to lay side by side; give two steps of one kind")
    sides, root = Sides(tuple(steps)), files(_ROOM)
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {
        "short": _short,
        "whole": lambda x: f"{x:,}".replace("-", "−"),
        "exact": repr,
        "compact": lambda x: Markup(_compact(x)),  # nosec B704 # JSON, escaped
    }
    chosen = [
        sample
        for step, label in zip(steps, sides.labels, strict=True)
        if most_samples
        for sample in samples(step, choose(step, most_samples), label)
    ]
    of_log_probs = all("logprobs" in step.tokens for step in steps)
    return environment.from_string((root / "page.html.j2").read_text(encoding="utf-8")).render(
        title=" against ".join(step.meta["title"] or step.name for step in steps),
        steps=steps,
        labels=sides.labels,
        sections=sections(sides),
        samples=chosen,
        gradient_name="∂L/∂log π" if of_log_probs else "∂L/∂output",
        of_log_probs=of_log_probs,
        style=Markup((root / "page.css").read_text(encoding="utf-8")),  # nosec B704 # a file of ours
        script=Markup((root / "page.js").read_text(encoding="utf-8")),  # nosec B704 # a file of ours
        version=version,
    )


def _short(x: float) -> str:
    if not math.isfinite(x):
        return "–" if math.isnan(x) else "∞" if x > 0 else "−∞"
    return f"{x:.4g}".replace("-", "−")


def _compact(x: object) -> str:
    """Encode JSON so that no string can end a script element."""
    text = json.dumps(x, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return (
        text.replace("&", "\\u0026")
        .replace("<", "\\u003c")
        .replace(">", "\\u003e")
        .replace("\u2028", "\\u2028")
        .replace("\u2029", "\\u2029")
    )
