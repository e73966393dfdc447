"""Documents: made from the code and fresh, and what they show runs."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from parallel_rl.cli.runs import import_modules
from parallel_rl.experience import reward_function
from parallel_rl.recipes import recipes
from parallel_rl.testing import check_law
from parallel_rl.testing.batches import make_batch
from parallel_rl.testing.cases import alone, has_scalar_head, reduced_numbers
from parallel_rl.testing.pool import run_world
from tests.distributed.law import CASES
from tests.slurm.faults import FAULTS
from tests.training.helpers import CONFIGS, ROOT, train_rows
from tools.figures import files
from tools.reference import losses, metrics, pages
from tools.reference.recipes import ONLY_HERE, OTHERS, other_systems

PAGE = ROOT / "docs" / "adding_a_loss.md"


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.M | re.S)


@pytest.mark.slow
def test_the_generated_pages_are_fresh() -> None:
    assert [str(file.relative_to(ROOT)) for file in pages.stale()] == [], "run make docs"


@pytest.mark.slow
def test_the_drawings_are_fresh() -> None:
    stale = [file.name for file, draw in files.FILES.items() if file.read_text(encoding="utf-8") != draw().svg()]
    assert stale == [], "run make docs"


def test_the_pages_name_everything() -> None:
    shown = "".join(file.read_text(encoding="utf-8") for file in pages.COMMITTED)
    for name in losses.built_in():
        assert f"`{name}`" in shown, f"tools/reference/losses.py puts {name} into no family: add it to FAMILIES"
    for name in recipes():
        assert f"\n### {name}\n" in shown, f"no page of a family has the recipe {name}: run make docs"
    others = other_systems()
    versions = others.pop("versions")
    rule = f"{OTHERS.relative_to(ROOT)} needs an entry for each recipe of configs/recipes"
    for name in recipes():
        assert others.get(name), f"{rule}; add `{name}:` with what other systems call it, or `{ONLY_HERE}: why`"
    assert not others.keys() - {*recipes()}, f"{rule}, and none for {sorted(others.keys() - {*recipes()})}"
    for name, systems in others.items():
        unknown = systems.keys() - {*versions, ONLY_HERE}
        assert not unknown, f"{name}: add {sorted(unknown)} to `versions` of {OTHERS.name}: what was read of it"
        alone = ONLY_HERE in systems and len(systems) > 1
        assert not alone, f"{name}: `{ONLY_HERE}` stands beside other systems in {OTHERS.name}"
    unused = versions.keys() - {system for systems in others.values() for system in systems}
    assert not unused, f"no recipe names {sorted(unused)}; remove it from `versions` of {OTHERS.name}"
    assert all(re.search(r"\d", version) for version in versions.values()), "each of `versions` needs a number"


def unknown_metrics(names: Iterable[str]) -> set[str]:
    """Metrics that docs/metrics.yaml lacks; a component's and a critic's stand there without their prefix."""
    known = {re.sub(r"[@/].*", "", name) for name in metrics.known()}
    plain = (re.sub(r"@.*", "", name.removeprefix("critic_")) for name in names)
    return {name for name in plain if known.isdisjoint(name.split("/"))}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:rows with sample_mask 1")
def test_the_page_of_metrics_has_those_of_every_loss() -> None:
    kinds = {has_scalar_head(case.loss): case.loss for case in CASES}
    batches = {kind: make_batch(5, False, loss, torch.float32) for kind, loss in kinds.items()}
    for case in CASES:
        if case.loss_class.__module__.startswith("parallel_rl."):
            batch = batches[has_scalar_head(case.loss)]
            with torch.no_grad():
                _, measured = alone(case, batch.logits.float(), batch.data)
            assert not unknown_metrics(reduced_numbers([measured])), f"{case.name}: add it to {metrics.SOURCE.name}"


def test_the_list_of_known_faults_has_each_label() -> None:
    listed = set(
        re.findall(r"^\| (Q\d+) ", (ROOT / "docs" / "reference" / "faults.md").read_text(encoding="utf-8"), re.M)
    )
    texts = [(ROOT / "docs" / "compat.md"), *(ROOT / "parallel_rl" / "compat").rglob("*.py")]
    used = {label for path in texts for label in re.findall(r"\bQ\d+\b", path.read_text(encoding="utf-8"))}
    assert used == listed


PAGES = [
    *(path for path in sorted(ROOT.glob("*.md"))),
    *(path for room in ("docs", "slurm", "benchmarks", "examples") for path in sorted((ROOT / room).rglob("*.md"))),
]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    """To a file that there is and to a heading that it has."""
    for target, _, heading in re.findall(r"\]\(([^)#]*)(#([^)]+))?\)", page.read_text(encoding="utf-8")):
        if target.startswith("http"):
            continue
        there = page.parent / target if target else page
        assert there.exists(), target
        if heading:
            titles = re.findall(r"^#+ (.*)$", there.read_text(encoding="utf-8"), re.M)
            assert heading in {re.sub(r"[^\w\- ]", "", title).lower().replace(" ", "-") for title in titles}, heading


def test_the_example_of_another_projects_loss_prints_what_it_says(capsys: pytest.CaptureFixture[str]) -> None:
    [code] = re.findall(
        r"^```python\n(.*?)^```", (ROOT / "docs" / "compat.md").read_text(encoding="utf-8"), re.M | re.S
    )
    exec(code, {})
    assert capsys.readouterr().out.strip() == code.rsplit("# ", 1)[1].strip()


def test_every_block_of_the_hosts_runs() -> None:
    """Those that import a host run where it is installed; a registry that is not there says so."""
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / "docs" / "hosts.md").read_text(encoding="utf-8"), re.M | re.S)
    assert len(blocks) >= 8
    for block in blocks:
        try:
            exec(compile(block, "docs/hosts.md", "exec"), {})
        except ImportError as error:
            assert error.name == "trl"
        except ValueError as error:
            assert re.match("(verl|SkyRL) is not installed", str(error))


def run_the_torch_loop(rank: int, code: str) -> list[float]:
    names: dict[str, Any] = {}
    exec(compile(code, "docs/torch.md", "exec"), names)
    return [names[name].item() for name in ("padded", "packed", "fused")]


def test_the_torch_loop_is_one_loss_three_ways() -> None:
    """As it stands, on two ranks; only there do a user's own split head, packing and hidden states meet in one loop."""
    [code] = re.findall(r"^```python\n(.*?)^```", (ROOT / "docs" / "torch.md").read_text(encoding="utf-8"), re.M | re.S)
    begins = 'dist.init_process_group("gloo")\n'
    assert begins in code
    losses = run_world(2, run_the_torch_loop, code.replace(begins, ""))  # the pool has joined already
    assert losses[0] == losses[1] and abs(losses[0][0]) > 1e-4
    assert losses[0] == pytest.approx([losses[0][0]] * 3, rel=1e-5)


