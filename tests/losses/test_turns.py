"""Turns: a ratio, a weight, a rejection of each run of one id, against lists in float64, where context ranks cut them too."""

from __future__ import annotations

import math
from itertools import groupby

import pytest
import torch
from torch import Tensor

from parallel_rl import PolicyLossFn, SequenceLayout, count_valid, reduce_metrics
from parallel_rl.losses.core.turns import TurnLayout, turn_starts
from parallel_rl.testing.batches import make_batch
from parallel_rl.testing.layouts import make_groups
from parallel_rl.testing.pool import preload, run_world
from tests import reference
from tests.test_layout import CUTS, Row

preload("tests.losses.test_turns", "tests.test_layout")

Turn = list[tuple[int, int]]  # (row, column) of its valid tokens
IMPORTANCE = {"mode": "tis", "low": 0.6, "high": 1.2}
CONFIG = {"ratio_level": "turn-mean", "importance": {"level": "turn-sum", **IMPORTANCE}}
CONFIG |= {"rejection": {"rules": [{"statistic": "k1", "low": 0.7, "high": 1.4, "level": "turn-max"}]}}


def turns_of(ids: Tensor, valid: Tensor) -> list[Turn]:
    """Turn after turn, with lists."""
    found: list[Turn] = []
    for row in range(len(ids)):
        tokens = [(row, t) for t in range(ids.shape[1]) if valid[row, t]]
        found += [list(turn) for _, turn in groupby(tokens, lambda place: int(ids[place]))]
    return found


def policy_oracle(logits: Tensor, data: dict[str, Tensor], by_turn: dict[str, bool]) -> Tensor:
    """PPO's clip 0.2, token-mean: geometric mean ratio, product weight and largest mismatch of a turn, or of a token."""
    logprobs = reference.logprobs_and_entropy(logits, data["input_ids"])[0]
    valid = (data["token_mask"] != 0) & (data["sample_mask"] != 0)[:, None]
    valid[:, 0] = False
    turns = turns_of(data["segment_ids"], valid)
    loss = logits.new_zeros(())
    for turn in turns:
        for place in turn:
            ratios = turn if by_turn["ratio"] else [place]
            weights = turn if by_turn["weight"] else [place]
            judged = turn if by_turn["rejection"] else [place]
            mismatches = [data["prev_logprobs"][p] - data["generation_logprobs"][p] for p in turn]
            of = dict(zip(turn, mismatches, strict=True))
            worst = max(float(of[p]) for p in judged)
            if not math.log(0.7) <= worst <= math.log(1.4):
                continue
            weight = min(max(math.exp(sum(float(of[p]) for p in weights)), 0.6), 1.2)
            ratio = (sum(logprobs[p] - data["prev_logprobs"][p] for p in ratios) / len(ratios)).exp()
            advantage = data["advantages"][place]
            loss = loss + weight * torch.maximum(-advantage * ratio, -advantage * ratio.clamp(0.8, 1.2))
    return loss / int(valid.sum())


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("units", [("ratio", "weight", "rejection"), ("ratio",), ("weight",), ("rejection",)], ids=str)
def test_ratio_weight_and_rejection_of_a_turn(units: tuple[str, ...], seed: int) -> None:
    """Value and gradient by an oracle that loops over turns: the law's own truth for `policy` is the loss itself."""
    logits, data, _ = make_batch(seed, False, "policy", torch.float64)
    by_turn = {name: name in units for name in ("ratio", "weight", "rejection")}
    rule = {"statistic": "k1", "low": 0.7, "high": 1.4, "level": "turn-max" if by_turn["rejection"] else "token"}
    config = {
        "ratio_level": "turn-mean" if by_turn["ratio"] else "token",
        "importance": {"level": "turn-sum" if by_turn["weight"] else "token", **IMPORTANCE},
        "rejection": {"rules": [rule]},
    }
    leaf, other = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    loss, _ = PolicyLossFn(config)(leaf, data, *count_valid(data))
    want = policy_oracle(other, data, by_turn)
    loss.backward()
    want.backward()
    torch.testing.assert_close(loss, want, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(leaf.grad, other.grad, rtol=1e-10, atol=1e-14)


def levels(unit: str) -> dict:
    mean, total, most = ("token",) * 3 if unit == "token" else (f"{unit}-{how}" for how in ("mean", "sum", "max"))
    rules = [
        {"statistic": "k1", "low": 0.6, "high": 1.5, "level": most},
        {"statistic": "k3", "high": 0.2, "level": total},
        {"statistic": "k2", "high": 0.05, "level": mean},
    ]
    config: dict = {"ratio_level": mean, "importance": {"level": total, **IMPORTANCE}, "rejection": {"rules": rules}}
    return config


@pytest.mark.parametrize("unit", ["token", "sequence"])
@pytest.mark.parametrize("aggregation", ["token-mean", "seq-mean-token-mean"])
@pytest.mark.parametrize("denominator", ["original", "kept"])
def test_a_turn_of_one_token_is_the_token_and_of_a_whole_row_the_sequence(
    unit: str, aggregation: str, denominator: str
) -> None:
    logits, data, _ = make_batch(7, False, "policy", torch.float64)
    columns = torch.arange(data["input_ids"].shape[1])
    data["segment_ids"] = columns.expand_as(data["input_ids"]) if unit == "token" else torch.full_like(
        data["input_ids"], -3
    )  # fmt: skip
    found = []
    for of in (unit, "turn"):
        config = {**levels(of), "aggregation": aggregation}
        config["rejection"] = {**config["rejection"], "denominator": denominator}
        loss_fn, leaf, counts = PolicyLossFn(config), logits.clone().requires_grad_(), count_valid(data)
        extra = {"statistics": loss_fn.count(data)} if denominator == "kept" else {}
        loss, metrics = loss_fn(leaf, data, *counts, **extra)
        loss.backward()
        found.append((loss, leaf.grad, reduce_metrics([metrics])["rejected_fraction"]))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-14)


