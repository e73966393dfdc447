"""Recipes that the trainer's data can feed train, with a teacher too, alike on every layout."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from parallel_rl.config.yaml_files import read_tree
from parallel_rl.recipes import find_recipe, load_recipe, main_section, recipes
from parallel_rl.testing.pool import WorldError, run_world
from parallel_rl.training.config.load import load_config
from tests.training.algorithms.test_recipe_names import OUTSIDE, TAUGHT
from tests.training.helpers import LAYOUTS, assert_near, cut, short_data, train_rows

QUICK = ("ppo", "remax", "chord", "kto", "reward_model", "echo")
# in one process too, in test_layouts_agree below and in batching/test_packed_layouts.py
ELSEWHERE = ("grpo", "high_entropy", "optimal_token_baseline", "dapo", "clip_cov", "mix", "dpo", "sft")

SIZES = {
    "run.dtype": "float64",
    "run.loggers": "[]",
    "model.hidden": 16,
    "batch.micro_batch_size": 8,
    "evaluation": "null",
    "data.held_out": "null",
}
UNTAUGHT = {"warmup": "null", "data.examples": "null"}
SECTIONS = {
    "rl": {
        "rl.steps": 2,
        "rl.prompts": 4,
        "rl.group_size": 4,
        "rl.updates": 2,
        "warmup.steps": 1,
        "warmup.batch_size": 4,
    },
    "preference": {"preference.steps": 2, "preference.pairs": 4, "warmup.steps": 1, "warmup.batch_size": 4},
    "sft": {"sft.steps": 2, "sft.batch_size": 8},
    "distillation": {"distillation.steps": 2, "distillation.batch_size": 8},
}


def tiny(name: str, folder: Path, **more: object) -> list[str]:
    """The recipe with two small steps."""
    tree = read_tree(find_recipe(name))
    objective, _ = main_section(tree)
    sizes = {**short_data(find_recipe(name)), **SIZES, **SECTIONS[objective], "run.dir": folder}
    if objective == "preference" and tree["preference"].get("answers"):  # type: ignore[attr-defined, index]
        sizes["preference.answers"] = sizes.pop("preference.pairs")
    if not tree.get("warmup"):
        sizes = {key: value for key, value in sizes.items() if not key.startswith("warmup.")}
    if objective == "rl":
        sizes["reward"] = "long_answers"  # even an untrained policy's samples differ
        sizes["rl.updates"] = min(2, tree["rl"]["updates"])  # type: ignore[index]
        if tree["rl"].get("experts"):  # type: ignore[attr-defined, index]
            sizes["rl.experts"] = 4
        if tree["rl"]["group_size"] == 1:  # type: ignore[index]
            sizes["rl.group_size"] = 1
        if tree["rl"].get("critic"):  # type: ignore[attr-defined, index]
            sizes["rl.critic.warmup_steps"] = 1
    return [str(find_recipe(name)), *(f"--{key}={value}" for key, value in {**sizes, **more}.items())]


@pytest.fixture(scope="module")
def taught(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint of a run, whose weights are a teacher's or a start."""
    folder = tmp_path_factory.mktemp("taught")
    run_world(1, train_rows, tiny("sft", folder))
    return folder / "checkpoints" / "step_000002"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ppo", "chord"])
def test_a_stopped_run_continues_the_same_curve(name: str, tmp_path: Path) -> None:
    """With the critic and its moments, and with the state of the schedule.

    Slow: a whole run, a part of it and its continuation, with a critic's model beside the policy's.
    """
    more = {
        "rl.steps": 3,
        "run.checkpoint_every": 1,
        "run.keep_checkpoints": 20,
    }
    [rows] = run_world(1, train_rows, tiny(name, tmp_path / "whole", **more))
    cut(tmp_path / "whole", tmp_path / "stopped", 3)  # one step of warm-up and two of RL
    [later] = run_world(1, train_rows, tiny(name, tmp_path / "stopped", **more))
    assert later == rows[3:] and len(later) == 1
    if name == "chord":
        assert later[0]["mu"] == pytest.approx(0.9 * 4.5 / 40)  # the mean over the updates 4 and 5 of the run


