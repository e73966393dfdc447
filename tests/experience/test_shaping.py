"""Reward shaping: the values of each rule, at its corners too."""

from __future__ import annotations

import pytest
import torch

from parallel_rl.config.strict import configure
from parallel_rl.experience import (
    Overlong,
    RewardScale,
    SoftOverlong,
    StopProperly,
    clip_filter_like_weight,
    compute_reward,
)

LENGTHS = torch.tensor([0, 6, 7, 8, 10, 14])
TRUNCATED = LENGTHS > 9


def test_scale() -> None:
    scale = RewardScale(-1.0, 3.0, 0.0, 1.0)
    assert scale(torch.tensor([-5.0, -1.0, 0.0, 3.0, 9.0])).tolist() == [0, 0, 0.25, 1, 1]
    with pytest.raises(ValueError, match=r"source_min = 1\.0 must be below source_max = 1\.0"):
        RewardScale(source_min=1.0)
    with pytest.raises(ValueError, match=r"target_min = 2\.0 must be below target_max = 1\.0"):
        RewardScale(target_min=2.0)


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        (SoftOverlong(10, 4), [1, 1, 0.75, 0.5, 0, 0]),
        (SoftOverlong(10, 4, factor=2.0), [1, 1, 0.5, 0, -1, -1]),
        (SoftOverlong(10, 4, bounded=False), [1, 1, 0.75, 0.5, 0, -1]),
        (SoftOverlong(10, 10), [1, 0.4, 0.3, 0.2, 0, 0]),
        (StopProperly(0.5), [1, 1, 1, 1, 0.5, 0.5]),
        (StopProperly(0.0), [1, 1, 1, 1, 0, 0]),
        (StopProperly(-2.0), [1, 1, 1, 1, -2, -2]),
    ],
)
def test_overlong(rule: Overlong, expected: list[float]) -> None:
    found = rule(torch.ones(6, dtype=torch.float64), LENGTHS, TRUNCATED)
    assert found.tolist() == pytest.approx(expected)


def test_overlong_by_name() -> None:
    assert configure(Overlong, {"name": "dapo", "max_length": 10, "buffer": 4}, "overlong") == SoftOverlong(10, 4)
    assert configure(Overlong, "stop_properly") == StopProperly(0.0)
    for options, message in (
        ("dap", "overlong.name = 'dap' is not valid; did you mean 'dapo'"),
        ({"name": "dapo", "max_length": 10, "buffer": 0}, r"buffer = 0 must lie in \[1, max_length = 10\]"),
        ({"name": "dapo", "max_length": 10, "buffer": 11}, "buffer = 11 must lie"),
        ({"name": "dapo", "max_length": 10, "buffer": 1, "factor": -1}, r"factor = -1\.0 must be at least 0"),
        ({"name": "stop_properly", "coefficient": 2}, r"coefficient = 2\.0 must be at most 1"),
        ("dapo", "overlong needs the key 'max_length'"),
    ):
        with pytest.raises(ValueError, match=message):
            configure(Overlong, options, "overlong")


def test_clip_filter_like_weight() -> None:
    mixed, same = [1.0, 0, 0, 1], [1.0, 1, 1, 1]
    weights = clip_filter_like_weight(torch.tensor([mixed, same, same, mixed]))
    assert weights.tolist() == [[2.0] * 4, [1.0] * 4, [1.0] * 4, [2.0] * 4]
    weights = clip_filter_like_weight(torch.tensor([mixed, same, same, same]), 3.0, 0.5)
    assert weights.tolist() == [[3.0] * 4] + [[0.5] * 4] * 3  # 4/1 is cut to 3
    assert (
        clip_filter_like_weight(torch.tensor([same, same]), lamda=0.5).tolist() == [[1.0] * 4] * 2
    )  # none tells anything
    assert clip_filter_like_weight(torch.tensor([[1.0], [2.0]])).tolist() == [[1.0], [1.0]]
    constant = torch.full((1, 7), 0.1)  # its computed deviation need not be 0
    assert clip_filter_like_weight(torch.cat([constant, torch.arange(7.0)[None]]))[:, 0].tolist() == [1, 2]
    with pytest.raises(ValueError, match=r"rewards must be floats \[P, n\], got torch.float32 \[4\]"):
        clip_filter_like_weight(torch.ones(4))
    with pytest.raises(ValueError, match=r"clip = 0\.5 must be at least 1"):
        clip_filter_like_weight(torch.ones(4, 2), 0.5)


def test_compute_reward() -> None:
    mask = torch.tensor([[1, 1, 0], [0, 1, 1], [0, 0, 0]])
    kl = torch.tensor([[1.0, 2, torch.nan], [torch.inf, 4, 5], [7, 8, 9]])
    found = compute_reward(torch.tensor([1.0, 20.0, -30.0]), 0.5, kl, mask, clip_range=(-10, 10))
    assert isinstance(found, torch.Tensor)
    assert found.tolist() == [[-0.5, 0, 0], [0, -2, 7.5], [0, 0, -10]]
    without = compute_reward(torch.tensor([1.0, 2.0, 3.0]), -1.0, kl, mask)
    assert isinstance(without, torch.Tensor) and without.tolist() == [[0, 1, 0], [0, 0, 2], [0, 0, 3]]
    packed = compute_reward(
        torch.tensor([1.0, 2.0]), 0.5, [torch.tensor([1.0, 2.0]), torch.tensor([3.0])], num_actions=[2, 1]
    )
    assert [part.tolist() for part in packed] == [[-0.5, 0.0], [0.5]]
    with pytest.raises(ValueError, match="needs an action_mask like it"):
        compute_reward(torch.ones(3), 0.5, kl)
    with pytest.raises(ValueError, match="needs num_actions like it"):
        compute_reward(torch.ones(1), 0.5, [torch.ones(2)])
    with pytest.raises(
        ValueError, match=r"kl of \[2\] tokens needs num_actions like it and as many rewards, got \[3\]"
    ):
        compute_reward(torch.ones(1), 0.5, [torch.ones(2)], num_actions=[3])