def test_ids_of_masked_tokens_do_not_matter() -> None:
    """Prompts, tool output and padding may carry any id; those of one turn on both sides of a gap are one turn."""
    ids = torch.tensor([[9, 1, 1, -7, 1, 2, 0, 2], [0, 0, 0, 0, 0, 0, 0, 0]])
    valid = torch.tensor([[0, 1, 1, 0, 1, 1, 0, 1], [0, 0, 0, 0, 0, 0, 0, 0]]).bool()
    assert turn_starts(ids, valid).nonzero().tolist() == [[0, 1], [0, 5]]


# Over context ranks.


def batch_of(row: Row, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Segment ids, valid tokens and values [B, S]; long turns, which several cuts divide, and short ones."""
    g = torch.Generator().manual_seed(seed)
    shape = len(row.lengths), row.width
    valid = (torch.rand(shape, generator=g) < (0.6, 0.95)[seed % 2]) & (torch.arange(row.width) > 0)
    valid &= torch.arange(row.width) < torch.tensor(row.lengths)[:, None]
    ids = (torch.rand(shape, generator=g) < (0.05, 0.3, 0.7)[seed % 3]).cumsum(1) - 4
    ids = torch.where(valid, ids, torch.randint(-99, 99, shape, generator=g))
    return ids, valid, torch.randn(shape, generator=g, dtype=torch.float64)


def sums_of_ranks(rank: int) -> list[str]:
    """What differs from the lists, over layouts, masks and CP 2 and 4: sums, largest values, counts and gradients."""
    wrong = []
    for cp in (2, 4):
        groups, (_, cp_rank, _) = make_groups(rank, 4, 1, cp)
        for name, row, cp_layout in CUTS:
            pieces, parts = row.room or [row.width], 2 * cp if cp_layout == "zigzag" else cp
            if any(size % parts for size in (pieces if cp_layout == "zigzag" else [sum(pieces)])):
                continue
            for seed in range(4):  # few and many valid tokens, long and short turns
                layout: SequenceLayout = row.layout(cp, cp_rank, cp_layout)
                ids, valid, x = batch_of(row, seed)
                whole, local = x.clone().requires_grad_(), layout.shard(x).requires_grad_()
                here = layout.shard(valid, fill=False)
                got = TurnLayout.of(layout, ids, valid)
                masked = torch.where(here, local, 0)
                summed, most = got.sum(masked, groups.context), got.max(torch.where(here, local, -1e9), groups.context)
                want, want_most, want_tokens = (torch.zeros_like(x) for _ in range(3))
                turns = turns_of(ids, valid)
                for turn in turns:
                    places = tuple(torch.tensor(axis) for axis in zip(*turn, strict=True))
                    of_turn = whole[places]
                    want = want.index_put(places, of_turn.sum().expand(len(turn)))
                    want_most[places], want_tokens[places] = of_turn.max().item(), len(turn)
                torch.where(here, summed.sin(), 0).sum().backward()
                torch.where(valid, want.sin(), 0).sum().backward()
                pairs = {
                    "sum": (summed, want.detach()),
                    "max": (most, want_most),
                    "tokens": (got.tokens.double(), want_tokens),
                    "gradient": (local.grad, whole.grad),
                }
                for what, (mine, truth) in pairs.items():
                    if not torch.allclose(mine[here], layout.shard(truth)[here], rtol=1e-12, atol=1e-12):
                        wrong.append(f"{what} of {name}, {cp_layout}, cp {cp}, seed {seed}")
    return wrong


@pytest.mark.slow
def test_turns_that_context_ranks_cut() -> None:
    """Zigzag and contiguous, padded and packed, each turn cut nowhere, once, or by every boundary of its sequence."""
    for wrong in run_world(4, sums_of_ranks, timeout=120):
        assert wrong == []
