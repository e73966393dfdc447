"""Runs on sharded data: the same numbers from any files, the next record after a restart, and what is refused."""

from __future__ import annotations

import json
import shutil
from dataclasses import astuple
from pathlib import Path

import pytest

from parallel_rl.cli import main
from parallel_rl.testing.pool import WorldError, run_world
from parallel_rl.training.config.load import load_config
from parallel_rl.training.preflight.dry_run import dry_run
from parallel_rl.training.preflight.facts import planned
from tests.training.data.small_blocks import small_blocks
from tests.training.helpers import CONFIGS, DATA, cut, run, train_rows

pyarrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")

SMALL = {
    "model__layers": 1,
    "model__hidden": 16,
    "run__loggers": "[]",
    "evaluation": "null",
    "data__held_out": "null",
    "sft__steps": 6,
    "sft__batch_size": 8,
    "run__dtype": "float64",
    "run__checkpoint_every": 2,
    "run__keep_checkpoints": 20,
}
LINES = (DATA / "arithmetic_train.jsonl").read_text().splitlines(keepends=True)[:600]


def sft(folder: Path, files: list[str], **more: object) -> list[str]:
    return run("sft_arithmetic.yaml", run__dir=folder, data__examples=files, **{**SMALL, **more})


def shards(folder: Path, lines: list[str]) -> list[str]:
    """Two of JSONL and one of Parquet."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "a_0.jsonl").write_text("".join(lines[:50]))
    (folder / "a_1.jsonl").write_text("".join(lines[50:300]))
    parquet.write_table(
        pyarrow.Table.from_pylist([*map(json.loads, lines[300:])]), folder / "b.parquet", row_group_size=70
    )
    return [str(folder / "a_{0..1}.jsonl"), str(folder / "*.parquet")]


@pytest.mark.slow
def test_shards_of_any_kind_train_like_one_file_and_changed_ones_are_refused(tmp_path: Path) -> None:
    whole = tmp_path / "whole.jsonl"
    whole.write_text("".join(LINES))
    [rows] = run_world(1, train_rows, sft(tmp_path / "one", [str(whole)]))
    files = shards(tmp_path / "shards", LINES)
    [sharded] = run_world(1, train_rows, sft(tmp_path / "many", files))
    assert sharded == rows and len(rows) == 6
    cut(tmp_path / "many", tmp_path / "stopped", 4)
    [later] = run_world(1, train_rows, sft(tmp_path / "stopped", files))
    assert later == rows[4:]
    # another record at the same place
    cut(tmp_path / "many", tmp_path / "changed", 2)
    before = {path.name for path in (tmp_path / "changed" / "checkpoints").iterdir()}
    kept = (tmp_path / "changed" / "metrics.jsonl").read_bytes()
    files = shards(tmp_path / "shards", [*LINES[:10], LINES[11], *LINES[11:]])
    with pytest.raises(
        WorldError, match=r"data.examples had another content or order, .* when .*step_000002 was written"
    ):
        run_world(1, train_rows, sft(tmp_path / "changed", files))
    assert {path.name for path in (tmp_path / "changed" / "checkpoints").iterdir()} == before
    assert (tmp_path / "changed" / "metrics.jsonl").read_bytes() == kept


def _train_in_small_blocks(rank: int, given: list[str]) -> None:
    with small_blocks:
        train_rows(rank, given)


@pytest.mark.slow
def test_a_line_that_was_not_checked_is_an_error_on_all_ranks_when_it_is_read(tmp_path: Path) -> None:
    """Three blocks of 44 are looked at; one data rank of two reads the bad line."""
    lines = [*LINES[:200], '{"prompt": "1+", "answer": "x"}\n', *LINES[201:]]
    (tmp_path / "a.jsonl").write_text("".join(lines))
    long = {"sft__steps": 16, "sft__batch_size": 40, "run__checkpoint_every": 100}
    given = sft(tmp_path / "run", [str(tmp_path / "a.jsonl")], data__check_gigabytes=2e-6, **long)
    with pytest.raises(WorldError) as failure:
        run_world(2, _train_in_small_blocks, given)
    assert sorted(failure.value.errors) == [0, 1]
    for error in failure.value.errors.values():
        assert "a.jsonl, line 201: the character 'x'" in error
    rows = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert 0 < len(rows) < 16
    # with the whole of it checked it is refused before anything is begun
    shutil.rmtree(tmp_path / "run")
    with pytest.raises(WorldError, match=r"lacks 'x' of the data \('x' is in .*a.jsonl, line 201\)"):
        run_world(2, train_rows, sft(tmp_path / "run", [str(tmp_path / "a.jsonl")]))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("name", "more", "expected"),
    [
        ("sft", {"sft__batch_size": 10}, [("sft", 1, 10, 100), ("sft", 7, 70, 700)]),
        ("dpo", {"warmup": "null", "data__examples": "null", "preference__pairs": 4}, [("preference", 7, 28, 560)]),
        # 7 tokens of a prompt and at most 4 new ones, 8 samples of each
        (
            "grpo",
            {"rl__prompts": 4, "rl__group_size": 8, "rl__updates": 1},
            [("warmup", 7, 1792, 17920), ("rl", 7, 28, 2464)],
        ),
    ],
)
def test_a_dry_run_reads_what_the_steps_read(
    name: str, more: dict[str, object], expected: list[tuple[str, int, int, int]]
) -> None:
    path, *given = run(f"{name}_arithmetic.yaml", parallel="{}", **more)
    said: list[str] = []
    found = [*dry_run(load_config(path, given), 7, said.append)]
    got = [(done.phase, done.step, done.records, done.tokens) for done in found]
    assert [step for _, step, *_ in got] == [1, 7] * (len(got) // 2) and {*expected} <= {*got}
    assert all(done.filled == 1.0 and done.memory > 1e7 for done in found)  # all sequences are of one length
    assert said[-1].endswith("the longest sequence takes 11 tokens") or said[-1].endswith("10 tokens")


@pytest.mark.parametrize(
    ("batch", "updates", "expected", "text"),
    [
        # each of four prompts of 7 tokens has 8 samples of 4 new ones; two prompts in a row share their first tokens
        ("tokens: 80, micro_batch_size: null", 1, (2 * (7 + 32) * 2 - 3, 2 * 80, 2, 0, 0), "(56.5% shared)"),
        (
            "tokens: 30, micro_batch_size: null",
            1,
            (4 * (7 + 32 + 7), 8 * 30, 8, 4, 4 * 7),
            "(47.7% shared), 28 of them repeated by 4 groups that do not fit a row",
        ),
        ("micro_batch_size: 8", 1, (4 * (7 + 32), 4 * (7 + 32), 4, 0, 0), "(55.7% shared)"),
        # two updates of two prompts: the first two share no token, the others three
        ("tokens: 160, micro_batch_size: null", 2, (4 * (7 + 32) - 3, 2 * 160, 1, 0, 0), "(56.5% shared)"),
    ],
)
def test_a_dry_run_and_a_plan_pack_prefix_trees(
    batch: str, updates: int, expected: tuple[int, ...], text: str, tmp_path: Path
) -> None:
    settings = f"run: {{dtype: float32}}\nbatch: {{packing: true, share_prefixes: true, {batch}}}\n"
    settings += "parallel: {data: null, tensor: 1, context: 1, sequence_parallel: false}\n"
    settings += f"rl: {{prompts: 4, group_size: 8, updates: {updates}}}\ndata: {{held_out: null, examples: null}}\n"
    source = f"extends: {CONFIGS}/grpo_arithmetic.yaml\nevaluation: null\nwarmup: null\n"
    (tmp_path / "run.yaml").write_text(source + settings)
    [done] = dry_run(load_config(str(tmp_path / "run.yaml"), []), 1)
    assert done.tokens == 352 and done.trees is not None and astuple(done.trees) == expected
    assert done.filled == expected[0] / expected[1]
    [line] = planned(str(tmp_path / "run.yaml")).data
    assert line == (
        f"rl step 1: 352 tokens, {expected[0]} in rows of trees {text}; a data rank has up to {expected[2]} micro-batches, "
        f"{done.filled:.1%} full"
    )


def test_a_dry_run_refuses_what_a_run_would(tmp_path: Path) -> None:
    path, *given = run("sft_arithmetic.yaml", parallel="{}", model__max_positions=8)
    with pytest.raises(
        ValueError, match=r"held_out.jsonl, line 1: model.max_positions = 8 is too few; the sequence takes 12"
    ):
        next(dry_run(load_config(path, given)))
    path, *given = run("sft_arithmetic.yaml", parallel="{data: 3}", sft__batch_size=8)
    with pytest.raises(ValueError, match="is not divisible by the 3 data parallel ranks"):
        next(dry_run(load_config(path, given)))


def test_the_command_and_lists_of_patterns_beside_the_config(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shards(tmp_path / "deep", LINES)
    text = "extends: {}\ndata: {{held_out: null, examples: [deep/a_*.jsonl, deep/b.parquet], buffer_megabytes: 1}}\n"
    (tmp_path / "config.yaml").write_text(text.format(CONFIGS / "sft_arithmetic.yaml") + "evaluation: null\n")
    assert main(["data", str(tmp_path / "config.yaml"), "--steps", "2", "--sft.batch_size", "8"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith("data.examples: 600 records in 3 files, 0.0 MB")
    assert [line.split(":")[0] for line in said[2:]] == ["sft step 1", "sft step 2"]
    assert "sft step 2: 16 records, 160 tokens" in said[3] and "micro-batches 100.0% full" in said[3]
    (tmp_path / "deep" / "a_1.jsonl").write_text('{"prompt": "1"}\n')
    assert main(["data", str(tmp_path / "config.yaml")]) == 2
    assert "a_1.jsonl, line 1: the field 'answer' is missing" in capsys.readouterr().err
    assert main(["data", str(tmp_path / "config.yaml"), "--steps", "0"]) == 2
