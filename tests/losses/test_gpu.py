"""Whole losses on a card: the numbers of a CPU in float64, no wait of the host, CUDA graphs, tensor ranks that share it."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from benchmarks.common import run_ranks  # the pool's ranks see no card
from benchmarks.losses_case import GRPO, make_data
from parallel_rl import LMHeadInput, PolicyLossFn, SequencePackingLossWrapper, count_valid, get_loss
from parallel_rl.losses.core.base import LossFn
from parallel_rl.testing.cases import Case, has_scalar_head
from parallel_rl.validation import validation
from tests.card import no_sync, replayed
from tests.losses.test_no_sync import CASES, make, step
from tests.vocab.linear.cases import error

pytestmark = pytest.mark.gpu
SEQUENCES, WIDTH, V, D = 6, 40, 1000, 64
POLICIES: dict[str, dict] = {
    "GRPO": GRPO,
    "GSPO": {**GRPO, "ratio_level": "sequence-mean", "aggregation": "seq-mean-token-mean"},
    "rejection": {**GRPO, "rejection": {"rules": [{"statistic": "k1", "low": 0.5, "high": 2.0}]}},
}
TRUNCATIONS: dict[str, dict] = {"all": {}, "top-k": {"top_k": 50}, "top-p": {"top_p": 0.9}}


def batch(device: str = "cuda") -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """Data of packed rows, their bounds, and logits [1, T, V] in float64."""
    data = make_data(SEQUENCES * WIDTH, V, SEQUENCES, device)
    logits = torch.randn(1, SEQUENCES * WIDTH, V, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    return data, torch.arange(SEQUENCES + 1, device=device) * WIDTH, logits.to(device)


def share(loss_fn: LossFn, logits: Tensor, data: dict, bounds: Tensor, **groups: object) -> tuple[Tensor, Tensor]:
    """The packed loss and the gradient of the logits, which may be given up."""
    leaf = logits.detach().clone().requires_grad_()
    loss, _ = SequencePackingLossWrapper(loss_fn, bounds)(leaf * 1, data, *count_valid(data), **groups)  # type: ignore[arg-type]
    (gradient,) = torch.autograd.grad(loss, leaf)
    return loss.detach(), gradient


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_host_does_not_wait_for_a_loss(case: Case, packed: bool) -> None:
    scalar = has_scalar_head(case.loss)
    loss_fn = get_loss(case.loss)(case.config)

    def whole() -> None:
        logits, data = make(4, 8, 1 if scalar else 24, "cuda")
        step(loss_fn, logits, data, packed)

    whole()  # kernels are compiled, the allocator is warm
    with no_sync():
        whole()


def test_the_host_does_not_wait_for_bounds_and_counts_of_its_own() -> None:
    data, bounds, logits = batch()
    bounds, counts = bounds.cpu(), [n.cpu() for n in count_valid(data)]

    def whole() -> None:
        leaf = logits.bfloat16().requires_grad_()
        loss, _ = SequencePackingLossWrapper(PolicyLossFn(GRPO), bounds)(leaf, data, *counts)
        loss.backward()

    whole()
    with no_sync():
        whole()


@pytest.mark.parametrize("consume", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("truncation", TRUNCATIONS)
@pytest.mark.parametrize("name", POLICIES)
def test_the_numbers_of_a_cpu(name: str, truncation: str, dtype: torch.dtype, consume: bool) -> None:
    data, bounds, logits = batch("cpu")
    rounded = logits.to(dtype)
    config, options = POLICIES[name], TRUNCATIONS[truncation]
    want = share(PolicyLossFn(config, **options), rounded.double(), data, bounds)
    on_card = {key: value.cuda() for key, value in data.items()}
    loss_fn = PolicyLossFn(config, consume_logits=consume, **options)
    got = share(loss_fn, rounded.cuda(), on_card, bounds.cuda())
    assert abs(got[0].item() / want[0].item() - 1) < 1e-4
    rounding = error(want[1].to(dtype), want[1])
    assert error(got[1].cpu(), want[1]) <= 2 * rounding + 1e-5


def test_a_whole_loss_in_a_cuda_graph() -> None:
    data, bounds, logits = batch()
    counts, still = count_valid(data), logits.bfloat16()
    function = SequencePackingLossWrapper(PolicyLossFn(GRPO, consume_logits=True), bounds)

    def both() -> tuple[Tensor, Tensor]:
        leaf = still.detach().requires_grad_()
        loss, _ = function(leaf * 1, data, *counts)
        return loss.detach(), torch.autograd.grad(loss, leaf)[0]

    for got, want in zip(replayed(both, lambda: still.copy_(logits.flip(1))), both(), strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("mode", ["auto", "in_forward", "resident", "recompute"])
def test_from_hidden_states_without_a_wait(mode: str) -> None:
    data, bounds, _ = batch()
    g = torch.Generator(device="cuda").manual_seed(3)
    hidden = torch.randn(1, SEQUENCES * WIDTH, D, generator=g, device="cuda").bfloat16().requires_grad_()
    weight = (torch.randn(V, D, generator=g, device="cuda") / 4).bfloat16().requires_grad_()
    counts = count_valid(data)
    rows = int(data["token_mask"].sum())

    def both(output: Tensor | LMHeadInput) -> tuple[Tensor, ...]:
        loss, _ = SequencePackingLossWrapper(PolicyLossFn(GRPO), bounds)(output, data, *counts)
        return loss.detach(), *torch.autograd.grad(loss, (hidden, weight))

    def fused() -> tuple[Tensor, ...]:
        return both(LMHeadInput(hidden, weight, mode=mode, budget=1 << 20, rows=rows))  # type: ignore[arg-type]

    fused()
    with no_sync():
        got = fused()
    want = both(hidden.double() @ weight.double().T)
    for x, y in zip(got, want, strict=True):
        assert error(x, y) < 1e-2


def shards(rank: int, name: str, truncation: str) -> tuple[float, Tensor]:
    """Of one of two tensor ranks that share the card."""
    torch.cuda.set_device(0)
    data, bounds, logits = batch()
    mine = logits[..., rank * V // 2 : (rank + 1) * V // 2].float().contiguous()
    loss_fn = PolicyLossFn(POLICIES[name], consume_logits=True, vocab_size=V, **TRUNCATIONS[truncation])
    with validation("always"):
        loss, gradient = share(
            loss_fn, mine, data, bounds, vocab_parallel_rank=rank, vocab_parallel_group=dist.group.WORLD
        )
    return loss.item(), gradient.cpu()


@pytest.mark.parametrize("truncation", TRUNCATIONS)
@pytest.mark.parametrize("name", ["GRPO", "GSPO"])
def test_two_tensor_ranks_on_one_card(name: str, truncation: str) -> None:
    data, bounds, logits = batch()
    want = share(PolicyLossFn(POLICIES[name], **TRUNCATIONS[truncation]), logits, data, bounds)
    (first, left), (second, right) = run_ranks(2, shards, name, truncation)
    assert first == second == pytest.approx(want[0].item(), rel=1e-4)
    assert error(torch.cat([left, right], -1), want[1].cpu()) < 1e-4
