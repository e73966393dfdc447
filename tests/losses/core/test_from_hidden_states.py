"""Losses on an `LMHeadInput`: what they refuse, what they never wait for, and what a GRPO step needs of memory."""

from __future__ import annotations

import sys

import pytest
import torch

from benchmarks.common import PeakMemory, return_freed_memory, run_ranks
from parallel_rl import (
    ClippedPGLossFn,
    LMHeadInput,
    LossFn,
    Metrics,
    NLLLoss,
    SequencePackingLossWrapper,
    TokenBatch,
    count_valid,
    get_loss,
    token_logprobs,
)
from parallel_rl.losses import NoConfig, Requirements
from parallel_rl.statistics import Statistics
from parallel_rl.testing.cases import Case, step_statistics
from parallel_rl.testing.hidden_states import takes_head
from parallel_rl.validation import validation
from parallel_rl.vocab.linear.plan import LinearMode
from tests.distributed.law import CORE
from tests.losses.test_no_sync import make
from tests.losses.test_token_separable import ON_LOG_PROBS
from tests.watch import Watch

D, V = 8, 24
MODES: tuple[LinearMode, ...] = ("in_forward", "resident", "recompute")


def head_for(device: str = "cpu", **options) -> LMHeadInput:  # type: ignore[no-untyped-def]
    hidden = torch.zeros(4, 8, D, device=device, requires_grad=True)
    return LMHeadInput(hidden, torch.zeros(V, D, device=device, requires_grad=True), **options)


@pytest.mark.parametrize(
    ("case", "rows"),
    [
        pytest.param(case, rows, id=f"{case.name}-{rows}", marks=marks)
        for case in ON_LOG_PROBS
        if case in CORE
        for rows in (6, None)
        # with its options each loss runs quickly from packed hidden states in test_no_sync
        for marks in [() if case.config == {} else pytest.mark.slow]
    ],
)
def test_nothing_reads_a_value(case: Case, rows: int | None) -> None:
    """On the meta device there are no values: whatever needs one fails."""
    loss_fn = get_loss(case.loss)(case.config, backend="eager")
    _, data = make(4, 8, V, "meta")
    counts, watch = count_valid(data), Watch()
    head = head_for("meta", rows=rows, budget=1 << 12)
    with validation("never"), watch:
        call = (head, data, *counts)
        loss, _ = loss_fn(*call, statistics=step_statistics([(loss_fn, call)]))
        loss.backward()
    assert watch.syncs == []
    assert head.hidden.grad is not None and head.weight.grad is not None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden": torch.zeros(4, 7, D)}, "leading shape"),
        ({"hidden": torch.zeros(4 * 8, D)}, "hidden must be \\[B, S/cp, D\\]"),
        ({"weight": torch.zeros(V, D + 1)}, "calls for"),
        ({"mode": "fast"}, "'fast' is not valid"),
        ({"budget": 10}, "too small for one row"),
        ({"rows": 3}, "rows = 3 is too few: 28 rows"),
        ({"sequence_parallel": True}, "splits hidden"),
    ],
)
def test_a_head_that_does_not_fit(change: dict, message: str) -> None:
    _, data = make(4, 8, V, "cpu")
    given = {"hidden": torch.zeros(4, 8, D), "weight": torch.zeros(V, D), **change}
    with pytest.raises(ValueError, match=message):
        NLLLoss()(LMHeadInput(**given), data, *count_valid(data))


def test_what_a_loss_must_be_to_take_a_head() -> None:
    _, data = make(4, 8, V, "cpu")
    counts = count_valid(data)
    with pytest.raises(ValueError, match="consume_logits = True has no effect"):
        NLLLoss(consume_logits=True)(head_for(), data, *counts)
    with pytest.raises(ValueError, match="'in_forward' needs a loss that is a sum over tokens"):
        get_loss("dpo")()(head_for(mode="in_forward"), data, *counts)
    for name in ("value", "preference"):
        assert not takes_head(Case(name))
        with pytest.raises(ValueError, match="takes no LMHeadInput"):
            get_loss(name)()(head_for(), data, *counts)
    data["reward_labels"] = torch.full((4, 8), -100)
    case = Case("prm", {"placeholder_token_id": 3, "reward_token_ids": [1, 2]})
    whole = case.build()
    assert takes_head(case)
    with pytest.raises(ValueError, match="mode = 'recompute' is incompatible with a loss that reads whole logits"):
        whole(head_for(mode="recompute"), data, *counts)
    with pytest.raises(ValueError, match="does not hold the whole logits that this loss reads, 3072 bytes"):
        whole(head_for(budget=3000), data, *counts)


@pytest.mark.parametrize("sequence_first", [False, True])
def test_log_probs_from_a_head(sequence_first: bool) -> None:
    g = torch.Generator().manual_seed(0)
    _, data = make(4, 8, V, "cpu")
    data["input_ids"] = torch.randint(V, (4, 8), generator=g)
    hidden, weight = torch.randn(4, 8, D, generator=g), torch.randn(V, D, generator=g)
    want = token_logprobs(hidden @ weight.T, data, temperature=0.7)
    given = hidden.transpose(0, 1).contiguous() if sequence_first else hidden
    got = token_logprobs(
        LMHeadInput(given, weight, sequence_first=sequence_first, budget=1 << 12), data, temperature=0.7
    )
    torch.testing.assert_close(got, want)


