"""Finding the checkpoint to go on from: the newest whose every file is as it was written."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from parallel_rl.agreement import on_first_rank
from parallel_rl.training.checkpointing import storage
from parallel_rl.training.checkpointing.manifest import (
    CheckpointMetadata,
    DamagedCheckpoint,
    read_manifest,
    verify_checksums,
)


def newest_whole(
    folder: Path, check: Callable[[Path, CheckpointMetadata], None], say: Callable[[str], None]
) -> tuple[Path, CheckpointMetadata] | None:
    """The newest checkpoint of a run whose every file is as it was written, or None where there is none at all.

    Newer ones that are not are set aside under another name. Every rank looks through its part of the files.

    Args:
        folder: of the run's checkpoints.
        check: refuses a checkpoint of another model by a ValueError.
        say: gets a line for each file that was cleared up or set aside.

    Raises:
        ValueError: there are checkpoints, but none is whole (nothing is renamed then), or `check` refused the newest.
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
            say(f"{why}; set aside as {aside.name}, {path.name} is taken instead")
        return path, manifest.metadata
    if damaged:
        raise ValueError(
            f"no checkpoint in {folder} is whole: {'; '.join(why for _, why in damaged)}. Nothing was changed; "
            "restore one, or set run.resume = 'never' or another run.dir to start over"
        )
    return None
