"""Blocks of 512 bytes, so that a small file has many."""

from __future__ import annotations

from unittest import mock

from parallel_rl.training.data.records import index

# around a test or the work of a rank: a rank of the warm pool keeps what it sets
small_blocks = mock.patch.object(index, "LEAST_STRETCH", 512)
