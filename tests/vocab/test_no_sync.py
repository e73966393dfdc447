"""What reads a vocabulary beside the losses waits for no value and moves nothing between devices: run on the meta device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from parallel_rl import LMHeadInput, linear_token_stats, token_stats
from parallel_rl.functional.distillation import JSD, ForwardKL
from parallel_rl.layout import SequenceLayout
from parallel_rl.losses.scores import token_logprobs
from parallel_rl.validation import validation
from parallel_rl.vocab.backends import choice
from parallel_rl.vocab.divergence import divergence_of_shards
from parallel_rl.vocab.linear.plan import LinearMode
from parallel_rl.vocab.sampling import sample_keys, sample_tokens
from parallel_rl.vocab.shards import Truncation, VocabShard
from parallel_rl.vocab.threshold import kept_floor
from parallel_rl.vocab.topk import column_log_probs, gather_columns, top_columns
from parallel_rl.vocab.truncated_stats import truncated_token_stats
from tests.watch import NO_ORDER, AnyOrder, Watch

N, V, D, K = 12, 40, 16, 3  # the last 4 columns are padding
SHARD = VocabShard.of(V, vocab_size=V - 4, temperature=0.7)
DTYPES = [torch.bfloat16, torch.float32]
Call = Callable[[Tensor], object]


def on_device(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.zeros(shape, dtype=dtype, device="meta")


def ids(*shape: int) -> Tensor:
    return on_device(*shape, dtype=torch.int64)


def watched(call: Callable[[], object]) -> None:
    """Runs the call, and its backward where it gives numbers with a gradient."""
    watch, order = Watch(), AnyOrder(NO_ORDER)
    with validation("auto"), order, watch:
        found = call()
        parts = found if isinstance(found, tuple) else (found,)
        trained = [x for x in parts if isinstance(x, Tensor) and x.requires_grad]
        if trained:
            torch.autograd.backward(trained, [torch.ones_like(x) for x in trained])
    assert watch.operators > 0 and watch.syncs == []
    assert order.seen == [], "refused under torch.use_deterministic_algorithms(True)"


TRUNCATIONS: dict[str, dict] = {
    "top-k": {"top_k": 5},
    "top-p": {"top_p": 0.9},
    "both": {"top_k": 5, "top_p": 0.9},
    "recorded": {"kept_ids": ids(N, K)},
}


@pytest.mark.parametrize(("temperature", "consume"), [(0.7, True), ("of each token", False)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("truncation", ["all", *TRUNCATIONS])
def test_statistics(truncation: str, dtype: torch.dtype, temperature: float | str, consume: bool) -> None:
    z = on_device(N, V, dtype=dtype).requires_grad_() * 1
    heat = on_device(N) if isinstance(temperature, str) else temperature
    read = token_stats if truncation == "all" else truncated_token_stats
    options = {} if truncation == "all" else TRUNCATIONS[truncation]
    watched(lambda: read(z, ids(N), vocab_size=V - 4, temperature=heat, consume_logits=consume, **options))


@pytest.mark.skipif(find_spec("triton") is None, reason="no Triton")
@pytest.mark.parametrize(("dtype", "per_row"), [*zip(DTYPES, (False, True), strict=True)], ids=str)
@pytest.mark.parametrize("truncation", ["top-k", "top-p", "both"])
def test_kernels_read_a_shard_twice(
    truncation: str, dtype: torch.dtype, per_row: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the columns that lay the bins; a digit is given the shard for the rows that miss."""
    monkeypatch.setattr(choice, "_INTERPRETED", True)  # or they are refused elsewhere than on CUDA
    z, heat = on_device(N, 128256, dtype=dtype), on_device(N) if per_row else 0.7
    rule = Truncation(**TRUNCATIONS[truncation])
    shard = VocabShard.of(128256, temperature=heat, truncation=rule, backend="triton")
    seen: Counter[str] = Counter()
    with Given(z.numel(), seen):
        watched(lambda: kept_floor(z, shard))
    digits = 6 if dtype == torch.bfloat16 else 11
    if truncation == "top-k":
        assert seen == {"vocab_held": digits}
    else:
        both = truncation == "both"
        assert seen == {"vocab_bins": 1, "vocab_weigh": 1, "vocab_held": 2 * digits + 1 if both else digits}


