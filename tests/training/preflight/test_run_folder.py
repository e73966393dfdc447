"""A run's folder on several nodes: found out before the first step, not at the first checkpoint."""

from __future__ import annotations

import errno
import os
import socket
import tempfile
from pathlib import Path
from unittest import mock

import pytest

from parallel_rl.testing import pool

pool.preload("parallel_rl.training.checkpointing.run_folder")


def _look(rank: int, folders: list[Path], read_only: int | None) -> None:
    """As two nodes of one rank each; the file system of one of them may be mounted for reading only."""
    from parallel_rl.training.checkpointing.run_folder import check_on_every_node

    refuses = OSError(errno.EROFS, os.strerror(errno.EROFS))
    with (
        mock.patch.dict(os.environ, {"LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0"}),
        mock.patch.object(
            tempfile, "TemporaryFile", side_effect=refuses if rank == read_only else tempfile.TemporaryFile
        ),
    ):
        check_on_every_node(folders[rank])


def test_a_folder_that_a_node_cannot_use_is_refused_on_all_ranks(tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    one.mkdir()
    other.mkdir()
    pool.run_world(2, _look, [one / "runs" / "run"] * 2, None)
    host = socket.gethostname()
    for folders, read_only, said in (
        ([one / "run", other / "run"], None, f"rank 1: .* is another folder on {host} than on {host}: a file"),
        ([one, one], 1, f"rank 1: on {host}, run.dir = .* cannot be written: .*Read-only file system"),
        ([one, one], 0, "run.dir = .* cannot be written: .*Read-only file system"),
    ):
        with pytest.raises(pool.WorldError, match=said) as failure:
            pool.run_world(2, _look, folders, read_only)
        assert set(failure.value.errors) == {0, 1}
    assert [*one.iterdir()] == [*other.iterdir()] == []
