"""The start of a run: from its newest checkpoint, or at its first step in a cleared folder; and the configs of its starts."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import yaml

from parallel_rl.agreement import on_first_rank
from parallel_rl.config.hf_config import is_hf
from parallel_rl.config.yaml_files import parsed
from parallel_rl.megatron.hf import check_hf
from parallel_rl.training.checkpointing import storage
from parallel_rl.training.checkpointing.contents import same_run, same_weights
from parallel_rl.training.checkpointing.manifest import (
    CheckpointMetadata,
    DamagedCheckpoint,
    fault,
    read_manifest,
    verify_checksums,
)
from parallel_rl.training.checkpointing.sharded import bytes_of
from parallel_rl.training.config.sections import DTYPES
from parallel_rl.training.config.train import TrainConfig
from parallel_rl.training.data.datasets import Datasets
from parallel_rl.training.models.engine import Engine
from parallel_rl.training.reporting.run_log import read_metrics, write_whole


def newest_whole(
    folder: Path, check: Callable[[Path, CheckpointMetadata], None], say: Callable[[str], None]
) -> tuple[Path, CheckpointMetadata] | None:
    """Return the newest intact checkpoint, or None for an empty folder; newer damaged ones are renamed.

    `say` gets a line for each file that was removed or renamed. ValueError if no checkpoint is intact (nothing is
    renamed then), or if `check` refuses the newest as of another model.
    """
    unusable = f"the checkpoints in {folder} cannot be used"
    for text in on_first_rank(lambda: storage.clean_up(folder), unusable):
        say(text)
    damaged: list[tuple[Path, str]] = []
    for path in reversed(on_first_rank(lambda: storage.list_checkpoints(folder), unusable)):
        try:
            manifest = on_first_rank(lambda path=path: read_manifest(path), unusable)  # type: ignore[misc]
            check(path, manifest.metadata)
            verify_checksums(path, manifest)
        except DamagedCheckpoint as error:
            damaged.append((path, str(error)))
            continue
        for bad, why in damaged:
            aside = on_first_rank(lambda bad=bad: storage.set_aside(bad), unusable)  # type: ignore[misc]
            say(f"{why}; set aside as {aside.name}, {path.name} is used instead")
        return path, manifest.metadata
    if damaged:
        raise ValueError(
            f"no checkpoint in {folder} is intact: {'; '.join(why for _, why in damaged)}. Nothing was changed; "
            "restore one, or set run.resume = 'never' or another run.dir to start over"
        )
    return None


_BEGUN_BY = ".begun_by"


def check_sources(config: TrainConfig) -> None:
    """Raise ValueError if a checkpoint that the config names has another model or other file sizes."""
    teacher = config.teacher if config.teacher is not None and is_hf(config.teacher) else None
    for key, folder, has_head in (("model.hf", config.model.hf, config.scalar_head), ("teacher", teacher, False)):
        if folder is not None:
            try:
                check_hf(folder, scalar_head=has_head)
            except ValueError as error:
                raise ValueError(f"{key} = {folder!r} cannot be used: {error}") from None
    mine = (Path(config.run.dir) / "checkpoints").resolve()
    for key, name, scalar_head in _sources(config):
        path = Path(name)
        if config.run.resume == "never" and path.resolve().is_relative_to(mine):
            raise ValueError(f"{key} = {name!r} is in run.dir, whose checkpoints run.resume = 'never' removes; move it")
        try:
            manifest = read_manifest(path)
        except ValueError as error:
            raise ValueError(f"{key} = {name!r} cannot be used: {error}") from None
        same_weights(config, key, scalar_head=scalar_head)(path, manifest.metadata)
        for file, entry in manifest.files.items():
            if damage := fault(path / file, entry, contents=False):
                raise ValueError(f"{key} = {name!r} is damaged: {damage}")


def verify_sources(config: TrainConfig, *, begins: bool) -> None:
    """Verify the config's checkpoints, each rank a part of the files; ValueError on all for a damaged one."""
    for key, name, _ in _sources(config):
        if begins or key != "run.init_from":
            path, cannot = Path(name), f"{key} = {name!r} cannot be used"
            try:
                verify_checksums(path, on_first_rank(lambda path=path: read_manifest(path), cannot))  # type: ignore[misc]
            except ValueError as error:
                raise ValueError(f"{cannot}: {error}") from None