def test_metrics_and_loss_scale() -> None:
    """The loss is the same with its gradient computed early, and scaling it scales the gradient."""
    g = torch.Generator().manual_seed(0)
    _, data = make(4, 8, V, "cpu")
    hidden, weight = torch.randn(1, 32, D, generator=g), torch.randn(V, D, generator=g)
    loss_fn = SequencePackingLossWrapper(ClippedPGLossFn(), torch.arange(0, 33, 8))
    counts, found = count_valid(data), {}
    for mode in MODES:
        h, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        loss, metrics = loss_fn(LMHeadInput(h, w, mode=mode), data, *counts)
        (loss * 65536).backward()
        assert h.grad is not None and w.grad is not None
        found[mode] = [loss.detach(), h.grad / 65536, w.grad / 65536, metrics["probs_ratio"]]
    for mode in MODES[1:]:
        torch.testing.assert_close(found[mode], found["in_forward"])


def peaks(rank: int) -> dict[str, float]:
    """Bytes per logit beyond inputs and gradients of one policy loss, by mode."""
    return_freed_memory()
    rows, width, columns, size = 8, 256, 8192, 64
    _, data = make(rows, width, 1, "cpu")
    counts, loss_fn = count_valid(data), ClippedPGLossFn(backend="eager")
    hidden, weight = torch.randn(rows, width, size), torch.randn(columns, size) * 0.1
    found = {}
    for mode in MODES:
        least = []
        for _ in range(2):  # the first pass brings in what is loaded once
            h, w = hidden.detach().requires_grad_(), weight.detach().requires_grad_()
            measured = PeakMemory()
            loss, _ = loss_fn(LMHeadInput(h, w, mode=mode, budget=2 << 20), data, *counts)
            loss.backward()
            least.append(measured() - 4 * (hidden.numel() + weight.numel()))
            del loss, h, w
        found[mode] = min(least) / (rows * width * columns)
    return found


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's own count of peak memory")
def test_extra_memory() -> None:
    """The budget is 0.125 bytes a logit; whole float32 logits would be 4."""
    (found,) = run_ranks(1, peaks)
    assert found["in_forward"] <= 0.4 and found["recompute"] <= 0.4, found
    assert found["resident"] <= 4.6


@pytest.mark.parametrize("rule", [{}, {"top_k": 5}], ids=str)
def test_a_bound_on_rows_counts_the_tokens_that_count(rule: dict) -> None:
    """As for a loss: masked tokens are not projected, so that the loss's own bound is one for the scores, too."""
    g = torch.Generator().manual_seed(0)
    _, data = make(4, 8, V, "cpu")
    data["token_mask"] = (torch.rand(4, 8, generator=g) < 0.5).float()
    hidden, weight = torch.randn(4, 8, D, generator=g), torch.randn(V, D, generator=g)
    valid = int(data["token_mask"][:, 1:].sum())
    want = torch.where(data["token_mask"] == 1, token_logprobs(hidden @ weight.T, data, **rule), 0)
    for mode in ("auto", "never"):
        with validation(mode):  # type: ignore[arg-type]
            got = token_logprobs(LMHeadInput(hidden, weight, rows=valid), data, **rule)
        torch.testing.assert_close(got, want)
    with pytest.raises(ValueError, match=f"rows = {valid - 1} is too few: {valid} rows of one rank's"):
        token_logprobs(LMHeadInput(hidden, weight, rows=valid - 1), data, **rule)


class _Seen(LossFn[NoConfig]):
    """Remembers the log-probs that `collect` and the loss saw; not separable, so that 'auto' may keep logits."""

    config_class = NoConfig
    requirements = Requirements(collected=True, entropy=True)

    def collect_from(self, batch: TokenBatch) -> Statistics:
        self.collected = batch.output.stats
        return Statistics({})

    def compute(self, batch: TokenBatch) -> tuple[torch.Tensor, Metrics]:
        self.trained = batch.output.stats
        return batch.logprobs.sum(), Metrics({})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("mode", ["auto", "resident", "recompute"])
def test_collect_and_loss_see_the_same_bits(mode: LinearMode, dtype: torch.dtype) -> None:
    """A quantile of the step is one of its tokens: that token must not fall on its other side in the loss.

    Where the logits are kept the budget leaves room for smaller chunks only, and another shape of a product rounds otherwise.
    """
    g = torch.Generator().manual_seed(0)
    _, data = make(8, 24, 1, "cpu")
    hidden, weight = (torch.randn(*shape, 192, generator=g).to(dtype).requires_grad_() for shape in ((8, 24), (301,)))
    loss_fn, counts = _Seen(), count_valid(data)
    kept = 8 * 24 * 301 * dtype.itemsize  # of bfloat16 as float16
    head = LMHeadInput(hidden, weight, mode=mode, budget=kept + 3000)  # which one row beside them fits into
    statistics = loss_fn.collect(head, data, *counts).reduce()
    loss_fn(head, data, *counts, statistics=statistics)[0].backward()
    for first, second in zip(loss_fn.collected[:3], loss_fn.trained[:3], strict=True):
        assert torch.equal(first, second)
