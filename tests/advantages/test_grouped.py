"""Every estimator by group against its definition, written as loops over one group at a time."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from parallel_rl.advantages import AdvantageEstimator, estimate

GROUPED = [name for name, cls in AdvantageEstimator.variants.items() if cls.grouped]  # type: ignore[attr-defined]


def others(values: list[float], i: int) -> list[float]:
    return values[:i] + values[i + 1 :]


def leave_one_out(values: list[float]) -> list[float]:
    found = []
    for i, value in enumerate(values):
        rest = others(values, i)
        spread = statistics.stdev(rest) if len(rest) > 1 else 0.0
        above = value - statistics.fmean(rest)
        found.append(above / (spread + 1e-6) if spread > 1e-6 * max(map(abs, values)) else above)
    return found


def minus(values: list[float], baseline: float, divisor: float = 1.0) -> list[float]:
    return [(value - baseline) / divisor for value in values]


def logavgexp(values: list[float], tau: float) -> float:
    return tau * (math.log(sum(math.exp(value / tau) for value in values)) - math.log(len(values)))


def best(values: list[float], divisor: float = 1.0) -> list[float]:
    first, second = sorted(values, reverse=True)[:2]
    return [(first - second) / divisor if value == first else 0.0 for value in values]


# (options, one group's (rewards, lengths) -> advantages)
Definition = Callable[[list[float], list[int]], list[float]]
DEFINITIONS: list[tuple[dict, Definition]] = [
    ({"name": "grpo"}, lambda r, n: minus(r, statistics.fmean(r), statistics.stdev(r) + 1e-6)),
    ({"name": "grpo", "eps": 0.5}, lambda r, n: minus(r, statistics.fmean(r), statistics.stdev(r) + 0.5)),
    (
        {"name": "grpo", "normalize": "population"},
        lambda r, n: minus(r, statistics.fmean(r), statistics.pstdev(r) + 1e-6),
    ),
    ({"name": "grpo", "normalize": "none"}, lambda r, n: minus(r, statistics.fmean(r))),
    ({"name": "grpo", "normalize": "leave_one_out", "baseline": "leave_one_out"}, lambda r, n: leave_one_out(r)),
    ({"name": "group_norm"}, lambda r, n: minus(r, statistics.fmean(r), statistics.stdev(r) + 1e-9)),
    ({"name": "dr_grpo"}, lambda r, n: minus(r, statistics.fmean(r))),
    ({"name": "rloo"}, lambda r, n: [x - statistics.fmean(others(r, i)) for i, x in enumerate(r)]),
    ({"name": "reinforce_plus_plus_baseline", "whiten": "none"}, lambda r, n: minus(r, statistics.fmean(r))),
    ({"name": "opmd"}, lambda r, n: minus(r, statistics.fmean(r))),
    ({"name": "opmd", "baseline": "logavgexp"}, lambda r, n: minus(r, logavgexp(r, 1.0))),
    ({"name": "opmd", "baseline": "logavgexp", "tau": 0.3}, lambda r, n: minus(r, logavgexp(r, 0.3))),
    ({"name": "rec"}, lambda r, n: minus(r, statistics.fmean(r))),
    (
        {"name": "rec", "normalize": "population"},
        lambda r, n: minus(r, statistics.fmean(r), statistics.pstdev(r) + 1e-6),
    ),
    ({"name": "asymre"}, lambda r, n: minus(r, statistics.fmean(r) - 0.1)),
    ({"name": "cpgd"}, lambda r, n: minus(r, statistics.fmean(r), statistics.pstdev(r) + 1e-6)),
    ({"name": "cpgd", "normalize": "none"}, lambda r, n: minus(r, statistics.fmean(r))),
    ({"name": "opo"}, lambda r, n: minus(r, sum(x * k for x, k in zip(r, n, strict=True)) / sum(n))),
    ({"name": "gpg", "f_norm": 2.0}, lambda r, n: minus(r, statistics.fmean(r), 2.0)),
    ({"name": "gpg", "scale": "none"}, lambda r, n: minus(r, statistics.fmean(r))),
    ({"name": "pass_at_k"}, lambda r, n: best(r)),
    ({"name": "pass_at_k", "normalize": "std"}, lambda r, n: best(r, statistics.stdev(r) + 1e-6)),
]


def random_batch(seed: int, sizes: tuple[int, ...] = (2, 5, 3, 4)) -> dict[str, Tensor]:
    """Groups of these sizes in a random order, with rewards that differ and lengths from 1 to 6."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.cat([torch.full((size,), 7 * g - 9) for g, size in enumerate(sizes)])
    ids = ids[torch.randperm(len(ids), generator=generator)]
    lengths = torch.randint(1, 7, (len(ids),), generator=generator)
    return {
        "rewards": torch.randn(len(ids), generator=generator, dtype=torch.float64),
        "reward_components": torch.randn(len(ids), 3, generator=generator, dtype=torch.float64),
        "group_ids": ids,
        "sample_ids": torch.arange(len(ids)) + 1000 * seed,
        "token_mask": torch.arange(6) < lengths[:, None],
    }


