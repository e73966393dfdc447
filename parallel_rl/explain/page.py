"""The page: one file without a network, from the sections and the samples."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from importlib.resources import files

from parallel_rl.explain.figures import sections
from parallel_rl.explain.read import Step
from parallel_rl.explain.samples import choose, samples
from parallel_rl.explain.tables import Sides

_ROOM = "parallel_rl.explain"
_EXTRA = "pip install matplotlib jinja2"


def check_extras() -> None:
    """Raises ValueError where a library that makes the page is missing, with what installs it."""
    for name in ("jinja2", "matplotlib"):
        try:
            __import__(name)
        except ImportError:
            raise ValueError(f"`parallel-rl explain` needs {name}: {_EXTRA}") from None


def page(steps: Sequence[Step], *, most_samples: int = 8, version: str = "") -> str:
    """Return the HTML of one step, or of two of one kind side by side.

    Args:
        steps: one or two.
        most_samples: of each step, whose text is shown.
        version: of the program, for the footer.

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
    """JSON that may stand inside of a script element, whatever its strings hold."""
    text = json.dumps(x, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return (
        text.replace("&", "\\u0026")
        .replace("<", "\\u003c")
        .replace(">", "\\u003e")
        .replace("\u2028", "\\u2028")
        .replace("\u2029", "\\u2029")
    )
