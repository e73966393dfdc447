"""Hooks for the whole suite."""

import pytest
import torch

from parallel_rl.testing import pool

torch.set_num_threads(1)  # OpenMP threads that wait for a busy core cost more than they bring


def pytest_sessionfinish(session: pytest.Session) -> None:
    pool.close()
