"""Recipes by their names: every named method has one, it is found however it is written, and it is valid."""

from __future__ import annotations

from typing import Any

import pytest

from parallel_rl.config.yaml_files import read_tree
from parallel_rl.losses.core.base import LossFn
from parallel_rl.losses.registry import losses
from parallel_rl.recipes import find_recipe, load_recipe, loss_of, recipes, runs, summary
from parallel_rl.training.config.load import load_config

NAMED = [
    "ppo",
    "grpo",
    "dr_grpo",
    "dapo",
    "rloo",
    "reinforce",
    "reinforce_plus_plus",
    "remax",
    "gspo",
    "cispo",
    "topr",
    "sapo",
    "opmd",
    "sppo",
    "rec",
    "cpgd",
    "gmpo",
    "gpg",
    "clip_cov",
    "kl_cov",
    "mix",
    "chord",
    "sft",
    "sft_is",
    "sft_phi",
    "dpo",
    "cdpo",
    "ipo",
    "simpo",
    "orpo",
    "kto",
    "reward_model",
    "prm",
    "value",
    "distillation",
]
OUTSIDE = {name for name, path in recipes().items() if not runs(path)}
TAUGHT = {
    "distillation": "distillation.teacher",
    "gkd": "distillation.teacher",
    "distillation_topk": "distillation.teacher",
    "on_policy_distillation": "rl.teacher",
    "grpo_distillation": "rl.teacher",
    "rl_distillation": "rl.teacher",
    "policy_and_teacher": "rl.teacher",
}


def test_every_method_that_is_named_has_its_recipe() -> None:
    assert set(NAMED) <= set(recipes())


@pytest.mark.parametrize("name", recipes())
def test_a_recipe_says_what_it_is_and_is_valid(name: str) -> None:
    path = recipes()[name]
    text = path.read_text(encoding="utf-8")
    assert text.startswith("# ") and "# Paper: " in text and "# Defaults: " in text and len(summary(path)) > 20
    cls, config = load_recipe(name)
    assert cls in losses().values() and isinstance(config, cls.config_class)
    if name in OUTSIDE:
        with pytest.raises(ValueError, match=rf"{name}.yaml is a loss without a run: it needs .*load_recipe"):
            load_config(str(path))
        return
    if name in TAUGHT:
        with pytest.raises(ValueError, match=r"teacher.*missing"):
            load_config(str(path))
    config = load_config(str(path), [f"--{TAUGHT[name]}=x"] if name in TAUGHT else [])
    assert config.run.dir == f"runs/{name}"
    assert load_recipe(name)[0] is getattr(config, config.objective).loss.loss_class


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ("GSPO", "gspo"),
        ("Dr.GRPO", "dr_grpo"),
        ("REINFORCE++", "reinforce_plus_plus"),
        ("sft-is", "sft_is"),
        ("KL Cov", "kl_cov"),
    ],
)
def test_a_name_is_found_however_it_is_written(written: str, name: str) -> None:
    assert find_recipe(written) == recipes()[name]


def test_an_unknown_recipe_gets_the_nearest_name() -> None:
    with pytest.raises(ValueError, match=r"there is no recipe 'gpso'; did you mean 'gspo'\?"):
        find_recipe("gpso")
    with pytest.raises(ValueError, match="there is no recipe 'zzz'; `parallel-rl recipes` lists them"):
        find_recipe("zzz")


def test_every_loss_has_a_recipe_or_is_a_face() -> None:
    """By itself or as a component."""
    chosen: list[Any] = [loss_of(read_tree(path)) for path in recipes().values()]
    parts = [loss["options"]["components"].values() for loss in chosen if loss["name"] == "components"]
    used = {loss["name"] for loss in [*chosen, *(part["loss"] for some in parts for part in some)]}
    assert used >= {name for name in losses() if not name.startswith(("doc_", "test_"))} - {"clipped_pg"}


def test_the_loss_of_a_recipe_is_a_loss() -> None:
    cls, config = load_recipe("grpo")
    assert issubclass(cls, LossFn) and cls(config).needs_statistics is False


def test_the_teachers_top_k_goes_with_a_loss_that_reads_it() -> None:
    path, teacher = str(find_recipe("distillation_topk")), "--distillation.teacher=somewhere"
    assert load_config(path, [teacher]).distillation.top_k == 8  # type: ignore[union-attr]
    for change, message in (
        ("--distillation.top_k=null", r"reads 'teacher_topk_logits', which distillation.top_k gives; set it"),
        ("--distillation.top_k=0", r"top_k = 0"),
        ("--distillation.loss={name: nll}", r"top_k = 8 has no effect with loss.name = 'nll', which reads no top-k"),
        ("--distillation.loss.options.topk_alignment=predictor", r"topk_alignment must be 'token'"),
    ):
        with pytest.raises(ValueError, match=message):
            load_config(path, [teacher, change])
