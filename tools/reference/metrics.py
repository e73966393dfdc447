"""The page of metrics: meaning, healthy range with its source, and what to do otherwise."""

from __future__ import annotations

import yaml

from parallel_rl.losses.policy_metrics import DESCRIPTIONS
from tools.reference.markdown import DOCS, page, table

SOURCE = DOCS / "metrics.yaml"
INTRODUCTION = """# Metrics

Each table gives the meaning of a metric, its healthy range, and what to do outside of that range. Parentheses give the
source of a range. "Definition" means that the formula fixes the value. "Our recipe" means our run of it on the CPU. "Not known"
means that nobody has shown a range that holds for every model. Entropies, KL and log-probs are in nats.
"""


def known() -> dict[str, str]:
    """List every metric's meaning by its name."""
    return {name: meaning(name, about) for group in _groups() for name, about in group["metrics"].items()}


def meaning(name: str, about: dict[str, str]) -> str:
    """Take a metric's meaning from its entry, or from the description of the policy losses.

    Raises:
        KeyError: neither has it.
    """
    if "meaning" in about:
        return about["meaning"]
    for end in ("_min", "_max"):
        if name not in DESCRIPTIONS and name.removesuffix(end) in DESCRIPTIONS:
            return f"{'smallest' if end == '_min' else 'largest'} value over the step; see `{name.removesuffix(end)}`"
    return DESCRIPTIONS[name]


def metrics_page() -> str:
    parts = [INTRODUCTION]
    for group in _groups():
        rows = [
            (f"`{name}`", meaning(name, about), about["healthy"], about["otherwise"])
            for name, about in group["metrics"].items()
        ]
        parts += [f"## {group['title']}", group["about"], table(("metric", "what it is", "healthy", "otherwise"), rows)]
    return page(*parts)


def _groups() -> list[dict]:
    return yaml.safe_load(SOURCE.read_text(encoding="utf-8"))["groups"]
