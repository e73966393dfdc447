"""Tensor ranks without a column: fewer words than ranks, or spans that leave one out. They count, and add −inf or 0."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from parallel_rl import (
    LMHeadInput,
    PolicyLossFn,
    count_valid,
    get_loss,
    linear_token_stats,
    token_logprobs,
    token_stats,
)
from parallel_rl.testing.pool import run_world
from parallel_rl.vocab.linear.plan import LinearMode
from parallel_rl.vocab.sampling import sample_tokens
from parallel_rl.vocab.shards import VocabShard
from parallel_rl.vocab.topk import gather_columns, top_columns
from parallel_rl.vocab.truncated_stats import truncated_token_stats

V, D, B, S = 3, 5, 2, 6
# the first column and the width of each of four ranks
SPANS = {"torch.chunk": ((0, 1), (1, 1), (2, 1), (3, 0)), "explicit": ((0, 2), (2, 0), (2, 0), (2, 1))}
MODES: tuple[LinearMode, ...] = ("in_forward", "resident", "recompute")


def inputs() -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    g = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(B, S, D, generator=g).double(), torch.randn(V, D, generator=g).double()
    data = {
        "input_ids": torch.randint(V, (B, S), generator=g),
        "token_mask": torch.ones(B, S),
        "sample_mask": torch.ones(B),
    }
    data |= {name: torch.randn(B, S, generator=g).double() for name in ("advantages", "prev_logprobs")}
    data["prev_logprobs"] = -data["prev_logprobs"].abs()
    data["kept_ids"] = torch.tensor([2, 0, -1]).expand(B, S, 3).clone()
    return hidden, weight, data


def results(width: int, start: int, group: dist.ProcessGroup | None) -> dict[str, list[Tensor]]:
    """Every function's values, then its gradients: [.., V] pieces of this rank's columns, and hidden states' as they are."""
    whole_hidden, whole_weight, data = inputs()
    mine, found = slice(start, start + width), {}
    at: dict = {"vocab_size": V, "vocab_start": None if group is None else start}
    counts, targets = count_valid(data), data["input_ids"]

    def run(name: str, function: Callable[[Tensor, Tensor], Tensor], fused: bool) -> None:
        hidden, weight = whole_hidden.clone().requires_grad_(), whole_weight[mine].clone().requires_grad_()
        logits = (whole_hidden @ whole_weight.T)[..., mine].clone().requires_grad_()
        value = function(hidden, weight) if fused else function(logits, weight)
        value.sum().backward()
        grads = [hidden.grad, weight.grad] if fused else [logits.grad]
        found[name] = [value.detach(), *(g for g in grads if g is not None)]

    def both(name: str, function: Callable[[Tensor | LMHeadInput], Tensor], modes: tuple[LinearMode, ...]) -> None:
        run(f"{name}, logits", lambda z, _: function(z), False)
        for mode in modes:
            run(f"{name}, head, {mode}", lambda h, w, mode=mode: function(LMHeadInput(h, w, mode=mode)), True)

    run("token_stats", lambda z, _: sum(token_stats(z, targets, group=group, **at)[:3]), False)
    for rule in ({"top_k": 2}, {"top_p": 0.7}, {"kept_ids": data["kept_ids"]}):
        options = {**rule, **at}
        run(f"{rule}", lambda z, _, o=options: truncated_token_stats(z, targets, group=group, **o).lse, False)
    for mode in MODES[1:]:
        run(
            f"linear_token_stats, {mode}",
            lambda h, w, m=mode: sum(linear_token_stats(h, w, targets, group=group, mode=m, budget=2000, **at)[:3]),
            True,
        )
    for name, config, rule in (("tokens", {}, {}), ("top-k", {"ratio_level": "sequence-mean"}, {"top_k": 2})):
        loss_fn = PolicyLossFn({**config, "entropy_bonus": 0.1}, **rule, **at)
        both(
            f"policy, {name}",
            lambda x, fn=loss_fn: fn(x, data, *counts, vocab_parallel_group=group)[0],
            MODES if name == "tokens" else MODES[1:],
        )
    teacher = {**data, "teacher_logits": (whole_hidden @ whole_weight.T).flip(0)[..., mine].contiguous()}
    distilled = get_loss("full_distillation")(**at)
    both("distillation", lambda x: distilled(x, teacher, *counts, vocab_parallel_group=group)[0], ("auto",))
    z = (whole_hidden @ whole_weight.T)[..., mine].contiguous()
    for name, x in (("logits", z), ("head", LMHeadInput(whole_hidden, whole_weight[mine]))):
        found[f"log-probs, {name}"] = [token_logprobs(x, data, vocab_parallel_group=group, top_p=0.9, **at)]
    flat, keys, keep = z.flatten(0, 1), torch.arange(B * S), torch.ones(B * S, dtype=torch.bool)
    found["drawn"] = [sample_tokens(flat, keys, top_k=2, group=group, **at)]
    shard = VocabShard.of(width, group, **at)
    found["the largest"] = list(top_columns(flat, 2, shard))
    found["columns"] = [gather_columns(flat, torch.tensor([2, 0]).expand(B * S, 2), keep, shard)]
    return found


def of_rank(rank: int, split: str) -> dict[str, list[Tensor]]:
    start, width = SPANS[split][rank]
    return results(width, start, dist.group.WORLD)


@pytest.mark.parametrize("split", ["torch.chunk", pytest.param("explicit", marks=pytest.mark.slow)])
def test_a_rank_without_a_column(split: str) -> None:
    want, ranks = results(V, 0, None), run_world(4, of_rank, split)
    for name, (value, *gradients) in want.items():
        for rank, found in enumerate(ranks):
            start, width = SPANS[split][rank]
            torch.testing.assert_close(found[name][0], value, rtol=1e-12, atol=1e-12, msg=f"{name} on rank {rank}")
            for got, whole in zip(found[name][1:], gradients, strict=True):
                own = whole if got.shape == whole.shape else whole[..., start : start + width]
                own = whole[start : start + width] if whole.shape == (V, D) else own
                torch.testing.assert_close(got, own, rtol=1e-11, atol=1e-12, msg=f"gradient of {name} on rank {rank}")


def test_no_column_at_all_is_named() -> None:
    with pytest.raises(ValueError, match="the logits have no column on tensor rank 0 of 1"):
        token_stats(torch.zeros(4, 0), torch.zeros(4, dtype=torch.int64))
