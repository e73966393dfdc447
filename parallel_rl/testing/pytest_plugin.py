"""A pytest plugin: `pytest_plugins = ["parallel_rl.testing.pytest_plugin"]` in your conftest.py gives the fixture `law`.

def test_my_loss(law):
    law(MyLoss, worlds=(1, 2))
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import pytest

from parallel_rl.testing.check import WORLDS, check_law
from parallel_rl.testing.pool import close
from parallel_rl.testing.subjects import Loss


@pytest.fixture(scope="session")
def law() -> Iterator[Callable[..., None]]:
    """Fail with a diagnosis if a loss breaks the law; takes the arguments of `check_law`."""

    def check(loss: Loss, worlds: Sequence[int] = WORLDS) -> None:
        check_law(loss, worlds).raise_if_broken()

    yield check
    close()
