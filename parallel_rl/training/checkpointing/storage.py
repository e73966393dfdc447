"""The folder of a run's checkpoints: which are there, how one is put in whole, which go, which are set aside."""

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
# what a run makes in its folders: checkpoints, whole, half and damaged ones; rollouts; weights for servers; TensorBoard's files
_MADE = re.compile(
    r"(\.(partial|replaced|pruned)_|[a-z]+_)?step_\d{6,}(\.damaged\d*|_\d+\.jsonl)?"
    r"|\.?version_\d{6,}_\d+(\.\d+\.partial)?|events\.out\.tfevents\..*|\.nfs.*"
)
_PATIENCE = 5.0  # seconds that all ranks wait for a removal
_UNITS = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"))
_PARTIAL, _REPLACED, _PRUNED = ".partial_", ".replaced_", ".pruned_"


@dataclass(frozen=True)
class Retention:
    """Checkpoints that stay: the `newest` ones, and those whose step in the phase is a multiple of `every` (0: none)."""

    newest: int
    every: int = 0


def path_of(folder: Path, number: int) -> Path:
    """The folder of the checkpoint after `number` steps."""
    return folder / f"step_{number:06d}"


def number_of(path: Path) -> int:
    """The steps that its run had done."""
    return int(path.name[5:])


def list_checkpoints(folder: Path) -> list[Path]:
    """The checkpoints of a folder, oldest first; whether their content is whole is not looked at."""
    paths = [path for path in folder.iterdir() if _NAME.fullmatch(path.name)] if folder.is_dir() else []
    return sorted(paths, key=number_of)


def make_partial(final: Path, needed: int) -> Path:
    """An empty hidden folder beside `final`, to be filled and then published.

    Args:
        final: where the checkpoint will stand.
        needed: bytes that it will take at least.

    Raises:
        OSError: the folder cannot be made, or the disk has no room.
    """
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
    """Give a filled folder its name; an older one of that name goes only then, and `clean_up` repairs a kill in between."""
    replaced = final.with_name(_REPLACED + final.name)
    sync_folder(partial)
    if final.exists():
        final.rename(replaced)
    partial.rename(final)
    sync_folder(final.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def prune(folder: Path, keep: Retention, written: Path) -> None:
    """Removes what `keep` does not hold; never `written`, nor one that is being read: its turn comes with the next save.

    A slow disk is not waited for: what takes longer than some seconds goes on beside the run.

    Raises:
        OSError: one could not be removed.
    """
    gone = []
    for path in list_checkpoints(folder)[: -keep.newest]:
        if path == written or (keep.every and _step_of(path) % keep.every == 0):
            continue
        with _lock(path, fcntl.LOCK_EX) as free:
            if not free:
                continue
            gone.append(path.with_name(_PRUNED + path.name))  # a half removed one must not look like a whole one
            path.rename(gone[-1])
    failed: list[OSError] = []

    def remove() -> None:
        try:
            for path in gone:
                shutil.rmtree(path)
        except OSError as error:
            failed.append(error)

    removal = threading.Thread(target=remove, name="prune")  # the process ends after it
    removal.start()
    removal.join(_PATIENCE)
    if failed:
        raise failed[0]


def _step_of(path: Path) -> int:
    try:
        return read_manifest(path).metadata.progress.step
    except ValueError:
        return 0  # nobody knows; it stays


def clean_up(folder: Path) -> list[str]:
    """Clear up after saves that a kill cut off; return a line on each thing done."""
    notes = []
    for path in sorted(folder.glob(".*_step_*")) if folder.is_dir() else []:
        final = folder / path.name[path.name.index("step_") :]
        if path.name.startswith(_REPLACED) and not final.exists():
            path.rename(final)
            notes.append(f"{final}: a save that was cut off had moved it; it is in its place again")
        elif path.name.startswith((_PARTIAL, _REPLACED, _PRUNED)):
            shutil.rmtree(path)
            if path.name.startswith(_PARTIAL):
                notes.append(f"{final}: its save was cut off; the unfinished part was removed")
    return notes


def set_aside(path: Path) -> Path:
    """Renames a damaged checkpoint, so that no run takes it; nothing of it is removed."""
    aside, count = path.with_name(path.name + ".damaged"), 1
    while aside.exists():
        count += 1
        aside = path.with_name(f"{path.name}.damaged{count}")
    path.rename(aside)
    sync_folder(path.parent)
    return aside


def foreign(folder: Path, names: Sequence[str]) -> Path | None:
    """The first file that `remove` would take and that lies under no name which a run gives."""
    for path in (folder / name for name in names):
        if path.is_dir() and not path.is_symlink():
            others = sorted(entry.name for entry in path.iterdir() if not _MADE.fullmatch(entry.name))
            if (found := foreign(path, others)) is not None:
                return found
        elif os.path.lexists(path):
            return path
    return None


def remove(folder: Path, names: Sequence[str]) -> None:
    """Removes what stands in a folder under these names, if anything does."""
    for name in names:
        if (folder / name).exists():
            shutil.rmtree(folder / name)


def bytes_in(folder: Path, names: Sequence[str]) -> int:
    """Bytes that `remove` would free."""
    files = (file for name in names for file in (folder / name).rglob("*") if file.is_file() and not file.is_symlink())
    return sum(512 * file.stat().st_blocks for file in files)


def free_bytes(path: Path) -> int:
    """Free bytes on the disk of a folder, which need not exist yet."""
    while not path.exists() and path != path.parent:
        path = path.parent
    return shutil.disk_usage(path).free


def in_words(count: int) -> str:
    """Bytes as people say them."""
    return next(f"{count / size:.1f} {unit}" for size, unit in _UNITS if count >= size or unit == "kB")


@contextlib.contextmanager
def reading(path: Path) -> Iterator[None]:
    """Inside, `prune` of another run leaves the checkpoint alone; the lock goes with its process."""
    with _lock(path, fcntl.LOCK_SH):
        yield


@contextlib.contextmanager
def _lock(path: Path, kind: int) -> Iterator[bool]:
    """Whether the lock was free; a file system without locks, or a folder without a manifest, counts as free."""
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
