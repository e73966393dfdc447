"""A fault of one rank is the same ValueError on all ranks of its groups; nothing hangs, and the groups work on."""

from __future__ import annotations

import re
from functools import cache

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from parallel_rl import (
    NLLLoss,
    ParallelGroups,
    TokenBatch,
    linear_token_stats,
    register_objective,
    token_logprobs,
    token_stats,
)
from parallel_rl.functional.distillation import ForwardKL
from parallel_rl.testing.layouts import make_groups
from parallel_rl.testing.pool import WorldError, preload, run_world
from parallel_rl.validation import validation
from parallel_rl.vocab.divergence import divergence_of_shards
from parallel_rl.vocab.shards import VocabShard
from parallel_rl.vocab.truncated_stats import truncated_token_stats
from tests.collectives import recorded
from tests.losses.fault_calls import S, V, make_call
from tests.losses.faults import FAULTS

preload("parallel_rl.testing.layouts", "tests.losses.faults", "tests.collectives")

WORLD, TP, CP = 4, 2, 2
FAULTY = 3


def told_and_after(rank: int) -> dict[str, tuple[str, float, float]]:
    """For each fault of rank 3: what this rank raised, and its share of a right call before and after it."""
    groups, _ = make_groups(rank, WORLD, TP, CP)
    seen, right = {}, {}
    for fault in FAULTS:
        kind = (fault.loss, str(fault.config), fault.packed)
        if kind not in right:
            right[kind] = make_call(fault.loss, fault.config, fault.packed, groups).run()
        call = make_call(fault.loss, fault.config, fault.packed, groups)
        if rank == FAULTY:
            fault.spoil(call)
        told = "nothing"
        try:
            call.run()
        except ValueError as error:
            told = str(error)
        after = make_call(fault.loss, fault.config, fault.packed, groups).run()
        seen[fault.name] = (told, right[kind], after)
    return seen


@cache
def outcomes() -> list[dict[str, tuple[str, float, float]]]:
    return run_world(WORLD, told_and_after, timeout=60)


@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_one_rank_is_wrong_and_all_ranks_say_so(fault) -> None:  # type: ignore[no-untyped-def]
    mine = [seen[fault.name] for seen in outcomes()]
    texts = [told for told, _, _ in mine]
    assert texts == [texts[0]] * WORLD
    assert texts[0].startswith(f"rank {FAULTY}: ") and re.search(fault.message, texts[0])
    shares = [after for _, _, after in mine]
    assert shares == [before for _, before, _ in mine]
    assert shares[0] == shares[1] and shares[2] == shares[3]  # tensor ranks
    alone = make_call(fault.loss, fault.config, fault.packed, ParallelGroups()).run()
    assert shares[0] + shares[2] == pytest.approx(alone, rel=1e-12)


def uncaught(rank: int) -> None:
    groups, _ = make_groups(rank, WORLD, TP, CP)
    call = make_call("nll", {}, False, groups)
    if rank in (0, FAULTY):  # two ranks, neither of which shares a group with the other
        call.data["input_ids"][rank, 1] = V + rank
    call.run()


def test_an_error_that_nobody_catches_ends_all_ranks() -> None:
    with pytest.raises(WorldError) as caught:
        run_world(WORLD, uncaught, timeout=30)
    faults = (f"rank {r}: target {V + r} at [{r}, 1] lies outside the vocabulary [0, {V})" for r in (0, FAULTY))
    assert caught.value.silent == []
    assert caught.value.errors == dict.fromkeys(range(WORLD), f"ValueError: {'; '.join(faults)}")


# Log-probs as data, and groups.


