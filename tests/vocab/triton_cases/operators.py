"""The kernels as torch operators: what torch.library checks, and torch.compile without a break in the graph."""

from __future__ import annotations

import pytest
import torch
import torch._dynamo.testing
from torch import Tensor

from parallel_rl import token_stats
from parallel_rl.validation import validation
from parallel_rl.vocab.backends.triton import operators
from tests.vocab.triton_cases.common import DEVICE, logits_and_targets, same_bits, upstream


def arguments(entropy: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    logits, targets = logits_and_targets(5, 48, torch.float32)
    keep = torch.arange(5, device=DEVICE) != 1
    return logits, targets, keep, torch.linspace(0.5, 2, 5 if entropy else 1, device=DEVICE)[:, None]


@pytest.mark.parametrize("entropy", [False, True])
def test_opcheck(entropy: bool) -> None:
    logits, targets, keep, inv_t = arguments(entropy)
    torch.library.opcheck(operators.vocab_stats, (logits, targets, keep, inv_t, 0, 40, entropy))
    parts = operators.vocab_stats(logits, targets, keep, inv_t, 0, 40, entropy).expand(2, -1, -1)
    torch.library.opcheck(operators.vocab_combine, (parts, keep, inv_t))
    torch.library.opcheck(operators.vocab_row_stats, (logits, targets, keep, inv_t, 0, 40, entropy, False))
    rows = operators.vocab_combine(parts, keep, inv_t)[3]
    gradients = upstream(5, "lel" if entropy else "l--")
    arguments_of_gradient = (logits, targets, keep, inv_t, rows, *gradients, 0, 40)
    torch.library.opcheck(operators.vocab_gradient, arguments_of_gradient)
    torch.library.opcheck(operators.vocab_gradient_, arguments_of_gradient)
    out = torch.empty_like(logits, dtype=torch.bfloat16)
    torch.library.opcheck(operators.vocab_gradient_to, (*arguments_of_gradient, out))


def test_opcheck_of_a_split_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operators, "processors", lambda device: 1)
    logits, targets = logits_and_targets(1, 9000, torch.float32)
    keep, inv_t = torch.ones(1, dtype=torch.bool, device=DEVICE), torch.ones(1, 1, device=DEVICE)
    torch.library.opcheck(operators.vocab_stats, (logits, targets, keep, inv_t, 0, 9000, True))
    torch.library.opcheck(operators.vocab_row_stats, (logits, targets, keep, inv_t, 0, 9000, True, True))


def loss(z: Tensor, targets: Tensor, gradients: list[Tensor], temperature: float | Tensor, consume: bool) -> Tensor:
    stats = token_stats(z * 1, targets, temperature=temperature, consume_logits=consume, backend="triton")
    assert stats.entropy is not None
    return sum(
        ((x.exp() * g).sum() for x, g in zip(stats[:3], gradients, strict=True)), torch.zeros((), device=z.device)
    )


@pytest.mark.parametrize(
    ("compiler", "consume", "per_token"),
    [("aot_eager", False, False), ("aot_eager", True, True), ("inductor", False, True), ("inductor", True, False)],
)
def test_one_graph(compiler: str, consume: bool, per_token: bool) -> None:
    temperature = torch.linspace(0.5, 2, 5, device=DEVICE) if per_token else 0.7
    compiled = torch.compile(loss, backend=compiler, fullgraph=True)
    results = []
    torch._dynamo.reset()
    with validation("never"):  # on a CPU a look at the values would break the graph; on a card none is taken
        for function in (loss, compiled):
            logits, targets = logits_and_targets(5, 300, torch.bfloat16)
            z = logits.requires_grad_()
            total = function(z, targets, upstream(5), temperature, consume)
            total.backward()
            assert z.grad is not None
            results.append({"loss": total.detach(), "gradient": z.grad})
    torch.testing.assert_close(results[1]["loss"], results[0]["loss"])
    assert compiler == "inductor" or same_bits(*results)
    torch.testing.assert_close(results[1]["gradient"], results[0]["gradient"], rtol=8e-3, atol=1e-6)


def test_one_graph_for_any_number_of_tokens() -> None:
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(loss, backend=counter, fullgraph=True, dynamic=True)
    graphs = []
    with validation("never"):
        for tokens in (4, 5, 7):
            logits, targets = logits_and_targets(tokens, 64, torch.float32)
            z, same = (logits.clone().requires_grad_() for _ in range(2))
            for function, x in ((compiled, z), (loss, same)):
                function(x, targets, upstream(tokens), 0.7, False).backward()
            assert z.grad is not None and same.grad is not None and torch.equal(z.grad, same.grad)
            graphs.append([module.graph for module in counter.graphs if len(module.graph.nodes)])
    first, *others = graphs  # torch 2.8 traces the first call twice, as it finds that the temperature is a constant
    assert len(first) in (1, 2) and all(after == first for after in others)
    assert any("autograd_function_apply" in str(node.target) for node in first[-1].nodes)
