"""Writes docs/losses.md from the code and the recipes: python -m tools.losses_table [--check]"""

from __future__ import annotations

import dataclasses
import inspect
import re
import sys
import typing
from collections.abc import Iterable, Mapping
from pathlib import Path

import yaml

from parallel_rl.advantages import AdvantageEstimator
from parallel_rl.config.described import default_text, described, marks_of, type_text
from parallel_rl.config.strict import Variants
from parallel_rl.config.yaml_files import read_tree
from parallel_rl.functional.distillation import Divergence
from parallel_rl.functional.surrogate import Surrogate
from parallel_rl.losses.core.base import LossFn
from parallel_rl.losses.entropy_bonus import EntropyBonus
from parallel_rl.losses.policy_metrics import DESCRIPTIONS
from parallel_rl.losses.registry import losses
from parallel_rl.recipes import loss_of, main_section, recipes, summary

ROOT = Path(__file__).parent.parent
FILE = ROOT / "docs" / "losses.md"
OTHERS = ROOT / "docs" / "other_systems.yaml"
ONLY_HERE = "Only here"  # the entry of a recipe that no other system has

_OF_LOSSES = {cls.config_class for cls in losses().values()}

OVERFLOW = """A log-ratio is bounded by 80 (`parallel_rl.functional.ratio.MAX_EXPONENT`): e^80 is finite in float32, and
no sample has such a ratio, so its recorded log-prob is wrong. A clamp alone would report a loss of e^80 with gradient
0, which no check of gradients sees. Therefore a token leaves the loss (value and gradient 0, its denominators stay) if
log π − log π_prev exceeds 80, if the estimate of its KL overflows (k3: log π_ref − log π above 80; any: infinite), or
if its log-ratio in DPO's or KTO's sum is infinite. `overflow_tokens` counts these tokens. Where values are checked, a
recorded log-prob of −inf at a valid token is an error; only a truncated policy may have one, in prev_logprobs and
generation_logprobs. A `log_ratio_clamp` or `input_clamp` of at most 80 acts first.
"""

INTRODUCTION = """# Losses and recipes

Made by `make docs` from the docstrings, the option classes, `configs/recipes` and `docs/other_systems.yaml`; a test checks it.

A loss is a class with the call of `LossFn` and a class of options; a recipe is a loss with options, an advantage estimator
and a trainer's settings, in one YAML file. `parallel-rl train --recipe NAME` runs it, [adding_a_loss.md](adding_a_loss.md)
adds one. In a loop of your own `load_recipe` gives the loss and its options, `get_loss(name)` a loss alone; the advantages come
from `estimate`:

```python
from parallel_rl import load_recipe
from parallel_rl.advantages import estimate

loss_class, options = load_recipe("gspo")
loss_fn = loss_class(options, vocab_size=151936)
# advantages = estimate({"name": "grpo"}, {"rewards": ..., "group_ids": ..., "token_mask": ...}, groups).advantages
```

In the tables `null` is YAML's word for None, which leaves an option out.

`clipped_pg` or `policy`? Take `policy`: every recipe is a set of its options; `clipped_pg` is the same mathematics under
NeMo-RL's option names, data and metrics, for a config that comes from there. [compat.md](compat.md) has the losses of other
projects by their own names, calls and numbers.

Notation: l = log π(token), l_old of the policy that the step began with (`prev_logprobs`), ρ = exp(l − l_old),
A the advantage, sg stop-gradient, σ the logistic function; N_tok valid tokens and N_seq valid sequences of the whole step.
"""


def document() -> str:
    """The whole file."""
    known = built_in()
    parts = [
        INTRODUCTION,
        "## Recipes\n",
        _recipes(),
        "## What other systems call them\n",
        _elsewhere(),
        "## Losses\n",
        *(_loss(name, cls) for name, cls in known.items()),
        "## Metrics of the policy losses\n",
        "Of `policy`, of `clipped_pg` and of the policy's part of other losses. Those that compare with the sampler are there\n"
        "where the data has `generation_logprobs`; a share, mean or extremum is of the whole step, on any layout.\n",
        OVERFLOW,
        _table(("metric", "what it is"), [(f"`{name}`", text) for name, text in DESCRIPTIONS.items()]),
        "## Surrogates\n",
        "`surrogate` of the losses `policy` and `mix`: a loss per token from ratios and advantages.\n",
        _variants(Surrogate),
        "## Entropy bonuses\n",
        "`entropy_bonus` of the policy loss, where it is not a number that stays.\n",
        _variants(EntropyBonus),
        "## Advantages\n",
        "`advantages` of a recipe, and `parallel_rl.advantages.estimate`. All take these options:\n",
        _options(AdvantageEstimator),
        _variants(AdvantageEstimator, skip=[field.name for field in dataclasses.fields(AdvantageEstimator)]),
        "## Divergences\n",
        "`divergence` of the loss `full_distillation`: p the teacher's distribution, q the student's.\n",
        _variants(Divergence),
    ]
    return "\n".join(part.rstrip("\n") + "\n" for part in parts)


def built_in() -> dict[str, type[LossFn]]:
    """The registered losses of the package, without a user's or a test's."""
    return {name: cls for name, cls in sorted(losses().items()) if cls.__module__.startswith("parallel_rl.")}


