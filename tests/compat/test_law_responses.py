"""The law on log-probs and rewards of responses: on two ranks, shares add up to what the class alone gives."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from parallel_rl import ParallelGroups
from parallel_rl.compat import lightrft, openrlhf
from parallel_rl.testing.pool import run_world
from parallel_rl.validation import validation
from tests.compat.law import Case, Data, plain, run
from tests.watch import Watch

PAIRS = ("chosen", "rejected", "kl")


def _responses_of_pairs() -> Data:
    torch.manual_seed(0)
    sizes = {"chosen": 4, "rejected": 4, "kl": 5}
    return {
        f"{who}_{side}": -torch.rand(n, dtype=torch.float64) + (0.3 if who == "policy" else 0.0)
        for side, n in sizes.items()
        for who in ("policy", "reference")
    }


@functools.cache
def _pair_cases() -> dict[str, Case]:
    four = ("policy_chosen", "policy_rejected", "reference_chosen", "reference_rejected")
    six = tuple(f"{who}_{side}" for who in ("policy", "reference") for side in PAIRS)
    leaves, cases = ("policy_chosen", "policy_rejected"), {}
    for name in ("PairWiseLoss", "LogSigmoidLoss", "LogExpLoss", "HPSLoss"):
        cases[name] = Case(plain(getattr(lightrft, name)(), *leaves), leaves)
    for options in ({}, {"label_smoothing": 0.1}, {"ipo": True}):
        cases[f"DPOLoss {options}"] = Case(plain(openrlhf.DPOLoss(0.3, **options), *four), leaves)
    vanilla, kto = openrlhf.VanillaKTOLoss(0.5), openrlhf.KTOLoss(0.5, 1.3, 0.7, 2, torch.device("cpu"))
    for name, fn, names in (("VanillaKTOLoss", vanilla, four), ("KTOLoss", kto, six)):
        cases[name] = Case(
            lambda data, fn=fn, names=names, global_valid_seqs=None, **keywords: (
                fn(*(data[key] for key in names), **keywords)[0],
                {},
            ),
            leaves,
            lambda data, fn=fn, names=names, **keywords: fn.collect(*(data[key] for key in names), **keywords),
        )
    return cases


def _pair_world(rank: int, split: str) -> dict[str, tuple]:
    data, world = _responses_of_pairs(), dist.group.WORLD
    answers = {}
    for name, case in _pair_cases().items():
        if split == "context":  # numbers of whole responses, the same on both ranks
            groups, context = ParallelGroups(context=world), {"context_parallel_group": world}
            cuts = [(slice(0, 1), slice(0, 1), slice(0, 2)), (slice(1, 4), slice(1, 4), slice(2, 5))]
        else:
            groups, context = ParallelGroups(data=world), {}
            cuts = [(slice(0, 1), slice(0, 1), slice(0, 2)), (slice(1, 2), slice(1, 2), slice(2, 2))]
            if rank == 1:
                cuts = [(slice(2, 4), slice(2, 4), slice(2, 5)), (slice(4, 4),) * 3]
            if rank == 1 and "KTO" in name:  # sides of their own sizes, one of them empty
                cuts = [(slice(2, 2), slice(2, 4), slice(2, 5)), (slice(2, 4), slice(4, 4), slice(5, 5))]
        parts = [{key: x[cut[PAIRS.index(key.split("_")[1])]] for key, x in data.items()} for cut in cuts]
        answers[name] = run(case, parts, {"global_valid_seqs": torch.tensor(8)}, groups, context)
    return answers


@pytest.fixture(scope="module", params=["context", "data"])
def pair_world(request: pytest.FixtureRequest) -> tuple[str, list[dict[str, tuple]]]:
    return request.param, run_world(2, _pair_world, request.param)


@pytest.mark.parametrize("name", _pair_cases())
def test_losses_on_responses(name: str, pair_world: tuple[str, list[dict[str, tuple]]]) -> None:
    split, worlds = pair_world
    case, data = _pair_cases()[name], _responses_of_pairs()
    data = {**data, **{leaf: data[leaf].clone().requires_grad_() for leaf in case.leaves}}
    loss, _ = case.call(data)
    grads = torch.autograd.grad(loss, [data[leaf] for leaf in case.leaves])
    torch.testing.assert_close(sum(world[name][0] for world in worlds), loss.detach(), rtol=1e-12, atol=1e-12)
    for i, grad in enumerate(grads):
        per_rank = [torch.cat([part[i] for part in world[name][1]]) for world in worlds]
        found = per_rank[0] + per_rank[1] if split == "context" else torch.cat(per_rank)
        torch.testing.assert_close(found, grad, rtol=1e-12, atol=1e-12)


def _kto_by_group(rank: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """One call a rank: with `data_parallel_group` (KTO, vanilla KTO), and as the origin has it."""
    data, world = _responses_of_pairs(), dist.group.WORLD
    cut = {
        "chosen": (slice(0, 1), slice(1, 4)),
        "rejected": (slice(0, 3), slice(3, 4)),
        "kl": (slice(0, 4), slice(4, 5)),
    }
    mine = {key: x[cut[key.split("_")[1]][rank]] for key, x in data.items()}
    six = [mine[f"{who}_{side}"] for who in ("policy", "reference") for side in PAIRS]
    four = [mine[f"{who}_{side}"] for who in ("policy", "reference") for side in PAIRS[:2]]
    fn = openrlhf.KTOLoss(0.5, 1.3, 0.7, 2, torch.device("cpu"))
    law, *_ = fn(*six, data_parallel_group=world)
    vanilla, *_ = openrlhf.VanillaKTOLoss(0.5)(*four, data_parallel_group=world)
    alone, _, _, kl = fn(*six)
    return law, vanilla, alone, kl


def test_kto_over_a_group_and_over_the_world_as_the_origin_has_it() -> None:
    data, answers = _responses_of_pairs(), run_world(2, _kto_by_group)
    for i, name in enumerate(("KTOLoss", "VanillaKTOLoss")):
        expected, _ = _pair_cases()[name].call(data)
        torch.testing.assert_close(sum(answer[i] for answer in answers), expected)
    ratio = {side: data[f"policy_{side}"] - data[f"reference_{side}"] for side in PAIRS}
    kl = ((ratio["kl"][:4].mean() + ratio["kl"][4:].mean()) / 2).clamp(min=0)  # a mean of the ranks' means
    for (_, _, alone, seen), good, bad in zip(
        answers, (slice(0, 1), slice(1, 4)), (slice(0, 3), slice(3, 4)), strict=True
    ):
        terms = [
            1.3 * (1 - torch.sigmoid(0.5 * (ratio["chosen"][good] - kl))),
            0.7 * (1 - torch.sigmoid(0.5 * (kl - ratio["rejected"][bad]))),
        ]
        torch.testing.assert_close((alone, seen), (torch.cat(terms).mean(), kl))


@pytest.mark.parametrize("name", _pair_cases())
def test_nothing_reads_a_value(name: str) -> None:
    """On the meta device there are no values: whatever needs one fails."""
    data = {key: value.to("meta") for key, value in _responses_of_pairs().items()}
    watch = Watch()
    with validation("never"), watch:
        run(_pair_cases()[name], [data], {"global_valid_seqs": torch.ones((), device="meta")}, ParallelGroups(), {})
    assert watch.syncs == []