def find_start(
    config: TrainConfig, phases: Mapping[str, int], data: Datasets, say: Callable[[str], None]
) -> tuple[bool, tuple[Path, CheckpointMetadata] | None]:
    """Return whether a run starts over, and the checkpoint to resume from, if any.

    `phases` maps each phase to its steps, in order. `say` gets a line for each file that was removed or renamed, and
    one if no step is left. ValueError on all ranks for a checkpoint of another model or other data, no intact one, or
    unreadable rows.
    """
    folder = Path(config.run.dir)
    on_first_rank(lambda: check_sources(config), "the checkpoints that the config names cannot be read")
    over = on_first_rank(lambda: starts_over(config), f"run.dir = {config.run.dir!r} cannot be read")
    latest = None
    if not over:
        metrics, same = folder / "metrics.jsonl", same_run(config, phases)
        on_first_rank(lambda: len(read_metrics(metrics)), f"{metrics} cannot be read")

        def check(path: Path, metadata: CheckpointMetadata) -> None:
            same(path, metadata)
            data.check_metadata(metadata.values, path)

        latest = newest_whole(folder / "checkpoints", check, say)
        if latest is not None and (done := _done(*latest, phases)):
            say(done)
    verify_sources(config, begins=latest is None)
    return over, latest


def nothing_left(config: TrainConfig, phases: Mapping[str, int]) -> str:
    """Return why the newest intact checkpoint leaves no step to run; "" if some are left."""
    if starts_over(config):
        return ""
    for path in reversed(storage.list_checkpoints(Path(config.run.dir) / "checkpoints")):
        try:
            return _done(path, read_manifest(path).metadata, phases)
        except ValueError:  # the run resumes from an older one
            continue
    return ""


def _done(path: Path, metadata: CheckpointMetadata, phases: Mapping[str, int]) -> str:
    last, steps = list(phases.items())[-1]
    done = (metadata.progress.phase, metadata.progress.step) == (last, steps)
    return f"nothing is left to do: {path} has all steps ({last} step {steps})" if done else ""


def check_room(config: TrainConfig, engine: Engine, goes: Sequence[str]) -> None:
    """Raise ValueError on all ranks if the disk lacks room for a checkpoint, or `goes` has foreign files.

    `goes` lists what the run removes from its folder before.
    """
    weight = DTYPES[config.run.dtype].itemsize
    moments = 2 * max(4, weight) + (4 if weight < 4 else 0)  # moments, and a master weight
    trained = 2 if config.rl is not None and config.rl.critic is not None else 1
    parameters = bytes_of({"model": engine.bare.sharded_state_dict()}, engine.device) // weight
    needed = parameters * (trained * (weight + moments) + (weight if config.needs_reference else 0))
    folder = Path(config.run.dir)

    def check() -> None:
        if foreign := storage.foreign(folder, goes):
            raise ValueError(
                f"run.resume = 'never' would remove {foreign}, which no run made. Nothing was changed; move it away, or choose "
                "another run.dir"
            )
        free = storage.free_bytes(folder) + storage.bytes_in(folder, goes)
        if free < needed:
            raise ValueError(
                f"run.dir = {config.run.dir!r}: a checkpoint takes {storage.in_words(needed)} and {storage.in_words(free)} are "
                f"free{' once the run there is removed' if goes else ''}. Nothing was changed; make room, or choose another "
                "run.dir"
            )

    on_first_rank(check, f"run.dir = {config.run.dir!r} cannot be used")


def starts_over(config: TrainConfig) -> bool:
    """Return whether this start replaces run.dir, by run.resume = 'never'; only once per Slurm job."""
    marker, job = Path(config.run.dir) / _BEGUN_BY, os.environ.get("SLURM_JOB_ID", "")
    requeued = int(os.environ.get("SLURM_RESTART_COUNT") or 0) > 0
    begun = requeued and marker.is_file() and marker.read_text(encoding="utf-8") == job
    return config.run.resume == "never" and not begun


def outputs(config: TrainConfig) -> tuple[str, ...]:
    """List the folders that a run writes and `clear_run` removes, besides metrics.jsonl and config.yaml."""
    record = config.rl is not None and config.rl.record
    updates = config.server is not None and config.server.update is not None
    return (
        "checkpoints",
        "dumps",
        "tensorboard",
        *(("rollouts",) if record else ()),
        *(("policy",) if updates else ()),
    )


