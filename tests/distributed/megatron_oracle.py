"""What one process makes of a case: row by row, without a schedule or a wrapper, the auxiliary losses of experts by hand."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tests.distributed.megatron_cases import (
    AUX_COEFFICIENT,
    VOCAB,
    Z_COEFFICIENT,
    Batch,
    Case,
    make_data,
    make_loss,
    make_model,
    split,
)

if TYPE_CHECKING:
    from megatron.core.models.gpt import GPTModel


@dataclass
class Outcome:
    """What one step gave, on one process: the loss, the gradient norm and the gradients by global name."""

    loss: float
    norm: float
    grads: dict[str, Tensor]


def oracle(rank: int, cases: list[Case]) -> list[Outcome]:
    """One process, no schedule, no wrapper, row by row, one step's loss for each case."""
    import parallel_rl.megatron as M

    M.initialize()
    outcomes = []
    for case in cases:
        model = make_model(replace(case, sp=False, recompute=False, experts="alltoall" if case.experts else ""))
        model.config.moe_aux_loss_coeff, model.config.moe_z_loss_coeff = 0.0, None  # added by hand
        whole = make_data(case.data)
        n_tokens = (whole["token_mask"][:, 1:] * whole["sample_mask"][:, None]).sum()
        if case.loss == "nll":
            loss = torch.zeros((), dtype=torch.float64)
            for i, length in enumerate(whole["lengths"].tolist()):
                row = whole["input_ids"][i : i + 1, :length]
                logprobs = M.forward_logits(model, M.padded_input(row))[0, :-1, :VOCAB].log_softmax(-1)
                chosen = logprobs.gather(-1, row[0, 1:, None])[:, 0]
                loss = loss - (chosen * whole["token_mask"][i, 1:length] * whole["sample_mask"][i]).sum() / n_tokens
                if case.mtp:
                    loss = loss + 0.3 / 2 * _heads_of_row(model, case, whole, i, n_tokens)
            reported = loss.item()
            if case.experts:
                added = _auxiliary_losses if case.balance == "aux_loss" else _balance
                loss = loss + added(model, case, whole)
        else:
            from parallel_rl.testing.cases import step_statistics

            fn, logits = make_loss(case), M.forward_logits(model, M.padded_input(whole["input_ids"]))
            counts = whole["sample_mask"].sum(), n_tokens
            call = (logits, whole, *counts)
            loss, _ = fn(*call, statistics=step_statistics([(fn, call)]))
            reported = loss.item()
        loss.backward()
        grads = {name: p.grad for name, p in M.global_parameters([model])}
        norm = torch.stack([g.square().sum() for g in grads.values()]).sum().sqrt()
        outcomes.append(Outcome(reported, norm.item(), {name: g.clone() for name, g in grads.items()}))
    M.destroy()
    return outcomes


def _heads_of_row(model: GPTModel, case: Case, whole: Batch, i: int, n_tokens: Tensor) -> Tensor:
    """A row's part of both heads' losses: position t of head k speaks of token t + 1 + k, where that one carries loss."""
    import parallel_rl.megatron as M

    length = int(whole["lengths"][i])
    row, mask = whole["input_ids"][i, :length], whole["token_mask"][i, :length] * whole["sample_mask"][i]
    output = M.forward_logits(model, M.padded_input(row[None]), mtp=True)[0, :, :VOCAB].log_softmax(-1)
    total = torch.zeros((), dtype=torch.float64)
    for k in (1, 2):
        logprobs, carries = output[k * length : (k + 1) * length], mask[k + 1 :]
        chosen = logprobs[: max(length - 1 - k, 0)].gather(-1, row[k + 1 :, None])[:, 0]
        count = n_tokens if case.mtp == "token-mean" else whole["sample_mask"].sum() * carries.sum().clamp(min=1)
        total = total - (chosen * carries).sum() / count
    return total


def _gates(model: GPTModel) -> list[Tensor]:
    """A list to which the model's routers add their logits [S, B, E] from now on."""
    from megatron.core.transformer.moe.router import TopKRouter

    logits: list[Tensor] = []
    for router in (module for module in model.modules() if isinstance(module, TopKRouter)):
        gating = TopKRouter.gating.__get__(router)
        router.gating = lambda x, gating=gating: (logits.append(gating(x)), logits[-1])[1]
    return logits


def _balance(model: GPTModel, case: Case, whole: Batch) -> Tensor:
    """E/K · Σ_e (choices of e) · (sum of e's probability) / n², the mean over sequences, or of all their n tokens. A sequence
    ends with its last token that carries loss.
    """
    import parallel_rl.megatron as M

    logits = _gates(model)
    carries = (whole["token_mask"] * whole["sample_mask"][:, None])[:, 1:] > 0
    found: list[list[Tensor]] = []
    for row, mask in zip(whole["input_ids"], carries, strict=True):
        if mask.any():
            del logits[:]
            length = int(mask.nonzero().max()) + 2
            M.forward_logits(model, M.padded_input(row[None, :length]), mtp=bool(case.mtp))
            # head k reads k tokens ahead, and has nothing to read at the last k
            ends = [length] * case.layers + [length - 1 - k for k in range(len(logits) - case.layers)]
            found.append([each[: max(end, 0), 0] for each, end in zip(logits, ends, strict=True)])
    if case.balance == "global_aux_loss":
        found = [[torch.cat(parts) for parts in zip(*found, strict=True)]]
    total = torch.zeros((), dtype=torch.float64)
    for sequences in zip(*found, strict=True):
        full = [each for each in sequences if len(each)]
        for each in full:
            chosen = torch.zeros_like(each).scatter(1, each.topk(2, dim=1).indices, 1.0)
            balance = 4 / 2 * (chosen.sum(0) * each.softmax(1).sum(0)).sum() / len(each) ** 2
            total = total + AUX_COEFFICIENT * balance / len(full)
    return total


def _auxiliary_losses(model: GPTModel, case: Case, whole: Batch) -> Tensor:
    """The mean over micro-batches of the routers' losses on all of their rows' tokens, whichever carry loss:
    E · Σ_e (share of the tokens' choices that e got) · (mean probability of e), and the mean of logsumexp².
    """
    import parallel_rl.megatron as M

    logits = _gates(model)
    batches = split(whole, case.micro_batches)
    for batch in batches:
        M.forward_logits(model, M.padded_input(batch["input_ids"]))
    assert len(logits) == case.micro_batches * case.layers
    total = torch.zeros((), dtype=torch.float64)
    for each in logits:
        rows = each.flatten(0, -2)
        chosen = torch.zeros_like(rows).scatter(1, rows.topk(2, dim=1).indices, 1.0)
        balance = 4 * (chosen.mean(0) / 2 * rows.softmax(1).mean(0)).sum()
        total = total + AUX_COEFFICIENT * balance + Z_COEFFICIENT * rows.logsumexp(1).square().mean()
    return total / len(batches)