def _recipes() -> str:
    rows = []
    for name, path in recipes().items():
        tree = read_tree(path)
        loss, (name_of_section, section) = loss_of(tree), main_section(tree)
        assert isinstance(loss, Mapping)
        head = re.match(
            r"# .+\n#\n(.+\n)#\n# Paper: (.+)\n# Defaults: (.+)\n#\n#   ", path.read_text(encoding="utf-8"), re.S
        )
        assert head is not None, f"{path} does not open as the other recipes do"
        what, paper, defaults = (" ".join(part.replace("\n#", " ").lstrip("# ").split()) for part in head.groups())
        rows.append(
            (
                f"[`{name}`](../configs/recipes/{path.name})",
                f"{summary(path)} {what}",
                f"`{loss['name']}` {_flow(loss.get('options'))}",
                _flow(section.get("advantages", "")),
                defaults,
                _papers(paper),
                f"needs {tree['needs']}" if "needs" in tree else name_of_section,
            )
        )
    headings = ("recipe", "formula", "loss and options", "advantages", "what the defaults mean", "paper", "trained by")
    return _table(headings, rows)


def _elsewhere() -> str:
    others = yaml.safe_load(OTHERS.read_text(encoding="utf-8"))
    read = "; ".join(f"{system} {version}" for system, version in others["versions"].items())
    rows = []
    for recipe in recipes():
        for system, text in others.get(recipe, {}).items():
            name, _, differs = text.partition("; ")
            rows.append((f"`{recipe}`", system, name, "" if differs == "same" else differs))
    headings = ("recipe", "system", "its name there", "how its default differs")
    return f"Read of {read}. Where nothing else is said, the defaults agree.\n\n{_table(headings, rows)}"


def _loss(name: str, cls: type[LossFn]) -> str:
    text = inspect.getdoc(cls) or ""
    sentence = text.split("\n\n", 1)[0].replace("\n", " ").replace("; this rank's share.", ".")
    formula = _formula(text)
    lines = [f"### `{name}`: {cls.__name__}", "", sentence, ""]
    if formula:
        lines += ["```", formula, "```", ""]
    papers = re.search(r"Papers?: (.+?)(?:\n\n|\Z)", text, re.S)
    if papers:
        lines += [f"Paper: {_papers(papers[1])}", ""]
    return "\n".join(lines) + "\n" + (_options(cls.config_class) or "No options.\n") + _nested(cls.config_class)


def _nested(config: type) -> str:
    """The options of options."""
    parts = []
    for field, hint in typing.get_type_hints(config).items():
        for cls in (hint, *typing.get_args(hint)):
            if dataclasses.is_dataclass(cls) and isinstance(cls, type) and cls not in _OF_LOSSES:
                text, marks = marks_of(cls)
                about = text[: marks[0].start()] if marks else text
                parts.append(f"\n`{field}` ({cls.__name__}): {about.strip()}\n\n{_options(cls)}{_nested(cls)}")
    return "".join(parts)


def _variants(family: type[Variants], skip: Iterable[str] = ()) -> str:
    rows = []
    for name, cls in family.variants.items():
        text = inspect.getdoc(cls) or ""
        sentence = re.split(r"\s*Papers?: ", text.split("\n\n", 1)[0].replace("\n", " "))[0]
        sentence += " " + " ".join(_formula(text).split())
        texts = described(cls)
        options = [
            f"`{field.name}` = {default_text(field)}{': ' * (field.name in texts)}{texts.get(field.name, '')}"
            for field in dataclasses.fields(cls)
            if field.name not in skip
        ]
        papers = dict.fromkeys(re.findall(r"\b\d{4}\.\d{5}\b", text))
        rows.append((f"`{name}`", sentence.strip(), "<br>".join(options), ", ".join(map(_papers, papers))))
    return _table(("name", "formula", "options", "paper"), rows)


def _options(cls: type) -> str:
    texts = described(cls)
    hints = typing.get_type_hints(cls)
    rows = [
        (f"`{field.name}`", default_text(field), type_text(hints[field.name]), texts.get(field.name, ""))
        for field in dataclasses.fields(cls)
    ]
    return _table(("option", "default", "values", "what it does"), rows) if rows else ""


def _formula(text: str) -> str:
    """The first indented block of a docstring."""
    found = re.search(r"\n\n((?:    .+\n)+)", text + "\n")
    return inspect.cleandoc(found[1]) if found else ""


def _papers(text: str) -> str:
    """Numbers of arXiv become links."""
    text = " ".join(text.split()).rstrip(".")
    return re.sub(r"(?:arXiv )?(\d{4}\.\d{4,5})", r"[\1](https://arxiv.org/abs/\1)", text)


def _flow(value: object) -> str:
    if not value:
        return ""
    text = yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=10_000, allow_unicode=True)
    return f"`{text.replace('...', '').strip()}`"


def _table(heading: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    def line(cells: Iterable[str]) -> str:
        return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"

    return "\n".join([line(heading), "|" + "---|" * len(heading), *(line(row) for row in rows)]) + "\n"


def main(arguments: list[str]) -> int:
    text = document()
    if "--check" not in arguments:
        FILE.write_text(text, encoding="utf-8")
        return 0
    if FILE.is_file() and FILE.read_text(encoding="utf-8") == text:
        return 0
    print(f"{FILE} is stale; run make docs", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
