"""Layouts of padded rows are made once for each shape, and serve calls that differ in all else."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from parallel_rl import PolicyLossFn, count_valid
from parallel_rl.losses.core.logits_source import kept_layout
from parallel_rl.testing.cases import Case
from tests.distributed.law_references import batch_of


class _Operators(TorchDispatchMode):
    """Number of operators."""

    number = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.number += 1
        return func(*args, **(kwargs or {}))


def _loss() -> PolicyLossFn:
    """A loss whose gradient runs through sums of sequences."""
    return PolicyLossFn({"ratio_level": "sequence-mean"})


def _step() -> tuple[Tensor, Tensor, int]:
    """The loss, the gradient and the number of operators of a call."""
    batch = batch_of(Case("policy"))
    leaf = batch.logits.clone().requires_grad_()
    with _Operators() as operators:
        loss, _ = _loss()(leaf, batch.data, *count_valid(batch.data))
    loss.backward()
    assert leaf.grad is not None
    return loss.detach(), leaf.grad, operators.number


def test_a_shape_is_laid_out_once() -> None:
    kept_layout.cache_clear()
    first, second = _step(), _step()
    assert second[2] <= first[2] - 16
    assert torch.equal(first[0], second[0]) and torch.equal(first[1], second[1])


def test_inference_mode_has_layouts_of_its_own() -> None:
    """An index that was made there cannot be saved for a backward."""
    kept_layout.cache_clear()
    batch = batch_of(Case("policy"))
    with torch.inference_mode():
        _loss()(batch.logits, batch.data, *count_valid(batch.data))
    assert _step()[1].any()


@pytest.mark.parametrize("rows", [0, 4])
def test_few_are_kept(rows: int) -> None:
    for width in range(12):
        layout = kept_layout(rows, width, 1, 0, "zigzag", False, torch.device("cpu"), False)
        assert layout.shape == (rows, width)
    assert kept_layout.cache_info().currsize == 8
