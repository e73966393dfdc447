"""Find the newest intact checkpoint of a run."""

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
    """Return the newest checkpoint whose files are all intact, or None if the folder has none.

    Newer damaged ones are renamed. Each rank verifies a part of the files.

    Args:
        check: refuses a checkpoint of another model by a ValueError.
        say: takes a line for each file that was removed or renamed.

    Raises:
        ValueError: no checkpoint is intact (nothing is renamed then), or `check` refused the newest.
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
