"""The recipes of `configs/recipes` by name: which loss, with which options.

    loss_class, config = load_recipe("GSPO")
    loss_fn = loss_class(config, vocab_size=V)

`parallel-rl train --recipe NAME` runs one on the data that ships.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from parallel_rl.config.strict import closest, configure
from parallel_rl.config.yaml_files import read_tree

if TYPE_CHECKING:
    from parallel_rl.losses.core.base import LossFn

# In a checkout a link to /configs, in a wheel a copy of it.
_FOLDER = Path(__file__).parent / "configs" / "recipes"


def recipes() -> dict[str, Path]:
    """List every recipe's file by its name, in alphabetical order."""
    return {path.stem: path for path in sorted(_FOLDER.resolve().glob("*.yaml"))}


def find_recipe(name: str) -> Path:
    """Find the file of a recipe; ValueError with the nearest ones for an unknown name.

    Case, hyphens, underscores, dots and blanks do not matter, and + is "plus".

    >>> find_recipe("Dr. GRPO").name
    'dr_grpo.yaml'
    """
    paths = {_plain(stem): path for stem, path in recipes().items()}
    if _plain(name) not in paths:
        near = closest(name.lower().replace("-", "_"), recipes(), cutoff=0.6)
        hint = "`parallel-rl recipes` lists them" if near is None else f"did you mean {near!r}?"
        raise ValueError(f"there is no recipe {name!r}; {hint}")
    return paths[_plain(name)]


def load_recipe(name: str) -> tuple[type[LossFn], object]:
    """Load the loss class of a recipe and its config; for a recipe with a critic, those of the policy.

    >>> load_recipe("GSPO")[0].__name__
    'PolicyLossFn'

    ValueError: an unknown name, with the nearest one; options that do not fit.
    """
    from parallel_rl.losses.choice import LossConfig  # and with it torch, which a list of names does without

    path = find_recipe(name)
    choice = configure(LossConfig, loss_of(read_tree(path)), f"{path.stem}.loss")
    return choice.loss_class, choice.build().config


def summary(path: Path) -> str:
    """Read the first line of a recipe's file, which says what it is."""
    return path.read_text(encoding="utf-8").split("\n", 1)[0].lstrip("# ").rstrip()


def runs(path: Path) -> bool:
    """Return whether `parallel-rl train` runs a recipe; it lacks the data of the others.

    >>> runs(find_recipe("grpo")), runs(find_recipe("value"))
    (True, False)
    """
    return not any(line.startswith("needs:") for line in path.read_text(encoding="utf-8").splitlines())


def loss_of(tree: Mapping[str, object]) -> Mapping[str, object] | None:
    """Return the mapping {name: ..., options: ...} of a recipe's loss, if it has one."""
    loss = main_section(tree)[1].get("loss")
    return loss if isinstance(loss, Mapping) else None


def main_section(tree: Mapping[str, object]) -> tuple[str, Mapping[str, object]]:
    """Return the name of a recipe's main section and the section; "" and the recipe if there is no run."""
    sections = ((name, value) for name, value in tree.items() if isinstance(value, Mapping) and "loss" in value)
    return next(sections, ("", tree))


def _plain(name: str) -> str:
    kept = name.lower().replace("+", "plus")
    return "".join(char for char in kept if char not in "-_. ")
