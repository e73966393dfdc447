"""One input of `benchmarks.truncation`: the same logits on every rank, each with its columns, and each rule's float64 truth."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from parallel_rl.vocab.sampling import sample_keys

RULES: dict[str, dict] = {
    "top-p 0.95": {"top_p": 0.95},
    "top-k 50": {"top_k": 50},
    "top-k 1000, top-p 0.95": {"top_k": 1000, "top_p": 0.95},
}
BLOCK = 64  # rows that are sorted at once


class Case(NamedTuple):
    """One rank's input and the truth: logits [T, V/tp], targets, upstream [T]; by rule log-probs and gradients in float64."""

    logits: Tensor
    targets: Tensor
    upstream: Tensor
    keys: Tensor
    truth: dict[str, tuple[Tensor, Tensor]]


def kept_words(z: Tensor, top_k: int | None, top_p: float | None) -> Tensor:
    """[T, V] bool by sorting: what a sampler keeps, and what equals the last of it."""
    falling = z.sort(-1, descending=True).values
    last = falling[:, -1:] if top_k is None else falling[:, top_k - 1 : top_k]
    if top_p is not None:
        falling = falling.masked_fill(falling < last, -torch.inf)
        p = falling.softmax(-1)
        last = falling.masked_fill(p.cumsum(-1) - p >= top_p, torch.inf).amin(-1, keepdim=True)
    return z >= last


def make_case(rank: int, tokens: int, vocab: int, tp: int, dtype: torch.dtype) -> Case:
    """Make the same logits on every rank, of which each keeps its columns; the targets are likely words."""
    generator = torch.Generator().manual_seed(0)
    width = vocab // tp
    columns = slice(rank * width, (rank + 1) * width)
    logits, upstream = torch.empty(tokens, width, dtype=dtype), torch.randn(tokens, generator=generator) / tokens
    targets, found = torch.empty(tokens, dtype=torch.int64), {name: ([], []) for name in RULES}  # type: ignore[var-annotated]
    for rows in torch.arange(tokens).split(BLOCK):
        block = (3 * torch.randn(len(rows), vocab, generator=generator)).to(dtype)
        logits[rows] = block[:, columns]
        z = block.double()
        targets[rows] = torch.multinomial(z.softmax(-1), 1, generator=generator)[:, 0]
        for name, rule in RULES.items():
            keep = kept_words(z, rule.get("top_k"), rule.get("top_p"))
            log_p = z.masked_fill(~keep, -torch.inf).log_softmax(-1)
            logp = log_p.gather(1, targets[rows, None])
            g = torch.where(logp > -torch.inf, upstream[rows, None].double(), 0)
            dz = (log_p.exp() * -g).scatter_add(1, targets[rows, None], g)
            found[name][0].append(logp[:, 0])
            found[name][1].append(dz[:, columns].to(torch.float32))
    truth = {name: (torch.cat(logps), torch.cat(grads)) for name, (logps, grads) in found.items()}
    keys = sample_keys(0, torch.arange(tokens), torch.zeros(tokens, dtype=torch.int64))
    return Case(logits, targets, upstream, keys, truth)
