"""One private cluster for all tests that leave it as it was."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.slurm.cluster import Cluster, missing


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    why = None
    for item in items:
        if item.get_closest_marker("slurm"):
            why = missing() if why is None else why
            if why:
                item.add_marker(pytest.mark.skip(reason=f"no private Slurm: {why}"))


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    with Cluster(nodes=4) as running:
        yield running
