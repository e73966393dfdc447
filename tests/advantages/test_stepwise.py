"""Estimators whose rows are steps of runs, against loops over runs."""

from __future__ import annotations

import statistics

import pytest
import torch
from torch import Tensor

from parallel_rl.advantages import estimate

# run -> (task, rewards of its steps, states of its steps)
RUNS: dict[int, tuple[int, list[float], list[int]]] = {
    7: (1, [0.0, 0.5, 1.0], [100, 101, 102]),
    3: (1, [0.25, -1.0], [100, 103]),
    9: (1, [2.0], [100]),
    4: (2, [1.0, 0.0], [101, 100]),
    5: (2, [1.0, 3.0, 0.5, 0.25], [200, 101, 201, 201]),
}


def batch() -> tuple[dict[str, Tensor], list[tuple[int, int]]]:
    """All steps in a random order, and which (run, step) each row is."""
    rows = [(run, step) for run, (_, rewards, _) in RUNS.items() for step in range(len(rewards))]
    rows = [rows[i] for i in torch.randperm(len(rows), generator=torch.Generator().manual_seed(0)).tolist()]
    data = {
        "rewards": torch.tensor([RUNS[run][1][step] for run, step in rows], dtype=torch.float64),
        "group_ids": torch.tensor([RUNS[run][0] for run, _ in rows]),
        "run_ids": torch.tensor([run for run, _ in rows]),
        "step_ids": torch.tensor([10 * step for _, step in rows]),
        "state_ids": torch.tensor([RUNS[run][2][step] for run, step in rows]),
        "token_mask": torch.ones(len(rows), 1),
    }
    return data, rows


def compared(values: dict, key: dict, normalize: str) -> dict:
    """Each value less the mean of those with its key, over their deviation; 0 for one alone."""
    found = {}
    for name, value in values.items():
        group = [values[other] for other in values if key[other] == key[name]]
        scale = statistics.stdev(group) + 1e-6 if normalize == "std" and len(group) > 1 else 1.0
        found[name] = (value - statistics.fmean(group)) / scale
    return found


@pytest.mark.parametrize("normalize", ["std", "none"])
@pytest.mark.parametrize("per_step", [False, True])
def test_stepwise_grpo(normalize: str, per_step: bool) -> None:
    data, rows = batch()
    last = compared(
        {run: r[-1] for run, (_, r, _) in RUNS.items()}, {run: t for run, (t, _, _) in RUNS.items()}, normalize
    )
    found = estimate({"name": "stepwise_grpo", "normalize": normalize, "per_step": per_step}, data).advantages[:, 0]
    expected = [last[run] / (len(RUNS[run][1]) if per_step else 1) for run, _ in rows]
    assert found.tolist() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("normalize", ["std", "none"])
def test_gigpo(normalize: str) -> None:
    data, rows = batch()
    tasks = {run: task for run, (task, _, _) in RUNS.items()}
    episode = compared({run: sum(r) for run, (_, r, _) in RUNS.items()}, tasks, normalize)
    returns = {(run, step): sum(0.9**k * reward for k, reward in enumerate(RUNS[run][1][step:])) for run, step in rows}
    steps = compared(returns, {(run, step): RUNS[run][2][step] for run, step in rows}, normalize)
    options = {"name": "gigpo", "normalize": normalize, "omega": 0.7, "gamma": 0.9}
    found = estimate(options, data).advantages[:, 0]
    assert found.tolist() == pytest.approx([episode[run] + 0.7 * steps[run, step] for run, step in rows], rel=1e-12)


@pytest.mark.parametrize("name", ["stepwise_grpo", "gigpo"])
def test_bad_runs(name: str) -> None:
    data, rows = batch()
    moved = data["group_ids"].clone()
    moved[rows.index((5, 2))] = 1
    with pytest.raises(ValueError, match="run 5 has steps in several groups"):
        estimate(name, {**data, "group_ids": moved})
    with pytest.raises(ValueError, match="run 3 has two steps of one number"):
        estimate(name, {**data, "step_ids": torch.where(data["run_ids"] == 3, 0, data["step_ids"])})
    with pytest.raises(ValueError, match="group 2 has one sample"):
        estimate(name, {key: x[data["run_ids"] != 4] for key, x in data.items()})
    with pytest.raises(ValueError, match=r"run_ids must be integers \[N\] = \[12\], got torch.float32"):
        estimate(name, {**data, "run_ids": data["run_ids"].float()})