def test_the_examples_of_checkers_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    codes = re.findall(
        r"^```python\n(.*?)^```", (ROOT / "docs" / "rewards.md").read_text(encoding="utf-8"), re.M | re.S
    )
    (tmp_path / "rewards_of_the_page.py").write_text("".join(codes))
    monkeypatch.chdir(tmp_path)
    import_modules(["rewards_of_the_page"])
    reward = reward_function("close")
    texts = (["q"] * 3, ["7", "9", "x"], ["7"] * 3)
    assert reward(*texts, [{"level": 3}, {}, {}]).tolist() == [3, 1 / 3, 0]
    assert reward_function("graded").score(["q"], ["7"], ["7"], tokens=[[7, 2]]).fields == [{"weight": [1, 0.9]}]


def test_the_example_of_a_reward_with_a_field_runs() -> None:
    [code] = [block for block in blocks("python") if "register_reward" in block]
    exec(compile(code, "docs/adding_a_loss.md", "exec"), {})
    score = reward_function("with_difficulty").score(["q"] * 2, ["17", "9"], ["17", "8"])
    assert score.fields == [{"difficulty": 0.5}, {"difficulty": 0.25}] and score.rewards.tolist() == [1, 0]


@pytest.mark.slow
def test_the_example_of_a_new_loss_runs(tmp_path: Path) -> None:
    module, _, _, call, *_ = blocks("python")
    [recipe] = blocks("yaml")
    assert module.startswith("# my_losses.py\n") and "`configs/recipes/awr.yaml`:" in PAGE.read_text(encoding="utf-8")
    (tmp_path / "my_losses.py").write_text(module)
    folder = tmp_path / "configs" / "recipes"
    folder.mkdir(parents=True)
    (folder / "awr.yaml").write_text(recipe)
    for name in ("base", "data"):
        (folder.parent / name).symlink_to(CONFIGS / name)
    [rows] = run_world(1, run_the_example, str(tmp_path), call)
    main = [row for row in rows if row["phase"] == "rl"]
    assert {name for row in rows for name in unknown_metrics(row)} == {"clip_fraction"}  # the example's own
    assert len(main) == 2 and all(row["loss"] > 0 and row["grad_norm"] > 0 for row in main)


