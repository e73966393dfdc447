"""Divergences of vocabulary shards: derivatives, what is known of them, and the memory that they take."""

from __future__ import annotations

import math
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from parallel_rl.functional.distillation import Divergence, mixed_kl, with_tail
from parallel_rl.vocab.backends import torch_backend
from parallel_rl.vocab.divergence import divergence_of_shards
from parallel_rl.vocab.shards import VocabShard

VOCAB = 9

DIVERGENCES = [
    {"name": "forward_kl"},
    {"name": "reverse_kl"},
    {"name": "cross_entropy"},
    {"name": "finite_cross_entropy"},
    {"name": "jsd", "beta": 0.3},
    {"name": "jsd", "beta": 0.0},
    {"name": "jsd", "beta": 1.0},
    {"name": "skew_forward_kl", "alpha": 0.2},
    {"name": "skew_reverse_kl", "alpha": 0.2},
]


def ident(value: object) -> str:
    return "-".join(str(x) for x in value.values()) if isinstance(value, dict) else str(value)


def make_divergence(options: dict) -> Divergence:
    made: Divergence = Divergence.variants[options["name"]](**{k: v for k, v in options.items() if k != "name"})
    return made


@pytest.mark.parametrize("divergence", DIVERGENCES, ids=ident)
def test_gradcheck(divergence: dict) -> None:
    chosen = make_divergence(divergence)
    z, w = torch.randn(2, 7, VOCAB, generator=torch.Generator().manual_seed(0), dtype=torch.float64).unbind()
    z = (2 * z).requires_grad_()
    keep = torch.tensor([True] * 6 + [False])

    def of(z: Tensor) -> Tensor:
        return divergence_of_shards(z, w, keep, chosen, VocabShard(0, VOCAB - 1, VOCAB - 1, temperature=0.7), 1.2)

    assert torch.autograd.gradcheck(of, z)
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(of(z).sum(), z, create_graph=True)


LOGITS = st.lists(st.floats(-30, 30, width=32), min_size=VOCAB, max_size=VOCAB)


def value_of(divergence: dict, teacher: list[float], student: list[float]) -> float:
    chosen = make_divergence(divergence)
    p, q = (torch.tensor([z], dtype=torch.float64) for z in (teacher, student))
    keep = torch.ones(1, dtype=torch.bool)
    return divergence_of_shards(q, p, keep, chosen, VocabShard(0, VOCAB, VOCAB, backend="eager")).item()


@settings(deadline=None, max_examples=20)
@given(LOGITS, LOGITS)
def test_divergences_are_divergences(teacher: list[float], student: list[float]) -> None:
    """0 of equal distributions, never negative, and bounded as their papers say."""
    for divergence in DIVERGENCES:
        if "cross_entropy" not in divergence["name"]:
            assert value_of(divergence, teacher, teacher) == pytest.approx(0, abs=1e-12)
            assert value_of(divergence, teacher, student) >= -1e-12
    for alpha in (0.1, 0.6):
        for name in ("skew_forward_kl", "skew_reverse_kl"):
            assert value_of({"name": name, "alpha": alpha}, teacher, student) <= -math.log(alpha) + 1e-12
    half = {"name": "jsd", "beta": 0.5}
    assert value_of(half, teacher, student) == pytest.approx(value_of(half, student, teacher), rel=1e-9, abs=1e-13)
    assert value_of(half, teacher, student) <= math.log(2) + 1e-12
    forward, reverse = ({"name": f"{way}_kl"} for way in ("forward", "reverse"))
    assert value_of(forward, teacher, student) == pytest.approx(value_of(reverse, student, teacher), rel=1e-12)


NEAR = st.lists(st.floats(-6, 6, width=32), min_size=VOCAB, max_size=VOCAB)


@settings(deadline=None, max_examples=20)
@given(NEAR, NEAR, st.integers(1, VOCAB))
def test_the_bucket_is_a_lower_bound(teacher: list[float], student: list[float], k: int) -> None:
    """To what 1 − Σ leaves of a tail of 1e-6."""
    p, q = (torch.tensor(z, dtype=torch.float64).log_softmax(0) for z in (teacher, student))
    ids = p.topk(k).indices
    bucket = mixed_kl(with_tail(p[ids]), with_tail(q[ids]), 1.0).item()
    whole = value_of({"name": "forward_kl"}, teacher, student)
    assert -1e-9 <= bucket <= whole + 1e-9
    if k == VOCAB:
        assert bucket == pytest.approx(whole, rel=1e-9, abs=1e-12)


def test_no_second_shard_is_ever_in_memory() -> None:
    """Beside the gradient itself, no tensor is much larger than a block of rows."""
    z, w = torch.randn(2, 24, 400, generator=torch.Generator().manual_seed(0)).unbind()
    z = z.clone().requires_grad_()
    keep, chosen = torch.ones(len(z), dtype=torch.bool), make_divergence({"name": "jsd"})
    known = {x.untyped_storage().data_ptr() for x in (z, w)}
    large: set[int] = set()

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            out = func(*args, **(kwargs or {}))
            if isinstance(out, Tensor) and out.untyped_storage().nbytes() > z.nbytes / 4:
                large.add(out.untyped_storage().data_ptr())
            return out

    with patch.dict(torch_backend._BLOCK, {"cpu": 3 * 400}), Watch():
        loss = divergence_of_shards(z, w, keep, chosen, VocabShard(0, 400, 400)).sum()
        assert large <= known
        loss.backward()
    assert z.grad is not None and large - known == {z.grad.untyped_storage().data_ptr()}