@pytest.mark.parametrize(("options", "definition"), DEFINITIONS, ids=lambda x: str(x) if isinstance(x, dict) else "")
def test_against_the_definition_with_groups_in_any_order(options: dict, definition: Definition) -> None:
    batch = random_batch(0)
    found = estimate(options, batch)
    assert torch.equal(found.advantages, found.returns)
    lengths = batch["token_mask"].sum(1)
    for group in set(batch["group_ids"].tolist()):
        mine = (batch["group_ids"] == group).nonzero()[:, 0]
        expected = definition(batch["rewards"][mine].tolist(), lengths[mine].tolist())
        for row, value in zip(mine.tolist(), expected, strict=True):
            n = int(lengths[row])
            assert found.advantages[row, :n].tolist() == pytest.approx([value] * n, rel=1e-11, abs=1e-13)
            assert not found.advantages[row, n:].any()


def test_golden_rows() -> None:
    batch = {
        "rewards": torch.tensor([1.0, 0, 0, 1], dtype=torch.float64),
        "group_ids": torch.zeros(4, dtype=torch.int64),
        "token_mask": torch.ones(4, 1),
    }
    for options, value in (
        ("grpo", 0.866024),
        ({"name": "grpo", "normalize": "population"}, 0.999998),
        ("rloo", 0.666667),
    ):
        found = estimate(options, batch).advantages[:, 0]
        assert found.tolist() == pytest.approx([value, -value, -value, value], abs=5e-7)


def test_the_deviation_of_the_batch() -> None:
    batch = random_batch(1)
    found = estimate({"name": "grpo", "normalize": "batch"}, batch).advantages[:, 0]
    plain = estimate("dr_grpo", batch).advantages[:, 0]
    torch.testing.assert_close(found, plain / (batch["rewards"].std() + 1e-6), rtol=1e-12, atol=0)


@pytest.mark.parametrize("normalize", ["none", "population"])
def test_balanced_samples(normalize: str) -> None:
    rewards = torch.tensor([1.0, 0, 0, 0, -1, 0] + [1.0, 1, 0] + [0.5] * 4, dtype=torch.float64)
    ids = torch.tensor([0] * 6 + [1] * 3 + [2] * 4)
    batch = {"rewards": rewards, "group_ids": ids, "sample_ids": torch.arange(13), "token_mask": torch.ones(13, 1)}
    options = {"name": "rec", "drop": "balance", "normalize": normalize}
    chosen = set()
    for seed in range(30):
        found = estimate({**options, "seed": seed}, batch).advantages[:, 0]
        # the mean is 0: one is above it, four are at it and one is below
        assert found[9:].tolist() == [0] * 4
        scale = statistics.pstdev([1.0, 0, 0, 0, -1, 0]) + 1e-6 if normalize == "population" else 1.0
        assert found[:6].tolist() == pytest.approx([x / scale for x in (1, 0, 0, 0, -1, 0)])
        found = estimate({**options, "seed": seed}, {**batch, "rewards": rewards + (torch.arange(13) == 0)}).advantages[
            :, 0
        ]
        # now the mean is 1/6: five are below it, and one of them stays
        kept = [i for i in range(1, 6) if found[i] != 0]
        assert len(kept) == 1 and found[0] == -found[kept[0]] > 0
        expected = (2 - float(rewards[kept[0]])) / 2
        assert float(found[0]) == pytest.approx(expected / (expected + 1e-6) if normalize == "population" else expected)
        chosen.add(kept[0])
    assert chosen == {1, 2, 3, 4, 5}


def test_gdpo() -> None:
    batch, weights = random_batch(2), (1.0, 0.25, -2.0)
    total = torch.zeros(len(batch["rewards"]), dtype=torch.float64)
    for k, weight in enumerate(weights):
        for group in set(batch["group_ids"].tolist()):
            mine = (batch["group_ids"] == group).nonzero()[:, 0]
            values = leave_one_out(batch["reward_components"][mine, k].tolist())
            total[mine] += weight * torch.tensor(values, dtype=torch.float64)
    found = estimate({"name": "gdpo", "weights": list(weights)}, batch).advantages[:, 0]
    torch.testing.assert_close(found, (total - total.mean()) / total.std(), rtol=1e-11, atol=1e-12)


def test_the_weights_that_make_up_for_uninformative_groups() -> None:
    batch = {
        "rewards": torch.tensor([1.0, 0, 1, 1, 0, 0, 0, 0], dtype=torch.float64),
        "group_ids": torch.tensor([0, 0, 1, 1, 2, 2, 3, 3]),
        "token_mask": torch.ones(8, 1),
    }
    for options, factor in (
        ({"name": "gpg"}, 4.0),
        ({"name": "gpg", "scale": "nonzero"}, 8 / 3),
        ({"name": "cpgd", "normalize": "clip_filter"}, 3.0),
        ({"name": "cpgd", "normalize": "clip_filter", "weight_clip": 10.0}, 4.0),
    ):
        found = estimate(options, batch).advantages[:, 0]
        assert found.tolist() == pytest.approx([factor / 2, -factor / 2] + [0] * 6, rel=1e-12)


