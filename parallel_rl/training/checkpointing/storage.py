"""The checkpoint folder: list, commit atomically, prune, quarantine."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from parallel_rl.training.checkpointing.manifest import MANIFEST, read_manifest, sync_folder

_NAME = re.compile(r"step_(\d{6,})")
# names that a run gives in its folders: checkpoints, partial and damaged ones, rollouts, weights, TensorBoard's files
_RUN_FILES = re.compile(
    r"(\.(partial|replaced|pruned)_|[a-z]+_)?step_\d{6,}(\.damaged\d*|_\d+\.jsonl)?"
    r"|\.?version_\d{6,}_\d+(\.\d+\.partial)?|events\.out\.tfevents\..*|\.nfs.*"
)
_PATIENCE = 5.0  # seconds that all ranks wait for a removal, which then continues in a thread
_UNITS = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"))
_PARTIAL, _REPLACED, _PRUNED = ".partial_", ".replaced_", ".pruned_"


@dataclass(frozen=True)
class Retention:
    """Checkpoints to keep: the `newest`, and those at multiples of `every` steps of a phase (0: none)."""

    newest: int
    every: int = 0


def path_of(folder: Path, number: int) -> Path:
    return folder / f"step_{number:06d}"


def number_of(path: Path) -> int:
    return int(path.name[5:])


def list_checkpoints(folder: Path) -> list[Path]:
    """List the checkpoints of a folder, oldest first, without verifying them."""
    paths = [path for path in folder.iterdir() if _NAME.fullmatch(path.name)] if folder.is_dir() else []
    return sorted(paths, key=number_of)


def make_partial(final: Path, needed: int) -> Path:
    """Make an empty hidden folder next to `final`; OSError if that fails or `needed` bytes are not free."""
    partial = final.with_name(_PARTIAL + final.name)
    for cut_off in final.parent.glob(f"{_PARTIAL}*"):
        shutil.rmtree(cut_off)
    partial.mkdir(parents=True)
    free = free_bytes(partial)
    if free < needed:
        partial.rmdir()
        raise OSError(f"the disk is full: the checkpoint takes {in_words(needed)} and {in_words(free)} are free")
    return partial


def publish(partial: Path, final: Path) -> None:
    """Rename a filled folder to its final name; `clean_up` repairs a kill in between."""
    replaced = final.with_name(_REPLACED + final.name)
    sync_folder(partial)
    if final.exists():
        final.rename(replaced)
    partial.rename(final)
    sync_folder(final.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def prune(folder: Path, keep: Retention, written: Path) -> None:
    """Remove what `keep` does not hold, except `written` and checkpoints being read; OSError on failure."""
    gone = []
    for path in list_checkpoints(folder)[: -keep.newest]:
        if path == written or (keep.every and _step_of(path) % keep.every == 0):
            continue
        with _lock(path, fcntl.LOCK_EX) as free:
            if not free:
                continue
            gone.append(path.with_name(_PRUNED + path.name))  # renamed first: a half removed one must not look whole
            path.rename(gone[-1])
    failed: list[OSError] = []

    def remove() -> None:
        try:
            for path in gone:
                shutil.rmtree(path)
        except OSError as error:
            failed.append(error)

    removal = threading.Thread(target=remove, name="prune")  # the process waits for it at its end
    removal.start()
    removal.join(_PATIENCE)
    if failed:
        raise failed[0]


def _step_of(path: Path) -> int:
    try:
        return read_manifest(path).metadata.progress.step
    except ValueError:
        return 0  # unknown, so it stays


def clean_up(folder: Path) -> list[str]:
    """Clean up after interrupted saves; return a line for each change."""
    notes = []
    for path in sorted(folder.glob(".*_step_*")) if folder.is_dir() else []:
        final = folder / path.name[path.name.index("step_") :]
        if path.name.startswith(_REPLACED) and not final.exists():
            path.rename(final)
            notes.append(f"{final}: an interrupted save had moved it; it is restored")
        elif path.name.startswith((_PARTIAL, _REPLACED, _PRUNED)):
            shutil.rmtree(path)
            if path.name.startswith(_PARTIAL):
                notes.append(f"{final}: its save was interrupted; the unfinished part was removed")
    return notes


def set_aside(path: Path) -> Path:
    """Rename a damaged checkpoint, so that no run resumes from it."""
    aside, count = path.with_name(path.name + ".damaged"), 1
    while aside.exists():
        count += 1
        aside = path.with_name(f"{path.name}.damaged{count}")
    path.rename(aside)
    sync_folder(path.parent)
    return aside


def foreign(folder: Path, names: Sequence[str]) -> Path | None:
    """Return the first file that `remove` would take and whose name no run gives."""
    for path in (folder / name for name in names):
        if path.is_dir() and not path.is_symlink():
            others = sorted(entry.name for entry in path.iterdir() if not _RUN_FILES.fullmatch(entry.name))
            if (other := foreign(path, others)) is not None:
                return other
        elif os.path.lexists(path):
            return path
    return None


def remove(folder: Path, names: Sequence[str]) -> None:
    for name in names:
        if (folder / name).exists():
            shutil.rmtree(folder / name)


def bytes_in(folder: Path, names: Sequence[str]) -> int:
    """Count the bytes that `remove` would free."""
    files = (file for name in names for file in (folder / name).rglob("*") if file.is_file() and not file.is_symlink())
    return sum(512 * file.stat().st_blocks for file in files)


def free_bytes(path: Path) -> int:
    """Return the free bytes on the disk of a folder, which need not exist yet."""
    while not path.exists() and path != path.parent:
        path = path.parent
    return shutil.disk_usage(path).free


def in_words(count: int) -> str:
    """Format a number of bytes."""
    return next(f"{count / size:.1f} {unit}" for size, unit in _UNITS if count >= size or unit == "kB")


@contextlib.contextmanager
def reading(path: Path) -> Iterator[None]:
    """Protect a checkpoint from another run's `prune` in a `with` block; the lock ends with the process."""
    with _lock(path, fcntl.LOCK_SH):
        yield


@contextlib.contextmanager
def _lock(path: Path, kind: int) -> Iterator[bool]:
    """Return whether the lock was free; also without locks or a manifest."""
    try:
        file = (path / MANIFEST).open("r+b" if kind == fcntl.LOCK_EX else "rb")
    except OSError:
        yield True
        return
    with file:
        try:
            fcntl.flock(file, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        except OSError:
            pass
        yield True