@pytest.mark.slow
def test_the_example_of_a_field_per_sequence_obeys_the_law(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own comparison by hand, and every layout: a row's field, `count=` and `collect=` together."""
    from parallel_rl.losses import registry

    _, module, call, *_ = blocks("python")
    assert module.startswith("# step_losses.py\n")
    (tmp_path / "step_losses.py").write_text(module)
    monkeypatch.syspath_prepend(tmp_path)
    try:
        exec(compile(call, "docs/adding_a_loss.md", "exec"), {})
        registry._LOSSES.pop("above_mean")
        made: dict[str, Any] = {}
        exec(compile(module, "step_losses.py", "exec"), made)
        check_law(made["AboveMean"], worlds=[1, 2]).raise_if_broken()
    finally:
        registry._LOSSES.pop("above_mean", None)
        sys.modules.pop("step_losses", None)


def verdict_by_hand(logits: Tensor, data: dict[str, Tensor]) -> Tensor:
    """Position t reads the two answers' logits, and counts where the token that it predicts does."""
    sign = data["correct"].sign()[:, None]
    losses = torch.nn.functional.softplus(-sign * (logits[:, :-1, 2] - logits[:, :-1, 3]))
    mask = data["token_mask"][:, 1:].bool() & (data["sample_mask"] > 0)[:, None]
    return losses[mask].sum() / mask.sum()


@pytest.mark.slow
def test_a_loss_that_reads_something_else_obeys_the_law() -> None:
    """The page's reader, called by the run on every layout; a host's log-probs do not have what it reads."""
    from parallel_rl.losses import registry

    code = blocks("python")[-2]
    assert code.startswith("# verdict.py\n")
    try:
        made: dict[str, Any] = {}
        exec(compile(code, "verdict.py", "exec"), made)
        check_law(made["Verdict"], worlds=[1, 2], reference=verdict_by_hand).raise_if_broken()
        with pytest.raises(ValueError, match="Verdict reads more than log-probs: whole rows of logits"):
            made["Verdict"]().from_logprobs(
                -torch.ones(1, 2), data={"response_mask": torch.ones(1, 2)}, global_valid_seqs=1, global_valid_toks=2
            )
    finally:
        registry._LOSSES.pop("verdict", None)


def f_dpo_by_hand(logits: Tensor, data: dict[str, Tensor]) -> Tensor:
    """Pair by pair, from the paper: u of whole sequences, f'(u) = log(2u / (1 + u))."""
    logprobs = logits.log_softmax(-1)[:, :-1].gather(-1, data["input_ids"][:, 1:, None])[..., 0]
    valid, losses = data["token_mask"][:, 1:].bool(), []
    for i in range(0, len(logits), 2):
        if not data["sample_mask"][i]:
            continue
        u = [
            (logprobs[j][valid[j]].sum() - data["reference_policy_logprobs"][j, 1:][valid[j]].sum()).exp()
            for j in (i, i + 1)
        ]
        better = (2 * u[0] / (1 + u[0])).log() - (2 * u[1] / (1 + u[1])).log()
        losses.append(-torch.sigmoid(0.1 * better).log())
    return torch.stack(losses).sum() / (data["sample_mask"].sum() / 2)


@pytest.mark.slow
def test_a_loss_that_is_left_out_takes_ten_lines_and_obeys_the_law() -> None:
    from parallel_rl.losses import registry

    code = blocks("python")[-1]
    assert code.startswith("# f_dpo.py\n") and len(code.splitlines()) <= 11
    try:
        made: dict[str, Any] = {}
        exec(compile(code, "f_dpo.py", "exec"), made)
        check_law(made["FDPO"], worlds=[1, 2], reference=f_dpo_by_hand).raise_if_broken()
    finally:
        registry._LOSSES.pop("f_dpo", None)


def run_the_example(rank: int, folder: str, call: str) -> list[dict[str, float | int | str]]:
    from parallel_rl.losses import registry

    small = {
        "run.dir": folder,
        "reward": "long_answers",
        "model.hidden": 16,
        "evaluation": "null",
        "data.held_out": "null",
        "warmup.steps": 1,
        "rl.steps": 2,
        "rl.prompts": 4,
        "rl.updates": 2,
    }
    sys.path.insert(0, folder)
    try:
        exec(compile(call, "docs/adding_a_loss.md", "exec"), {})
        return train_rows(rank, [f"{folder}/configs/recipes/awr.yaml", *(f"--{k}={v}" for k, v in small.items())])
    finally:
        sys.path.remove(folder)
        sys.modules.pop("my_losses", None)
        registry._LOSSES.pop("awr", None)


def test_the_table_of_faults_names_each_as_it_is_tested() -> None:
    rows = [
        line.split(" | ") for line in (ROOT / "docs/reliability.md").read_text().splitlines() if line.startswith("| ")
    ]
    assert [(row[0].removeprefix("| "), row[1]) for row in rows[1:]] == [(fault.name, fault.how) for fault in FAULTS]
    for row, fault in zip(rows[1:], FAULTS, strict=True):
        assert re.fullmatch(f"`(?:{fault.says})`", row[4].replace(r"\|", "|")), row
