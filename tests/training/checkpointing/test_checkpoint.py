"""Reading checkpoints: what is damaged is set aside, what does not fit is refused."""

from __future__ import annotations

import os
import shutil
import warnings
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch.distributed as dist

from parallel_rl.testing.pool import WorldError, run_world
from parallel_rl.training.checkpointing.manifest import MANIFEST, share, written_by
from tests.training.checkpointing.saves import (
    Counter,
    Small,
    arguments,
    flip,
    shard_of,
    snapshot,
    truncate,
)

FAULTS = {
    "a flipped bit in a shard": lambda path: flip(shard_of(path)),
    "a shard cut off": lambda path: truncate(shard_of(path)),
    "a shard gone": lambda path: shard_of(path).unlink(),
    "the common part gone": lambda path: (path / "common.pt").unlink(),
    "the index flipped": lambda path: flip(path / ".metadata"),
    "the manifest flipped": lambda path: flip(path / MANIFEST),
    "the manifest cut off": lambda path: truncate(path / MANIFEST),
    "the manifest gone": lambda path: (path / MANIFEST).unlink(),
    "nothing left": lambda path: [file.unlink() for file in path.iterdir()],
}
NAMED = {  # the file that the message must name
    "the common part gone": "common.pt is missing",
    "the index flipped": ".metadata does not match its checksum",
    "the manifest flipped": MANIFEST,
    "the manifest cut off": MANIFEST,
    "the manifest gone": f"no {MANIFEST}",
    "nothing left": f"no {MANIFEST}",
}


def _each_fault(rank: int, given: list[str]) -> tuple[list[tuple[str, str | None, list[str]]], set[float]]:
    """Damages the newer of two checkpoints in each way; what is taken then and what is said; the last one's weights."""
    small, found = Small(given), []
    small.save(1)
    small.save(2)
    if rank == 0:
        shutil.copytree(small.folder, small.folder.parent / "kept")
    for name, damage in FAULTS.items():
        dist.barrier()
        if rank == 0:
            shutil.rmtree(small.folder)
            shutil.copytree(small.folder.parent / "kept", small.folder)
            damage(small.folder / "step_000002")
        dist.barrier()
        before = snapshot(small.folder / "step_000002")
        dist.barrier()
        path, said = small.newest()
        assert snapshot(small.folder / "step_000002.damaged") == before
        found.append((name, path and path.name, said))
    return found, small.load()


def test_a_damaged_newest_one_is_set_aside_and_the_one_before_is_taken(tmp_path: Path) -> None:
    for told, values in run_world(2, _each_fault, arguments(tmp_path, "{tensor: 2}")):
        assert values == {1.0}
        assert [name for name, *_ in told] == list(FAULTS)
        for name, taken, [line] in told:
            assert taken == "step_000001"
            assert "step_000002" in line and "set aside as step_000002.damaged" in line
            assert NAMED.get(name, ".distcp") in line


def _none_whole(rank: int, given: list[str]) -> None:
    small = Small(given)
    for number in (1, 2):
        flip(shard_of(small.save(number)))
    before = snapshot(small.folder)
    for _ in range(2):  # a second try must not take an empty folder for a new run
        with pytest.raises(
            ValueError, match=r"no checkpoint in .* is intact: .*step_000002.*distcp.*step_000001.*distcp"
        ):
            small.newest()
    assert snapshot(small.folder) == before


def test_without_a_whole_one_nothing_is_renamed_and_nothing_begins_anew(tmp_path: Path) -> None:
    run_world(1, _none_whole, arguments(tmp_path))


def _other_models(rank: int, given: list[str]) -> list[str]:
    from parallel_rl.training.checkpointing.contents import same_run
    from parallel_rl.training.checkpointing.resume import newest_whole
    from parallel_rl.training.config.load import load_config

    small, found = Small(given), []
    small.save(1)
    before = snapshot(small.folder)
    for change in (
        ["--model.layers=2"],
        ["--model.hidden=32"],
        ["--model.ffn_hidden=48"],
        ["--model.gated=true"],
        ["--model.max_positions=32"],
        ["--tokenizer.alphabet=9876543210+="],
        ["--run.dtype=float64"],
    ):
        check = same_run(load_config(given[0], [*given[1:], *change]), {"sft": 10})
        with pytest.raises(ValueError) as refusal:
            newest_whole(small.folder, check, found.append)
        found.append(str(refusal.value))
    assert snapshot(small.folder) == before
    return found