def spoilt_logprobs(rank: int) -> list[str]:
    groups, _ = make_groups(rank, WORLD, TP, CP)
    logits, ids = torch.zeros(4, S // CP, 6), torch.zeros(4, S, dtype=torch.int64)
    right = {"input_ids": ids}
    told = []
    for data, temperature in (
        ({"input_ids": ids[:, :6]}, 1.0),
        ({}, 1.0),
        ({"input_ids": torch.full_like(ids, V)}, 1.0),
        (right, 0.0),
    ):
        mine, t = (data, temperature) if rank == FAULTY else (right, 1.0)
        try:
            token_logprobs(logits, mine, None, groups.tensor, groups.context, vocab_size=V, temperature=t)
        except ValueError as error:
            told.append(str(error))
    whole = token_logprobs(logits, right, None, groups.tensor, groups.context, vocab_size=V)
    want = torch.full((4, S), -float(torch.tensor(V).log()))
    want[:, 0] = 0
    torch.testing.assert_close(whole, want)
    return told


def test_log_probs_as_data() -> None:
    results = run_world(WORLD, spoilt_logprobs, timeout=60)
    assert results == [results[0]] * WORLD
    patterns = (
        r"rank 3: sequence length 6 is not divisible by 4",
        r"rank 3: data lacks the field 'input_ids'",
        r"rank 3: target 11 at \[\d, \d\] lies outside the vocabulary \[0, 11\)",
        r"rank 3: temperature = 0.0 must be positive",
    )
    for text, pattern in zip(results[0], patterns, strict=True):
        assert re.match(pattern, text)


def wrong_groups(rank: int) -> list[str]:
    groups, (tp_rank, _, _) = make_groups(rank, WORLD, TP, CP)
    world, tensor, context = dist.group.WORLD, groups.tensor, groups.context
    mesh = init_device_mesh("cpu", (CP, TP), mesh_dim_names=("context", "tensor"))

    def share_with(other: ParallelGroups, vocab_rank: int | None = None) -> float:
        call = make_call("nll", {}, False, groups)
        call.groups, call.vocab_rank = other, vocab_rank
        return call.run()

    told = []
    for attempt in (
        lambda: ParallelGroups(context=context, data_context=world),
        lambda: ParallelGroups.from_device_mesh(mesh, tensor="model"),
        lambda: share_with(ParallelGroups(tensor=tensor)),
        lambda: share_with(ParallelGroups(tensor=tensor, context=world)),
        lambda: share_with(ParallelGroups(context=context)),
        lambda: share_with(ParallelGroups(tensor=world, context=context), tp_rank),
    ):
        try:
            attempt()
        except ValueError as error:
            told.append(str(error))
    of_mesh = ParallelGroups.from_device_mesh(mesh, tensor="tensor", context="context")
    assert share_with(of_mesh) == share_with(groups, tp_rank)
    assert (of_mesh.tp_rank, of_mesh.cp_rank, of_mesh.dp_size) == (tp_rank, rank // TP, 1)
    return told


def test_groups_of_the_wrong_size() -> None:
    for told in run_world(WORLD, wrong_groups, timeout=60):
        for text, pattern in zip(
            told,
            (
                "data_context has 4 ranks; data × context has 1 × 2 = 2",
                "tensor = 'model' is not a dimension of the mesh; it has context, tensor",
                r"the logits .* shape \[4, 4\]; data of shape \[4, 8\] over cp = 1 needs \[4, 8\]",
                r"the logits .* shape \[4, 4\]; data of shape \[4, 8\] over cp = 4 .*",
                r"the logits' last dimension is 6 on tensor rank 0 of 1, but vocab_size = 11 .*",
                "rank 2: vocab_parallel_rank = 0, but this process is rank 2 of the group; rank 3: .* is rank 3 of the group",
            ),
            strict=True,
        ):
            assert re.fullmatch(pattern, text), text


# A loss that is not the same on all tensor ranks: its gradient would be wrong without a word.


def upstream_by_rank(rank: int) -> dict[tuple[str, str, bool], str]:
    """(path, mode, whether the ranks' losses differ) → what the backward said."""
    groups, (tp_rank, _, _) = make_groups(rank, 2, 2, 1)
    told = {}
    for mode in ("auto", "always"):
        for differs in (False, True):
            factor = 1.0 + (tp_rank if differs else 0)
            for path in ("logits", "recompute", "in_forward", "top-k", "divergence"):
                try:
                    with validation(mode):  # type: ignore[arg-type]
                        upstream_loss(path, factor, groups.tensor).backward()
                    told[path, mode, differs] = "nothing"
                except ValueError as error:
                    told[path, mode, differs] = str(error)
    return told


def upstream_loss(path: str, factor: float, group: dist.ProcessGroup | None) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    z = torch.randn(3, 6, generator=generator).requires_grad_()
    targets, keep = torch.arange(3), torch.ones(3, dtype=torch.bool)
    if path == "logits":
        return token_stats(z, targets, group=group).entropy.sum() * factor  # type: ignore[union-attr]
    if path == "top-k":
        return truncated_token_stats(z, targets, top_k=4, group=group).lse.sum() * factor
    if path == "divergence":
        shard = VocabShard(6 * dist.get_rank(group), 6, 12, group)
        return divergence_of_shards(z, z.detach() / 2, keep, ForwardKL(), shard).sum() * factor
    hidden, weight = torch.ones(3, 2, requires_grad=True), z[:, :2].repeat(2, 1)
    stats = linear_token_stats(
        hidden, weight, targets, group=group, mode="in_forward" if path == "in_forward" else "recompute",
        objective=lambda stats: stats.logprobs.sum() * factor,
    )  # fmt: skip
    assert stats.loss is not None
    return stats.loss


def test_tensor_ranks_whose_losses_differ_say_so() -> None:
    first, second = run_world(2, upstream_by_rank, timeout=60)
    assert first == second
    for (path, mode, differs), text in first.items():
        if mode == "always" and differs:
            assert re.match(
                "the gradient that reaches the token statistics differs between tensor ranks: .* on rank 0", text
            )
        else:
            assert text == "nothing", f"{path} {mode}"


# An objective of a user whose result fits on some ranks: those went on and waited for the others.


def without_last(rank: int) -> str:
    groups, _ = make_groups(rank, 2, 1, 2)

    @register_objective(f"without_last_{rank}")
    def wrong(logprobs: torch.Tensor, batch: TokenBatch) -> torch.Tensor:
        return logprobs[: len(logprobs) - rank]

    try:
        make_call(f"without_last_{rank}", {}, False, groups).run()
    except ValueError as error:
        return str(error)
    return "nothing"


def test_an_objective_that_is_wrong_on_one_context_rank_is_told_to_all() -> None:
    first, second = run_world(2, without_last, timeout=30)
    assert first == second
    assert first.startswith(
        "rank 1: the objective 'without_last_1' returns a tensor of shape [15]; on level 'token' it"
    )


# How much it costs to agree.


def collectives_by_mode(rank: int) -> dict[tuple[str, bool], dict[str, list[str]]]:
    groups, _ = make_groups(rank, WORLD, TP, CP)
    found: dict[tuple[str, bool], dict[str, list[str]]] = {}
    for loss in ("clipped_pg", "nll", "dpo", "preference"):
        for packed in (False, True):
            found[loss, packed] = {}
            for mode in ("never", "auto", "always"):
                call = make_call(loss, {}, packed, groups)
                with validation(mode), recorded() as ops:
                    call.run()
                found[loss, packed][mode] = ops
    return found


def test_to_agree_costs_one_max_a_group_and_nothing_where_validation_is_off() -> None:
    for found in run_world(WORLD, collectives_by_mode, timeout=60):
        for (loss, packed), ops in found.items():
            assert ops["auto"] == ops["always"] == ["allreduce_ MAX"] * 2 + ops["never"], f"{loss} {packed}"
            assert not any("MAX" in op for op in ops["never"])


def differing(rank: int) -> list[str]:
    """Ranks whose batches are right each for itself and of different sizes."""
    groups, _ = make_groups(rank, WORLD, TP, CP)
    told = []
    for columns, rows in ((V // 2 + (rank == FAULTY), 4), (V // 2, 4 + 2 * (rank == FAULTY))):
        data = {
            "input_ids": torch.zeros(rows, 8, dtype=torch.int64),
            "token_mask": torch.ones(rows, 8),
            "sample_mask": torch.ones(rows),
        }
        logits = torch.zeros(rows, 8 // CP, columns)
        try:
            NLLLoss()(logits, data, torch.tensor(6), torch.tensor(42), None, groups.tensor, groups.context)
            told.append("nothing")
        except ValueError as error:
            told.append(str(error))
    return told


def test_ranks_that_differ_say_so() -> None:
    widths, rows = zip(*run_world(WORLD, differing, timeout=30), strict=True)
    assert set(widths) == {
        "rank 2, 3: the ranks of a group differ in the width of the vocabulary shard (without vocab_size): it is 5 on one "
        "and 6 on another"
    }
    assert set(rows) == {
        "rank 2, 3: the ranks of a group differ in the number of local tokens: it is 16 on one and 24 on another"
    }
