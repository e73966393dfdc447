"""One private cluster for all tests that leave it as it was, and what became of each fault in the summary."""

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


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Also of tests that passed: the seed, the instant and what was said."""
    reports = [report for kind in ("passed", "failed") for report in terminalreporter.stats.get(kind, [])]
    told = [str(value) for report in reports for name, value in report.user_properties if name == "outcome"]
    if told:
        terminalreporter.section("what became of each fault")
        for line in told:
            terminalreporter.write_line(line)


@pytest.fixture(scope="session")
def running() -> Iterator[Cluster]:
    with Cluster(nodes=4) as cluster:
        yield cluster


@pytest.fixture
def cluster(running: Cluster) -> Cluster:
    """The session's, with nothing left to do of the tests before."""
    running.until(running.idle, 600, "the nodes to be idle")
    return running