class Given(TorchDispatchMode):
    """Counts the operators that are given a tensor of so many numbers."""

    def __init__(self, size: int, seen: Counter[str]) -> None:
        super().__init__()
        self.size, self.seen = size, seen

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if not func.is_view and any(
            isinstance(x, Tensor) and x.numel() == self.size for x in tree_leaves((args, kwargs))
        ):
            self.seen[func.name().split("::")[1]] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("options", [{"temperature": 0.0}, {}, *list(TRUNCATIONS.values())[:3]], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_draws(dtype: torch.dtype, options: dict) -> None:
    watched(
        lambda: sample_tokens(on_device(N, V, dtype=dtype), sample_keys(3, ids(N), ids(1)), vocab_size=V - 4, **options)
    )


READERS: dict[str, Call] = {
    "gathered columns": lambda z: gather_columns(z, ids(N, K), on_device(N, dtype=torch.bool), SHARD),
    "log-probs of columns": lambda z: column_log_probs(
        z, ids(N, K), on_device(N, dtype=torch.bool), replace(SHARD, consume_logits=True)
    ),
    "largest": lambda z: top_columns(z, 1, SHARD),
    "largest columns": lambda z: top_columns(z, K, SHARD),
    "divergence": lambda z: divergence_of_shards(
        z, on_device(N, V, dtype=torch.bfloat16), on_device(N, dtype=torch.bool), JSD(), SHARD, 2.0
    ),
    "divergence in place": lambda z: divergence_of_shards(
        z, on_device(N, V), on_device(N, dtype=torch.bool), ForwardKL(), replace(SHARD, consume_logits=True)
    ),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("reader", READERS)
def test_columns_and_divergences(reader: str, dtype: torch.dtype) -> None:
    watched(lambda: READERS[reader](on_device(N, V, dtype=dtype).requires_grad_() * 1))


@pytest.mark.parametrize(("dtype", "rows"), [*zip(DTYPES, (None, 7), strict=True)], ids=str)
@pytest.mark.parametrize(
    ("mode", "objective"),
    [
        ("in_forward", True),
        ("auto", True),
        ("auto", False),
        ("resident", False),
        ("recompute", True),
        ("recompute", False),
    ],
)
def test_from_hidden_states(mode: LinearMode, objective: bool, dtype: torch.dtype, rows: int | None) -> None:
    hidden, weight = (on_device(n, D, dtype=dtype).requires_grad_() for n in (N, V))

    def call() -> tuple[Tensor | None, ...]:
        stats = linear_token_stats(
            hidden, weight, ids(N), bias=on_device(V, dtype=dtype), softcap=30.0, vocab_size=V - 4, mode=mode, rows=rows,
            budget=1 << 14, objective=(lambda s: (s.logprobs + s.entropy).sum()) if objective else None,
        )  # fmt: skip
        return (stats.loss,) if objective else stats[:3]

    watched(call)
    assert hidden.grad is not None and weight.grad is not None


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("kind", ["logits", "hidden states", "top-p", "recorded"])
def test_log_probs_of_a_batch(kind: str, packed: bool) -> None:
    data = {
        "input_ids": ids(3, 4),
        "token_mask": on_device(3, 4),
        "sample_mask": on_device(3),
        "kept_ids": ids(3, 4, K),
    }
    shape = (1, N) if packed else (3, 4)
    layout = SequenceLayout.packed(ids(4), seq_len=4, total=N) if packed else None
    logits = on_device(*shape, V, dtype=torch.bfloat16)
    head = LMHeadInput(on_device(*shape, D), on_device(V, D), rows=7)
    options = {"top-p": {"top_p": 0.9}, "recorded": {"kept_sets": True}}.get(kind, {})
    output = head if kind == "hidden states" else logits
    watched(lambda: token_logprobs(output, data, layout=layout, vocab_size=V - 4, **options))