@pytest.mark.slow
def test_prompts_that_teach_nothing_give_way_to_others(tmp_path: Path) -> None:
    """By the recording: every group's mean reward lies within the bounds, on one process and on two, where it is the same.

    Takes some seconds: up to forty rounds of sampling, twice.
    """
    more = {
        "rl.dynamic_sampling": "{low: 0.3, high: 0.6, max_rounds: 40}",
        "rl.record": "true",
        "rl.overlong": "null",
        "rl.steps": 1,
        **UNTAUGHT,
    }
    found = []
    for ranks in (1, 2):
        folder = tmp_path / str(ranks)
        run_world(ranks, train_rows, tiny("dapo", folder, **more))
        files = sorted((folder / "rollouts").glob("step_000001_*.jsonl"))
        assert len(files) == ranks
        groups: dict[int, list[float]] = {}
        for line in "".join(path.read_text() for path in files).splitlines():
            row = json.loads(line)
            groups.setdefault(row["group"], []).append(row["reward"])
        assert len(groups) == 4 and all(
            len(rewards) == 4 and 0.3 < sum(rewards) / 4 < 0.6 for rewards in groups.values()
        )
        assert max(groups) >= 4  # some are of a later round
        found.append(groups)
    assert found[0] == found[1]
    with pytest.raises(
        WorldError, match=r"after 2 rounds 4 prompts have no mean reward between 2\.0 and 3\.0; raise max_rounds"
    ):
        never = {"rl.dynamic_sampling": "{low: 2.0, high: 3.0, max_rounds: 2}"}
        run_world(1, train_rows, tiny("dapo", tmp_path / "never", **never))


@pytest.mark.slow
def test_a_reward_model_starts_from_a_policy(tmp_path: Path, taught: Path) -> None:
    [rows] = run_world(1, train_rows, tiny("reward_model", tmp_path / "rewards", **{"run.init_from": taught}))
    check(rows, "reward_model")
    rewards = tmp_path / "rewards" / "checkpoints" / "step_000002"
    with pytest.raises(WorldError, match=r"it is of a model with a scalar head and one with logits is needed"):
        run_world(1, train_rows, tiny("sft", tmp_path / "again", **{"run.init_from": rewards}))


def check(rows: list[dict], name: str) -> None:
    main = [row for row in rows if row["phase"] != "warmup"]
    assert [row["step"] for row in main] == [1, 2]
    for row in main:
        for key, value in row.items():
            assert key == "phase" or math.isfinite(value), f"{key} = {value} in {name}"
    assert max(row.get("grad_norm", 0) for row in main) > 0


def of_each_kind() -> list[str]:
    """Return one recipe of those that ask the same of the trainer; every recipe's loss is in tests/distributed/law.py."""
    kinds: dict[object, str] = {}
    for name in [*QUICK, *ELSEWHERE, *recipes()]:
        if name in OUTSIDE or name in TAUGHT:
            continue
        tree = read_tree(find_recipe(name))
        objective, _ = main_section(tree)
        section = tree[objective]
        assert isinstance(section, dict)
        cls, config = load_recipe(name)
        needs = cls(config).requirements
        fields = (
            *(field.name for field in (*needs.fields, *needs.optional)),
            needs.reads,
            needs.collected,
            needs.counted,
        )
        kind = (objective, *sorted(section), str((section.get("advantages") or {}).get("name")), cls, fields)
        kinds.setdefault(kind, name)
    return [name for name in kinds.values() if name not in ELSEWHERE]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in of_each_kind()]
)
def test_two_steps(name: str, tmp_path: Path) -> None:
    """The slow ones differ from the quick in their configs alone: a world's start and two models each."""
    [rows] = run_world(1, train_rows, tiny(name, tmp_path))
    check(rows, name)
    if name == "echo":  # the prompts' tokens
        assert all(row["observed/num_unmasked_tokens"] > 0 for row in rows if row["phase"] != "warmup")


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(n, marks=[] if n in ("grpo_distillation", "policy_and_teacher") else pytest.mark.slow)
        for n in TAUGHT
    ],
)
def test_two_steps_with_a_teacher(name: str, tmp_path: Path, taught: Path) -> None:
    """The teacher's weights come from a run's checkpoint."""
    [rows] = run_world(1, train_rows, tiny(name, tmp_path / "student", **{TAUGHT[name]: taught}))
    check(rows, name)


