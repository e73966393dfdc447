"""Check a loss's claims about itself."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from parallel_rl.counts import count_valid
from parallel_rl.losses.core.base import LossFn
from parallel_rl.losses.core.batch import ModelOutput, TokenBatch
from parallel_rl.losses.core.call import LossCall
from parallel_rl.losses.core.run import read
from parallel_rl.testing.cases import Batch, step_statistics
from parallel_rl.vocab.stats import TokenStats


def false_claims(loss_fn: LossFn, batch: Batch) -> tuple[str, ...]:
    """List the false claims among `token_separable` and `on_policy`."""
    findings = []
    needs = loss_fn.requirements
    if needs.token_separable and needs.reads == "log-probs" and not loss_fn.options.truncation:
        moved = influence(loss_fn, token_batch(loss_fn, batch))
        if moved > 1e-9:
            findings.append(
                f"token_separable: the gradient of a token moves by {moved:.1e} of the largest when other tokens do, so "
                "gradients computed in forward would be wrong"
            )
    if loss_fn.on_policy and "prev_logprobs" in batch.data and (moved := _reads_old_policy(loss_fn, batch)) > 1e-9:
        findings.append(
            f"on_policy: the gradient moves by {moved:.1e} with prev_logprobs, so the loss reads an old policy"
        )
    return tuple(findings)


def _reads_old_policy(loss_fn: LossFn, batch: Batch) -> float:
    """Return the gradient's relative change with the old policy's log-probs."""
    g = torch.Generator().manual_seed(3)
    old = batch.data["prev_logprobs"]
    moved = {**batch.data, "prev_logprobs": old + 0.3 * torch.randn(old.shape, generator=g).to(old)}
    before, after = (_gradient(loss_fn, batch.logits, data) for data in (batch.data, moved))
    return float((after - before).norm() / before.norm().clamp(min=1e-12))


def _gradient(loss_fn: LossFn, logits: Tensor, data: dict[str, Tensor]) -> Tensor:
    leaf, counts = logits.clone().requires_grad_(), count_valid(data)
    call = (leaf, data, *counts)
    loss, _ = loss_fn(*call, statistics=step_statistics([(loss_fn, call)]))
    return torch.autograd.grad(loss, leaf)[0]


def token_batch(loss_fn: LossFn, batch: Batch) -> TokenBatch:
    """Make the objective's `TokenBatch` of the whole batch."""
    counts = count_valid(batch.data)
    statistics = step_statistics([(loss_fn, (batch.logits, batch.data, *counts))])
    return read(loss_fn, LossCall(batch.logits, batch.data, *counts, statistics=statistics)).batch


def influence(loss_fn: LossFn, batch: TokenBatch) -> float:
    """Return the largest relative change of tokens' gradients when other tokens change."""
    g = torch.Generator().manual_seed(0)
    tokens = batch.mask.numel()
    base, worst = gradients(loss_fn, batch, torch.zeros(tokens, dtype=torch.float64)), 0.0
    for size in (0.05, 1.0, -3.0):
        for _ in range(4):
            moved = torch.rand(tokens, generator=g) < 0.5
            shifted = gradients(loss_fn, batch, torch.where(moved, size, 0.0).double())
            for before, after in zip(base, shifted, strict=True):
                scale = max(x.abs().max().item() for x in base)
                worst = max(worst, (after - before)[~moved].abs().max().item() / scale)
    return worst


def gradients(loss_fn: LossFn, batch: TokenBatch, change: Tensor) -> list[Tensor]:
    """Return gradients of log-probs and entropies after adding `change` to both, with fixed statistics."""
    assert batch.output.stats is not None
    leaves = [
        None if x is None else (x + torch.where(batch.mask, change, 0)).detach().requires_grad_()
        for x in batch.output.stats
    ]
    loss, _ = loss_fn.compute(replace(batch, output=ModelOutput(TokenStats(*leaves))))  # type: ignore[arg-type]
    present = [x for x in leaves if x is not None]
    computed = torch.autograd.grad(loss, present, allow_unused=True)
    return [torch.zeros_like(x) if g is None else g for g, x in zip(computed, present, strict=True)]