def clear_run(folder: Path, names: Sequence[str]) -> None:
    """Remove a run's files from its folder, and record the Slurm job."""
    job = os.environ.get("SLURM_JOB_ID", "")

    def clear() -> None:
        storage.remove(folder, names)
        remove_configs(folder)
        if job:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / _BEGUN_BY).write_text(job, encoding="utf-8")

    on_first_rank(clear, f"the old run's files in {folder} cannot be removed")


def _sources(config: TrainConfig) -> list[tuple[str, str, bool]]:
    """List each checkpoint that the config names: key, folder, and whether it may have a scalar head."""
    teacher = ("distillation" if config.distillation is not None else "rl") + ".teacher"
    if config.run.init_from is not None and is_hf(config.run.init_from):
        folder = config.run.init_from
        raise ValueError(
            f"run.init_from = {folder!r} is a Hugging Face folder, not a checkpoint of this trainer; "
            f"set model: {{hf: {folder}}} instead"
        )
    named = [("run.init_from", config.run.init_from, config.scalar_head), (teacher, config.teacher, False)]
    return [(key, name, head) for key, name, head in named if name is not None and not (key == teacher and is_hf(name))]


_NAME = re.compile(r"config\.([1-9]\d{0,8})\.yaml")
_HEAD = "# of the starts before "  # distinguishes a kept one from a user's file
_SHOWN = 40  # differences
_ABSENT = object()


def write_config(folder: Path, config: Mapping[str, object], *, starts_over: bool = False) -> list[str]:
    """Write config.yaml; keep a different older one as config.<number>.yaml, and list the changes.

    An OSError leaves config.yaml as it was.

    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> write_config(folder, {"rl": {"optimizer": {"lr": 0.1}}})
    []
    >>> write_config(folder, {"rl": {"optimizer": {"lr": 0.2}}})
    ['the config has changed; the old one is kept as config.1.yaml', '  rl.optimizer.lr: 0.1 -> 0.2']
    """
    path, text = folder / "config.yaml", yaml.safe_dump(dict(config), sort_keys=False)
    lines: list[str] = []
    if path.is_file() and not starts_over:
        before = path.read_text(encoding="utf-8", errors="replace")
        if lines := _differences(before, text):
            kept = _keep(folder, before)
            lines = [f"the config has changed; the old one is kept as {kept.name}", *lines]
    write_whole(path, text)
    return lines


def remove_configs(folder: Path) -> None:
    """Remove the configs that `write_config` kept."""
    for path in _kept(folder):
        path.unlink()


def _differences(before: str, after: str) -> list[str]:
    try:
        old = parsed(before)
    except ValueError as error:
        return [f"  it is not valid YAML: {str(error).splitlines()[0]}"]
    lines = [f"  {key}: {_text(a)} -> {_text(b)}" for key, a, b in _changes("", old, parsed(after))]
    return [*lines[:_SHOWN], *([f"  and {len(lines) - _SHOWN} more"] if len(lines) > _SHOWN else [])]


def _changes(key: str, old: object, new: object) -> Iterator[tuple[str, object, object]]:
    """List (dotted key, old value, new value) of changes, in the new config's order."""
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        for name in dict.fromkeys([*new, *old]):
            below = f"{key}.{name}" if key else str(name)
            yield from _changes(below, old.get(name, _ABSENT), new.get(name, _ABSENT))
    elif type(old) is not type(new) or old != new:
        yield key or "all of it", old, new


def _text(value: object) -> str:
    if value is _ABSENT:
        return "(absent)"
    text = yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=1 << 20)
    return text.removesuffix("...\n").strip()


def _keep(folder: Path, text: str) -> Path:
    numbers = [int(match[1]) for path in folder.iterdir() if (match := _NAME.fullmatch(path.name))]
    path = folder / f"config.{max(numbers, default=0) + 1}.yaml"
    write_whole(path, f"{_HEAD}{time.strftime('%Y-%m-%d %H:%M:%S')}\n{text}")
    return path


def _kept(folder: Path) -> list[Path]:
    paths = [path for path in folder.glob("config.*.yaml") if _NAME.fullmatch(path.name) and path.is_file()]
    return [path for path in paths if path.read_bytes().startswith(_HEAD.encode())]
