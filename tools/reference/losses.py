"""A page for each family of losses: the losses with their options, and the recipes made of them."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, fields

from parallel_rl.advantages import AdvantageEstimator
from parallel_rl.functional.distillation import Divergence
from parallel_rl.functional.surrogate import Surrogate
from parallel_rl.losses.core.base import LossFn
from parallel_rl.losses.entropy_bonus import EntropyBonus
from parallel_rl.losses.registry import losses
from tools.figures import curves
from tools.reference import recipes
from tools.reference.markdown import first_sentence, formula, nested_options, options_table, page, papers, variants

INDEX = """# Losses

A loss is a class with the call of `LossFn` and a class of options. `get_loss(name)` returns the class. A
[recipe](../recipes.md) is a loss with options. See [Choose a loss](../../howto/choose_a_loss.md) for your data, and [Adding a
loss](../../adding_a_loss.md) for your own formula. `make docs` writes these pages from docstrings, option classes and
recipes.
"""

NOTATION = """Notation: l = log π(token). l_old is l at the start of the step (`prev_logprobs`). ρ = exp(l − l_old). A is the
advantage, sg stop-gradient, σ the logistic function. N_tok and N_seq are the numbers of valid tokens and sequences in the
whole step. In the tables, `null` is YAML's word for None.
"""

OVERFLOW = """### Ratios that overflow

A log-ratio is bounded by 80 (`parallel_rl.functional.ratio.MAX_EXPONENT`), since e^80 is still finite in float32. No sample
has a ratio that large, so its recorded log-prob is wrong. A clamp alone would report a loss of e^80 with gradient 0, which no
check of gradients sees. Therefore such a token is dropped: its value and gradient are 0, and the denominators stay.
`overflow_tokens` counts the dropped tokens. A token is dropped

- if log π − log π_prev exceeds 80,
- if the estimate of its KL overflows: for k3 if log π_ref − log π exceeds 80, for any estimate if it is infinite,
- if its log-ratio in the sum of DPO or KTO is infinite.

A `log_ratio_clamp` or `input_clamp` of at most 80 acts before this rule. Where values are checked, a recorded log-prob of
−inf at a valid token is an error. Only a truncated policy may have one, in prev_logprobs and generation_logprobs.
"""

SURROGATES = """A surrogate is the loss per token, the option `surrogate` of the losses `policy` and `mix`. The drawings
call the loss on one token with the defaults of the surrogate. Where the gradient is 0, the token does not move the policy.
"""

CLIPPED_OR_POLICY = """Take `policy` in a new project: every recipe of this page is a set of its options. `clipped_pg` is the
same mathematics with NeMo-RL's names for options, data and metrics. Take it for a config of NeMo-RL. For the losses of other
projects under their own names, with their calls and numbers, see [the compat page](../../compat.md).
"""


@dataclass(frozen=True)
class Family:
    """One page of losses.

    Attributes:
        file: name of the page without its ending.
        losses: registered names, in the order of the page.
        about: text below the title.
    """

    file: str
    title: str
    losses: tuple[str, ...]
    about: str = ""


FAMILIES = (
    Family("policy", "Policy gradients", ("policy", "clipped_pg"), CLIPPED_OR_POLICY),
    Family("mixed", "Several losses in one step", ("mix", "components", "reference_kl")),
    Family("preference", "Preferences", ("dpo", "simpo", "cpo", "orpo", "kto")),
    Family("reward", "Reward models and critics", ("preference", "prm", "value")),
    Family("distillation", "Distillation", ("full_distillation", "distillation")),
    Family("supervised", "Supervised fine-tuning", ("nll",)),
)
PAGE_OF = {loss: family.file for family in FAMILIES for loss in family.losses}


def built_in() -> dict[str, type[LossFn]]:
    """List the package's losses by name, without a user's or a test's."""
    return {name: cls for name, cls in sorted(losses().items()) if cls.__module__.startswith("parallel_rl.")}


def index_page() -> str:
    """Write the page that leads to the families."""
    lines = [
        f"- [{family.title}]({family.file}.md): {', '.join(f'`{name}`' for name in family.losses)}"
        for family in FAMILIES
    ]
    tree = "\n".join(["```{toctree}", ":hidden:", "", *(family.file for family in FAMILIES), "```"])
    return page(INDEX, "\n".join(lines), tree)


def family_page(family: Family) -> str:
    """Write the page of a family."""
    classes, others = built_in(), recipes.other_systems()
    made = [one for one in recipes.all_recipes() if one.loss["name"] in family.losses]
    names = ", ".join(f"[`{one.name}`](#{one.name})" for one in made)
    parts = [f"# {family.title}", family.about, NOTATION, f"Recipes: {names}." if made else ""]
    parts += ["## Recipes"] * bool(made) + [recipes.section(one, others) for one in made]
    parts += ["## Losses", *(_loss(name, classes[name]) for name in family.losses)]
    if "policy" in family.losses:
        parts += [OVERFLOW, "## Surrogates", SURROGATES]
        pictures = {name: f"![Loss and gradient over the ratio](surrogate_{name}.svg)" for name in curves.drawn()}
        parts += [variants(Surrogate, "###", pictures=pictures), "## Entropy bonuses"]
        parts += ["`entropy_bonus` of the loss `policy`, if its coefficient changes.", variants(EntropyBonus, "###")]
    if "full_distillation" in family.losses:
        parts += [
            "## Divergences",
            "`divergence` of `full_distillation`: p is the teacher's, q the student's distribution.",
        ]
        parts += [variants(Divergence, "###")]
    return page(*parts)


def advantages_page() -> str:
    """Write the page of the advantage estimators."""
    common = [field.name for field in fields(AdvantageEstimator)]
    return page(
        "# Advantages",
        "Set `advantages` of a recipe, or pass it to `parallel_rl.advantages.estimate`. All estimators have these options:",
        options_table(AdvantageEstimator),
        variants(AdvantageEstimator, "##", skip=common),
    )


def _loss(name: str, cls: type[LossFn]) -> str:
    text = inspect.getdoc(cls) or ""
    configs = {one.config_class for one in losses().values()}
    return page(
        f"### `{name}`: {cls.__name__}",
        first_sentence(text),
        formula(text),
        papers(text),
        options_table(cls.config_class) or "No options.",
        nested_options(cls.config_class, configs),
    )
