"""The Triton kernels on a card: the cases of the interpreter, and what only a card can show."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)
pytest.importorskip("triton")

from parallel_rl import token_stats
from parallel_rl.validation import validation
from tests.card import no_sync, replayed
from tests.vocab.triton_cases.common import check, error, logits_and_targets, run, same_bits, upstream
from tests.vocab.triton_cases.head import *  # noqa: F403
from tests.vocab.triton_cases.kernels import *  # noqa: F403
from tests.vocab.triton_cases.operators import *  # noqa: F403
from tests.vocab.triton_cases.ranks import *  # noqa: F403
from tests.vocab.triton_cases.threshold import *  # noqa: F403
from tests.vocab.triton_cases.traps import *  # noqa: F403
from tests.watch import Operators

pytestmark = pytest.mark.gpu


def test_a_card_chooses_triton_by_itself() -> None:
    logits, targets = logits_and_targets(4, 300, torch.bfloat16)
    with Operators() as seen:
        token_stats(logits, targets)
    assert "parallel_rl::vocab_row_stats" in seen.names
    with Operators() as seen:
        token_stats(logits.double(), targets)
    assert not any(name.startswith("parallel_rl::") for name in seen.names)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(64, 128256), (1, 151936), (4096, 16032)], ids=str)
def test_shapes_of_models(shape: tuple[int, int], dtype: torch.dtype) -> None:
    got = check(*logits_and_targets(*shape, dtype))
    assert same_bits(got, run(*logits_and_targets(*shape, dtype), upstream(shape[0]), "triton"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("entropy", [False, True])
def test_extra_memory(entropy: bool, dtype: torch.dtype) -> None:
    """In place: at most 0.1 bytes for each logit, forward and backward."""
    logits, targets = logits_and_targets(2048, 32768, dtype)
    gradients = [g for g, used in zip(upstream(2048), (True, entropy, False), strict=True) if used and g is not None]

    def both() -> None:
        z = logits.detach().requires_grad_()
        stats = token_stats(z, targets, entropy=entropy, consume_logits=True)
        torch.autograd.grad([x for x in stats[: 1 + entropy] if x is not None], z, gradients)

    with validation("never"):  # the second reads what the first wrote there
        both()  # Triton compiles
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        both()
    assert torch.cuda.max_memory_allocated() - before <= 0.1 * logits.numel()


def test_the_host_does_not_wait() -> None:
    logits, targets = logits_and_targets(64, 5000, torch.bfloat16)
    z = logits.requires_grad_()

    def both() -> None:
        stats = token_stats(z, targets, temperature=0.7)
        torch.autograd.backward([stats.logprobs.sum(), stats.entropy.sum()])  # type: ignore[union-attr]

    both()  # Triton compiles
    with no_sync():
        both()


@pytest.mark.parametrize("consume", [False, True])
def test_cuda_graphs(consume: bool) -> None:
    logits, targets = logits_and_targets(16, 9005, torch.bfloat16)
    weights = [g for g in upstream(16) if g is not None]
    still = logits.clone().requires_grad_()

    def both() -> tuple[Tensor, Tensor]:
        stats = token_stats(still * 1, targets, temperature=0.7, consume_logits=consume)
        total = torch.stack([(x * g).sum() for x, g in zip(stats[:3], weights, strict=True) if x is not None]).sum()
        return total, torch.autograd.grad(total, still)[0]

    other, _ = logits_and_targets(16, 9005, torch.bfloat16, seed=7)
    found = replayed(both, lambda: still.detach().copy_(other))
    assert_close(found, list(both()), rtol=0, atol=0)


def test_more_logits_than_32_bits_count() -> None:
    tokens, vocab = 32768, 70016  # 2.3e9 logits
    if torch.cuda.mem_get_info()[0] < 8 * tokens * vocab:
        pytest.skip("needs 18 GB")
    logits = torch.empty(tokens, vocab, dtype=torch.bfloat16, device="cuda").normal_()
    targets = torch.randint(0, vocab, (tokens,), device="cuda")
    last = slice(tokens - 3, tokens)
    want = run(logits[last].clone(), targets[last], [torch.ones(3, device="cuda"), None, None], "triton")
    z = logits.requires_grad_()
    stats = token_stats(z, targets, consume_logits=True)
    assert_close(stats.logprobs[last], want["log-prob"], rtol=1e-6, atol=1e-6)
    (gradient,) = torch.autograd.grad(stats.logprobs.sum(), z)
    assert error(gradient[last], want["gradient"]) < 1e-3
