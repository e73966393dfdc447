"""Picture of a run's curves."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path

from parallel_rl.training.reporting.run_log import Row

_PANELS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("reward", ("reward", "held_out_reward")),
    ("accuracy", ("accuracy",)),
    ("loss", ("loss",)),
    ("KL to the reference", ("kl_penalty",)),
    ("entropy", ("entropy",)),
    ("gradient norm", ("grad_norm",)),
)


def draw_curves(rows: Sequence[Row], path: Path, title: str, held_out_before: float | None = None) -> bool:
    """Draw the main phase's curves into a PNG, atomically; `held_out_before` is the reward at step 0.

    Returns False, writing nothing, without matplotlib or data. OSError if it could not be written.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return False
    rows = [row for row in rows if row["phase"] != "warmup"]
    panels = [(name, keys) for name, keys in _PANELS if any(key in row for row in rows for key in keys)][:4]
    if not panels:
        return False
    columns = min(2, len(panels))
    figure = Figure(figsize=(4.2 * columns, 2.9 * -(-len(panels) // columns)), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(-(-len(panels) // columns), columns, squeeze=False).flatten()
    for unused in grid[len(panels) :]:
        unused.set_visible(False)
    for axes, (name, keys) in zip(grid, panels, strict=False):
        for key in keys:
            points = [(int(row["step"]), float(row[key])) for row in rows if key in row]
            if key == "held_out_reward" and held_out_before is not None:
                points.insert(0, (0, held_out_before))
            if points:
                marker = "o" if key == "held_out_reward" else ""
                axes.plot(*zip(*points, strict=True), label=key.replace("_", " "), marker=marker, linewidth=1.4)
        axes.set_title(name)
        axes.set_xlabel("step")
        axes.grid(alpha=0.3)
        if name == "reward":
            axes.legend(loc="best")
    figure.suptitle(title)
    partial = path.with_suffix(".partial.png")
    try:
        figure.savefig(partial, dpi=130)
        partial.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            partial.unlink()
        raise
    return True