def test_a_checkpoint_of_another_model_names_the_field_and_both_values(tmp_path: Path) -> None:
    [found] = run_world(1, _other_models, arguments(tmp_path))
    for text, words in zip(
        found,
        (
            "model.layers is 1 there and 2 in",
            "model.hidden is 16 there and 32 in",
            "model.ffn_hidden is 64 there and 48 in",
            "model.gated is False there and True in",
            "model.max_positions is 64 there and 32 in",
            "tokenizer.alphabet is '0123456789+=' there and '9876543210+=' in",
            "run.dtype is 'float32' there and 'float64' in",
        ),
        strict=True,
    ):
        assert words in text and "Nothing was changed" in text


def _sources(rank: int, given: list[str]) -> list[str]:
    from parallel_rl.training.config.load import load_config
    from parallel_rl.training.trainer import train

    small, found = Small(given), []
    good = small.save(1)
    cases = {name: good.with_name(name) for name in ("flipped", "cut", "gone", "common", "index")}
    if rank == 0:
        for path in cases.values():
            shutil.copytree(good, path)
        flip(shard_of(cases["flipped"]))
        truncate(shard_of(cases["cut"]))
        shard_of(cases["gone"]).unlink()
        flip(cases["common"] / "common.pt")
        flip(cases["index"] / ".metadata")
    new = small.folder.parent / "new"
    dist.barrier()
    for path, *more in (
        *((path,) for path in cases.values()),
        (good.with_name("nowhere"),),
        (small.folder,),
        (good, "--model.hidden=32"),
        (good, f"--run.dir={small.folder.parent}", "--run.resume=never"),
    ):
        with pytest.raises(ValueError) as refusal:
            train(load_config(given[0], [*given[1:], f"--run.dir={new}", f"--run.init_from={path}", *more]))
        found.append(str(refusal.value))
    teacher = f"distillation: {{steps: 1, batch_size: 2, optimizer: {{lr: 1e-3}}, teacher: {cases['flipped']}}}\n"
    config = small.folder.parent / f"distillation{rank}.yaml"
    config.write_text(f"extends: {given[0]}\nsft: null\n{teacher}")
    with pytest.raises(ValueError) as refusal:
        train(load_config(str(config), [*given[1:], f"--run.dir={new}"]))
    found.append(str(refusal.value))
    dist.barrier()
    assert good.is_dir() and not new.exists()  # nothing was begun
    return found


@pytest.mark.slow
def test_init_from_is_refused_where_it_is_not_whole_or_does_not_fit(tmp_path: Path) -> None:
    found, others = run_world(2, _sources, arguments(tmp_path))
    assert found == others
    words = (
        ".distcp does not match its checksum",
        "were written",
        ".distcp is missing",
        "common.pt does not match its checksum",
        ".metadata does not match its checksum",
        "there is no such folder",
        f"it has no {MANIFEST}",
        "model.hidden is 16 there and 32 in this run",
        "run.resume = 'never' removes",
        "distillation.teacher = ",
    )
    for text, part in zip(found, words, strict=True):
        assert part in text


def _lacks_a_part(rank: int, given: list[str]) -> None:
    from parallel_rl.training.models.engine import freeze_copy

    small = Small(given)
    small.save(1)
    small.contents = replace(small.contents, reference=freeze_copy(small.contents.engine))
    small.load()


def test_a_checkpoint_without_a_part_that_the_run_has_is_refused(tmp_path: Path) -> None:
    with pytest.raises(WorldError, match="holds no reference, which this run has; it holds model, optimizer"):
        run_world(1, _lacks_a_part, arguments(tmp_path))


def _lacks_a_schedule(rank: int, given: list[str]) -> None:
    from parallel_rl.losses.mix import MixLossFn

    small = Small(given)
    small.contents = replace(small.contents, controllers={"mu": MixLossFn().mu_schedule})
    small.save(1)
    small.contents = replace(small.contents, controllers={"loss": MixLossFn()})
    small.load()


