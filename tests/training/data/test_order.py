"""The order of records: each pass has each once, shuffled within windows, the same on every machine."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from parallel_rl.training.data.records.files import Entries, entries
from parallel_rl.training.data.records.source import Order, permutation


def _order(sizes: Sequence[int], window: int, seed: int) -> Order:
    rows: Entries = entries([(0, block, size, size // 10, 0) for block, size in enumerate(sizes)])
    return Order(rows, window, seed)


@pytest.mark.parametrize("window", [1, 100, 1000, 10**6])
def test_each_pass_has_each_record_once_whatever_the_window(window: int) -> None:
    sizes = [10 * (1 + block * 7 % 13) for block in range(40)]
    order = _order(sizes, window, seed=3)
    every = {(block, place) for block, size in enumerate(sizes) for place in range(size // 10)}
    stream = [order.locate(at) for at in range(3 * order.size)]
    passes = [stream[turn * order.size : (turn + 1) * order.size] for turn in range(3)]
    for one in passes:
        assert len(one) == len(every) and set(one) == every
    assert passes[0] != passes[1] != passes[2]
    again = _order(sizes, window, seed=3)
    at = [5 * order.size // 2, 1, order.size, 7]
    assert [again.locate(number) for number in at] == [stream[number] for number in at]
    assert [_order(sizes, window, seed=4).locate(number) for number in range(50)] != stream[:50]


def test_a_reader_in_order_needs_one_window_of_blocks() -> None:
    sizes = [100 + 10 * (block % 5) for block in range(200)]
    order, window = _order(sizes, 1500, seed=0), 1500
    last: dict[int, int] = {}
    first: dict[int, int] = {}
    for at in range(order.size):
        block = order.locate(at)[0]
        first.setdefault(block, at)
        last[block] = at
    most = max(sum(sizes[b] for b in first if first[b] <= at <= last[b]) for at in range(order.size))
    assert window / 2 < most <= window + max(sizes)


def test_a_permutation_is_fixed_and_even() -> None:
    def mix(x: int) -> int:
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            x = (x ^ (x >> shift)) * factor % 2**64
        return x ^ (x >> 31)

    step, state = 0x9E3779B97F4A7C15, 0
    for part in (1, 2):
        state = mix((state + (part + 1) * step) % 2**64)
    keys = [mix((state + (place + 1) * step) % 2**64) for place in range(100)]
    assert permutation(100, 1, 2).tolist() == sorted(range(100), key=keys.__getitem__)
    counts = np.zeros((6, 6))
    for seed in range(3000):
        counts[np.arange(6), permutation(6, seed)] += 1
    assert abs(counts / 500 - 1).max() < 0.2  # 4.4 standard deviations
    assert permutation(1, 5).tolist() == [0] and permutation(0, 5).tolist() == []
