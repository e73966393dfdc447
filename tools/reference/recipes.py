"""Recipes: the index page, and each recipe's section on the page of its family."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import yaml

from parallel_rl.config.yaml_files import read_tree
from parallel_rl.recipes import load_recipe, loss_of, main_section, recipes, summary
from tools.reference.markdown import DOCS, block, flow, linked, page, table

OTHERS = DOCS / "other_systems.yaml"
ONLY_HERE = "Only here"  # the entry of a recipe that no other system has

INDEX = """# Recipes

A recipe is a YAML file of `configs/recipes`: a loss with its options, an advantage estimator and settings of the trainer.
`parallel-rl recipes NAME` prints it, and `parallel-rl train --recipe NAME` trains by it. A few recipes are only a loss;
`train` names what they lack. In a loop of your own, `load_recipe` returns the loss and its options, and `estimate` the
advantages:

```python
from parallel_rl import load_recipe
from parallel_rl.advantages import estimate

loss_class, options = load_recipe("gspo")
loss_fn = loss_class(options, vocab_size=151936)
# advantages = estimate({"name": "grpo"}, {"rewards": ..., "group_ids": ..., "token_mask": ...}, groups).advantages
```

[Choose a loss](../howto/choose_a_loss.md) finds a recipe for the data that you have.
"""

OUTSIDE = """## What other systems call them

A recipe's own section lists how the defaults differ.
"""


@dataclass(frozen=True)
class Recipe:
    """One file of `configs/recipes`, read for its pages."""

    name: str
    path: Path
    what: str
    paper: str
    defaults: str
    loss: Mapping[str, object]
    tree: Mapping[str, object]

    @property
    def title(self) -> str:
        return summary(self.path)

    @property
    def reads(self) -> tuple[str, ...]:
        """Names of the data's fields beside ids and masks."""
        loss_class, config = load_recipe(self.name)
        return loss_class(config).requirements.names


def all_recipes() -> list[Recipe]:
    """Read every recipe.

    Raises:
        AssertionError: a recipe's comment has another form than the others'.
    """
    read = []
    for name, path in recipes().items():
        text = path.read_text(encoding="utf-8")
        head = re.match(r"# .+\n#\n(.+\n)#\n# Paper: (.+)\n# Defaults: (.+)\n#\n#   ", text, re.S)
        assert head is not None, f"{path} does not open as the other recipes do"
        what, paper, defaults = (" ".join(part.replace("\n#", " ").lstrip("# ").split()) for part in head.groups())
        tree = read_tree(path)
        loss = loss_of(tree)
        assert loss is not None
        read.append(Recipe(name, path, what, paper, defaults, loss, tree))
    return read


def index(pages: Mapping[str, str]) -> str:
    """Write the page of all recipes; `pages` has the file of each loss."""
    found = all_recipes()
    rows = [(f"[`{one.name}`](losses/{pages[str(one.loss['name'])]}.md#{one.name})", one.title) for one in found]
    others = yaml.safe_load(OTHERS.read_text(encoding="utf-8"))
    names = [
        (f"`{one.name}`", system, text.partition("; ")[0])
        for one in found
        for system, text in others.get(one.name, {}).items()
    ]
    return page(INDEX, table(("recipe", "what it is"), rows), OUTSIDE, table(("recipe", "system", "its name"), names))


def section(recipe: Recipe, others: Mapping[str, Mapping[str, str]]) -> str:
    """Write a recipe's section on the page of its family."""
    advantages = main_section(recipe.tree)[1].get("advantages")
    by = (
        f"a loop of your own; it needs {recipe.tree['needs']}"
        if "needs" in recipe.tree
        else f"the section `{main_section(recipe.tree)[0]}` of a run"
    )
    facts = [
        ("Defaults", recipe.defaults),
        ("Advantages", flow(advantages)),
        ("Reads", ", ".join(f"`{name}`" for name in recipe.reads) or "only ids and masks"),
        ("Trained by", by),
        ("Paper", linked(recipe.paper)),
    ]
    elsewhere = []
    for system, text in others.get(recipe.name, {}).items():
        name, _, differs = text.partition("; ")
        elsewhere.append(f"  - {system}: {name}{'; ' * bool(differs)}{differs}")
    lines = [f"- **{word}.** {text}" for word, text in facts if text]
    lines += ["- **Elsewhere.**", *elsewhere] if elsewhere else []
    loss = {"name": recipe.loss["name"], **({"options": recipe.loss["options"]} if recipe.loss.get("options") else {})}
    return page(f"### {recipe.name}", recipe.title, recipe.what, block({"loss": loss}), "\n".join(lines))


def other_systems() -> dict[str, dict[str, str]]:
    """Read what other systems call each recipe, and under `versions` what was read of each."""
    return yaml.safe_load(OTHERS.read_text(encoding="utf-8"))
