"""Logits that were given up: whoever reads the gradient that stands there for logits is told."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from parallel_rl import token_logprobs, token_stats
from parallel_rl.functional.distillation import ForwardKL
from parallel_rl.validation import validation
from parallel_rl.vocab.divergence import divergence_of_shards
from parallel_rl.vocab.shards import VocabShard
from parallel_rl.vocab.topk import column_log_probs
from parallel_rl.vocab.truncated_stats import truncated_token_stats

T, V = 4, 37
TARGETS = torch.arange(T)
KEEP = torch.ones(T, dtype=torch.bool)
GIVEN_UP = "the logits were consumed by consume_logits=True, and a backward wrote its gradient over them"


def make() -> Tensor:
    return torch.randn(T, V, generator=torch.Generator().manual_seed(0))


def columns(z: Tensor) -> Tensor:
    values, _ = column_log_probs(z, TARGETS[:, None], KEEP, VocabShard(0, V, V, consume_logits=True))
    return values


#: every reader that may write its gradient over the logits
READERS: dict[str, Callable[[Tensor], Tensor]] = {
    "statistics": lambda z: token_stats(z, TARGETS, consume_logits=True).logprobs,
    "top-k": lambda z: truncated_token_stats(z, TARGETS, top_k=V - 1, consume_logits=True).lse,
    "kept sets": lambda z: truncated_token_stats(z, TARGETS, kept_ids=TARGETS[:, None] + 1, consume_logits=True).lse,
    "divergence": lambda z: divergence_of_shards(
        z, make() * 0.5, KEEP, ForwardKL(), VocabShard(0, V, V, consume_logits=True)
    ),
    "columns": columns,
}


@pytest.mark.parametrize("name", READERS)
def test_a_later_reader_is_refused(name: str) -> None:
    z = make().requires_grad_()
    READERS[name](z).sum().backward()
    for view in (z, z.detach(), z[1:], z.view(2, -1, V)):
        shape = view.shape[:-1]
        with pytest.raises(ValueError, match=GIVEN_UP):
            token_stats(view, torch.zeros(shape, dtype=torch.int64))
    with pytest.raises(ValueError, match=GIVEN_UP):
        token_logprobs(z.detach().view(1, T, V), {"input_ids": torch.zeros(1, T, dtype=torch.int64)})
    with validation("never"):
        token_stats(z, TARGETS)


@pytest.mark.parametrize("name", READERS)
def test_a_second_backward_and_another_readers_backward_are_refused(name: str) -> None:
    z = make().requires_grad_()
    other, total = token_stats(z, TARGETS).lse.sum(), READERS[name](z).sum()
    total.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match=r"wrote its gradient over the logits|the logits changed between"):
        total.backward()
    with pytest.raises(RuntimeError, match=r"the logits changed between .* modified by an inplace operation"):
        other.backward()


def test_memory_that_is_written_anew_may_be_read() -> None:
    work = make()
    first = token_stats(work, TARGETS).lse
    for _ in range(2):
        leaf = work.detach().requires_grad_()
        token_stats(leaf, TARGETS, consume_logits=True).lse.sum().backward()
        work.copy_(make())
        assert torch.equal(token_stats(work, TARGETS).lse, first)


def test_logits_that_are_only_read_stay_readable() -> None:
    z = make().requires_grad_()
    for _ in range(2):
        token_stats(z, TARGETS).lse.sum().backward()
    token_stats(z, TARGETS, consume_logits=True)  # given up, and never written over


def test_the_mark_holds_no_memory() -> None:
    z = make().requires_grad_() * 1
    token_stats(z, TARGETS, consume_logits=True).lse.sum().backward()
    gone = weakref.ref(z)
    del z
    gc.collect()
    assert gone() is None


def test_inference_tensors_have_no_version_and_are_read() -> None:
    with torch.inference_mode():
        token_stats(make(), TARGETS)


@pytest.mark.parametrize("logits", [make()[:1].expand(T, V), make().t().contiguous().t(), make()[:, ::2]])
def test_logits_that_cannot_be_written_are_not_given_up(logits: Tensor) -> None:
    for consumed in (token_stats, truncated_token_stats):
        options = {"top_k": 2} if consumed is truncated_token_stats else {}
        with pytest.raises(ValueError, match="consume_logits=True writes into the logits, which must be contiguous"):
            consumed(logits, TARGETS, consume_logits=True, **options)  # type: ignore[operator]