def test_nearly_constant_others_do_not_blow_up() -> None:  # Q44 of the specification
    rewards = torch.tensor([0.9] * 15 + [-1.0])
    config = {"name": "grpo", "normalize": "leave_one_out", "baseline": "leave_one_out"}
    ids = torch.zeros(16, dtype=torch.int64)
    found = estimate(config, {"rewards": rewards, "group_ids": ids, "token_mask": torch.ones(16, 1)}).advantages[:, 0]
    assert found[:15].tolist() == pytest.approx([0.258199] * 15, rel=1e-4)
    assert float(found[15]) == pytest.approx(-1.9)
    noisy = rewards.double() + torch.linspace(-1e-9, 1e-9, 16, dtype=torch.float64)  # rounding of a reward model
    found = estimate(config, {"rewards": noisy, "group_ids": ids, "token_mask": torch.ones(16, 1)}).advantages[:, 0]
    assert found.abs().max() < 2
    # the odd one hides the spread of the others, and so do sums of large squares
    close = torch.tensor([1e6, 1e6 + 20.3, 1e6 - 17.1, 5e6], dtype=torch.float64)
    found = estimate(config, {"rewards": close, "group_ids": ids[:4], "token_mask": torch.ones(4, 1)}).advantages[:, 0]
    assert found.tolist() == pytest.approx(leave_one_out(close.tolist()), rel=1e-10)


def test_cpgd_compares_by_prompt() -> None:  # Q25 of the specification: the origin's advantages are identically 0
    found = estimate("cpgd", random_batch(3)).advantages
    assert (found[:, 0].abs() > 1e-3).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("name", GROUPED)
def test_a_constant_group_gets_exactly_zero(name: str, dtype: torch.dtype) -> None:
    sizes = (2, 3, 7, 16, 100)
    values = [0.1, 1e4, -0.7, 0.0, 1 / 3]
    rewards = torch.cat([torch.full((n,), v, dtype=dtype) for n, v in zip(sizes, values, strict=True)])
    ids = torch.cat([torch.full((n,), g) for g, n in enumerate(sizes)])
    batch = {
        "rewards": rewards,
        "reward_components": torch.stack([rewards, -rewards], 1),
        "group_ids": ids,
        **dict.fromkeys(("sample_ids", "run_ids"), torch.arange(len(ids))),
        **dict.fromkeys(("step_ids", "state_ids"), ids),
        "token_mask": torch.arange(3) < 1 + torch.arange(len(ids))[:, None] % 3,
    }
    found = estimate({"name": name, "baseline_shift": 0.0} if name == "asymre" else name, batch).advantages
    assert found.dtype == torch.promote_types(dtype, torch.float32)
    assert torch.equal(found, torch.zeros_like(found))


@pytest.mark.parametrize("name", GROUPED)
def test_singletons_by_choice(name: str) -> None:
    batch = {
        "rewards": torch.tensor([2.0, 1.0, 3.0]),
        "reward_components": torch.tensor([[1.0, 1.0], [0.0, 1.0], [2.0, 1.0]]),
        "group_ids": torch.tensor([5, 4, 4]),
        **dict.fromkeys(("run_ids", "step_ids", "state_ids"), torch.arange(3)),
        "token_mask": torch.ones(3, 1),
    }
    with pytest.raises(ValueError, match="group 5 has one sample; set singleton to 'zero' or 'reward'"):
        estimate(name, batch)
    plain = {"name": name, "whiten": "none"}
    assert estimate({**plain, "singleton": "zero"}, batch).advantages[0] == 0
    assert estimate({**plain, "singleton": "reward"}, batch).advantages[0] == 2


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    options=st.sampled_from([d[0] for d in DEFINITIONS] + [{"name": "gdpo"}, {"name": "rec", "drop": "balance"}]),
)
def test_the_order_of_samples_padding_and_dropped_samples_change_nothing(seed: int, options: dict) -> None:
    generator = torch.Generator().manual_seed(seed)
    batch = random_batch(seed)
    plain = estimate(options, batch).advantages
    order = torch.randperm(len(plain), generator=generator)
    found = estimate(options, {name: x[order] for name, x in batch.items()}).advantages
    torch.testing.assert_close(found, plain[order], rtol=1e-12, atol=1e-12)

    wide = {name: torch.cat([x, x[:2]]) for name, x in batch.items()}
    wide["token_mask"] = torch.nn.functional.pad(wide["token_mask"], (2, 3))
    for name in ("rewards", "reward_components"):
        wide[name][-2:] = torch.nan
    wide["sample_mask"] = torch.arange(len(plain) + 2) < len(plain)
    found = estimate(options, wide).advantages
    torch.testing.assert_close(found[:-2, 2:-3], plain, rtol=1e-12, atol=1e-12)
    assert not found[-2:].any() and not found[:, :2].any() and not found[:, -3:].any()
