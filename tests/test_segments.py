"""Sums over groups have the same bits on every device: no float is added by an atomic."""

from __future__ import annotations

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from parallel_rl.advantages.table import SampleTable
from parallel_rl.segments import sum_groups


class FloatAtomics(TorchDispatchMode):
    """Notes additions that a card makes in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        name = func.name().removeprefix("aten::").split(".")[0]
        adds = name in ("index_add", "index_add_", "scatter_add", "scatter_add_", "bincount")
        if adds and any(isinstance(x, torch.Tensor) and x.is_floating_point() for x in tree_leaves((args, kwargs))):
            self.seen.append(name)
        return func(*args, **(kwargs or {}))


def test_sums_of_groups_are_those_of_one_place_after_the_other() -> None:
    g = torch.Generator().manual_seed(0)
    for size, number in ((1, 1), (40, 7), (400, 300)):
        x = torch.randn(size, generator=g, dtype=torch.float64)
        index = torch.randint(number, (size,), generator=g)
        with FloatAtomics() as atomics:
            found = sum_groups(x, index, number)
        assert torch.equal(found, torch.zeros(number, dtype=torch.float64).index_add(0, index, x)) and not atomics.seen


def test_tensor_ranks_score_alike() -> None:
    """Those of a card differed in the last bit of an advantage, and then in what each learns."""
    with FloatAtomics() as atomics:
        table = SampleTable(torch.tensor([1.0, 0.0, 0.5, 2.0]), torch.tensor([4, 7, 4, 7]))
        assert table.centred.tolist() == [0.25, -1.0, -0.25, 1.0] and table.deviation().shape == (4,)
    assert atomics.seen == []
    with FloatAtomics() as atomics:
        torch.zeros(2).index_add(0, torch.tensor([0, 1]), torch.ones(2))
    assert atomics.seen == ["index_add"]