def test_a_schedule_does_not_start_over_without_a_word(tmp_path: Path) -> None:
    """A checkpoint that names the state of its loss otherwise, as older ones do, must not leave the loss at its first step."""
    with pytest.raises(WorldError, match=r"holds no controllers\.loss, which this run has; .*controllers\.mu"):
        run_world(1, _lacks_a_schedule, arguments(tmp_path))


def _refuses_to_be_sealed(rank: int, given: list[str]) -> list[str]:
    from parallel_rl.training.checkpointing import manifest

    small = Small(given)
    checksum = manifest.checksum

    def refuse(path: Path, *, sync: bool = False) -> object:
        raise ValueError("not a file")

    manifest.checksum = refuse  # type: ignore[assignment]
    try:
        small.save(1)
    except ValueError as error:
        return [str(error), *(path.name for path in small.folder.iterdir())]
    finally:
        manifest.checksum = checksum
    return []


def test_a_value_error_in_a_save_leaves_no_part_of_it(tmp_path: Path) -> None:
    [[text, *left]] = run_world(1, _refuses_to_be_sealed, arguments(tmp_path))
    assert "could not be written, those before it are untouched: not a file" in text and not left


def _begin_anew(rank: int, given: list[str]) -> list[bool]:
    from parallel_rl.training.checkpointing import resume
    from parallel_rl.training.config.load import load_config

    config, left = load_config(given[0], [*given[1:], "--run.resume=never"]), []
    folder = Path(config.run.dir)
    for job, restarts in (("7", 0), ("7", 1), ("7", 0), ("8", 2), ("", 0)):
        (folder / "checkpoints").mkdir(parents=True, exist_ok=True)
        with mock.patch.dict(os.environ, SLURM_JOB_ID=job, SLURM_RESTART_COUNT=str(restarts)):
            if resume.starts_over(config):
                resume.clear_run(folder, ["checkpoints"])
        left.append((folder / "checkpoints").exists())
    return left


def test_never_resuming_does_not_undo_a_requeued_jobs_work(tmp_path: Path) -> None:
    assert run_world(1, _begin_anew, arguments(tmp_path)) == [[False, True, False, False, False]]


def _with_counters(rank: int, given: list[str], saving: bool) -> list[int]:
    from megatron.core import parallel_state

    counter = Counter(-1)
    small = Small(given, {"counter": counter})
    counter.number = 10 + parallel_state.get_data_parallel_rank()
    if saving:
        small.save(1)
    else:
        small.load()
    return counter.parts


@pytest.mark.slow
def test_what_data_ranks_keep_comes_back_on_every_rank_of_any_layout(tmp_path: Path) -> None:
    run_world(4, _with_counters, arguments(tmp_path, "{tensor: 2}"), True)
    for world, layout in ((4, "{tensor: 2}"), (1, "{}"), (2, "{context: 2}")):
        for parts in run_world(world, _with_counters, arguments(tmp_path, layout), False):
            assert parts == [10, 11]


def test_files_are_looked_at_by_one_rank_each_and_hashed_by_their_writer() -> None:
    from parallel_rl.training.checkpointing.manifest import FileEntry

    files = {f"file{number}": FileEntry(100 * number, "") for number in range(9)}
    parts = [share(files, rank, 3) for rank in range(3)]
    assert sorted(name for part in parts for name in part) == sorted(files)
    assert max(sum(files[name].size for name in part) for part in parts) <= 1500
    assert [written_by(name, 4) for name in ("__3_0.distcp", "__12_1.distcp", "common.pt", ".metadata")] == [3, 0, 0, 0]


def _warnings_of_a_load(rank: int, given: list[str]) -> list[str]:
    small = Small(given)
    small.save(1)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        small.load()
    return [str(warning.message) for warning in said if "ShardedTensor" in str(warning.message)]


def test_a_load_does_not_warn_of_what_megatron_does(tmp_path: Path) -> None:
    assert run_world(1, _warnings_of_a_load, arguments(tmp_path)) == [[]]