WHOLE = """{name: components, options: {components: {
    policy: {loss: {name: policy, options: {surrogate: ppo}}},
    teacher: {loss: {name: full_distillation, options: {divergence: reverse_kl}}, coefficient: 0.5}}}}"""


@pytest.mark.slow
def test_a_policy_and_the_teachers_distributions_in_one_forward(tmp_path: Path, taught: Path) -> None:
    """The estimator reads no teacher, the loss does: its logits of each micro-batch."""
    more = {"rl.teacher": taught, "rl.loss": WHOLE.replace("\n", ""), **UNTAUGHT}
    [expected] = run_world(1, train_rows, tiny("grpo", tmp_path / "one", **more))
    check(expected, "grpo")
    assert min(row["teacher/loss"] for row in expected if row["phase"] != "warmup") > 0
    layout = {"parallel": {"tensor": 2, "sequence_parallel": True}}
    for rows in run_world(2, train_rows, tiny("grpo", tmp_path / "many", **more, **layout)):
        assert_near(rows, expected, abs=1e-10)


def test_a_teacher_that_nothing_reads_is_refused() -> None:
    path = str(find_recipe("grpo"))
    with pytest.raises(ValueError, match=r"'teacher' has no effect with advantages.name = 'grpo'"):
        load_config(path, ["--rl.teacher=somewhere"])
    with pytest.raises(ValueError, match=r"reads 'teacher_logits', which rl.teacher gives; it is missing"):
        load_config(path, [f"--rl.loss={WHOLE}".replace("\n", "")])


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("gkd", "TP 2"),
        pytest.param("gkd", "PP 2", marks=pytest.mark.slow),
        pytest.param("distillation_topk", "TP 2 × CP 2 × SP packed", marks=pytest.mark.slow),
    ],
)
def test_distillation_from_hidden_states_of_both(name: str, layout: str, tmp_path: Path, taught: Path) -> None:
    """With a fused head neither model makes logits, and the numbers stay those of whole logits in one process."""
    teacher = {"distillation.teacher": taught}
    [expected] = run_world(1, train_rows, tiny(name, tmp_path / "one", **teacher))
    world, parallel, packing = LAYOUTS[layout]
    more = {**teacher, "parallel": parallel, "batch.packing": packing, "model.fused_head": True}
    for rows in run_world(world, train_rows, tiny(name, tmp_path / "many", **more)):
        assert_near(rows, expected, abs=1e-10)


# beside TP 2 × CP 2 × SP packed; pipeline and data ranks of the first are in batching/test_packed_layouts.py, and so are
# all layouts of clip_cov; those of kto are in test_kto.py; reinforce_plus_plus is in config/test_algorithms.py
FURTHER: dict[str, tuple[dict[str, int], ...]] = {
    **dict.fromkeys(("ppo", "high_entropy", "optimal_token_baseline", "dapo"), ()),
    **dict.fromkeys(("reward_model", "chord"), ({"pipeline": 2},)),
    "remax": ({},),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", FURTHER)
def test_layouts_agree(name: str, tmp_path: Path) -> None:
    """What goes beyond one forward and backward: a critic, two kinds of rows, statistics of the step, greedy answers."""
    small: dict[str, object] = {"model.layers": 2 if {"pipeline": 2} in FURTHER[name] else 1, **UNTAUGHT}
    if name == "reward_model":
        small["preference.steps"] = 1
    elif name != "ppo":  # whose first step trains the critic alone
        small["rl.steps"] = 1
    if name == "chord":
        del small["data.examples"]  # its experts' answers
    [expected] = run_world(1, train_rows, tiny(name, tmp_path / "one", **small))
    assert max(row.get("grad_norm", 0) for row in expected) > 0
    padded = [(2, layout, False) for layout in FURTHER[name]]
    for number, (ranks, layout, packing) in enumerate([LAYOUTS["TP 2 × CP 2 × SP packed"], *padded]):
        more = {**small, "parallel": layout, "batch.packing": packing}
        for rows in run_world(ranks, train_rows, tiny(name, tmp_path / str(number), **more)):
            assert_near(rows, expected, abs=1e-10, where=layout)
