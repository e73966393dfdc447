"""Logits that are a DTensor, as they are, and placements that make no sense."""

from __future__ import annotations

from functools import cache

import pytest
import torch
import torch.distributed as dist

from parallel_rl import LMHeadInput, NLLLoss, ParallelGroups, count_valid, token_logprobs
from parallel_rl.testing.batches import Sizes, make_batch
from parallel_rl.testing.cases import Batch, Case, alone, reduced_numbers, step_statistics
from parallel_rl.testing.pool import preload, run_world

preload(
    "parallel_rl.testing.cases", "tests.distributed.law", "tests.distributed.test_dtensor", "torch.distributed.tensor"
)

# a sequence of 13 is cut into 7 + 6, 23 words into 12 + 11; of a sequence of 9 the last of four ranks has nothing
SIZES = {(2, 2): Sizes(12, 13, 23), (4, 1): Sizes(12, 13, 25), (1, 4): Sizes(12, 9, 23)}


@cache
def cases() -> list[Case]:
    from tests.distributed import law

    return [case for case in law.CORE if case.loss not in ("value", "preference", "full_distillation", "prm")]


def batch_of(case: Case, sizes: Sizes) -> Batch:
    return make_batch(5, False, case.loss, torch.float64, sizes=sizes)


def _against_one_process(rank: int, tp: int, cp: int) -> list[str]:
    """What differs from one process, for each loss."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (cp, tp), mesh_dim_names=("cp", "tp"))
    groups = ParallelGroups.from_device_mesh(mesh, tensor="tp", context="cp")
    wrong = []
    for case in cases():
        batch = batch_of(case, SIZES[tp, cp])
        whole = batch.logits.clone().requires_grad_()
        want, metrics = alone(case, whole, batch.data)
        want.backward()
        logits = distribute_tensor(batch.logits, mesh, [Shard(1), Shard(-1)]).requires_grad_()
        loss_fn = case.build(cp_layout="contiguous", consume_logits=False)
        call = (logits, batch.data, *count_valid(batch.data), groups.tp_rank, groups.tensor, groups.context)
        loss, parts = loss_fn(*call, statistics=step_statistics([(loss_fn, call)], groups))
        loss.backward()
        total = loss.detach().clone()
        dist.all_reduce(total, group=mesh.get_group("cp"))
        pairs = {"loss": (total, want.detach()), "gradient": (logits.grad.full_tensor(), whole.grad)}
        numbers, truth = reduced_numbers([parts], groups), reduced_numbers([metrics])
        pairs |= {name: (torch.tensor(numbers[name]), torch.tensor(value)) for name, value in truth.items()}
        for name, (found, right) in pairs.items():
            if not torch.allclose(found, right, rtol=1e-9, atol=1e-12):
                wrong.append(f"{case.name}: {name}")
    batch = batch_of(Case("nll"), SIZES[tp, cp])
    logits = distribute_tensor(batch.logits, mesh, [Shard(1), Shard(-1)])
    found = token_logprobs(logits, batch.data, groups.tp_rank, groups.tensor, groups.context)
    if not torch.allclose(found, token_logprobs(batch.logits, batch.data), rtol=1e-9):
        wrong.append("token_logprobs")
    return wrong


@pytest.mark.slow
@pytest.mark.parametrize(("tp", "cp"), [(2, 2), (4, 1), (1, 4)])
def test_uneven_shards_of_words_and_of_the_sequence(tp: int, cp: int) -> None:
    assert run_world(4, _against_one_process, tp, cp, timeout=200) == [[]] * 4


def _beyond_the_vocabulary(rank: int) -> bool:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
    z = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(1))
    data = {"input_ids": torch.tensor([[0, 4, 2], [1, 3, 0]])}
    logits = distribute_tensor(z, mesh, [Shard(-1)])
    found = token_logprobs(logits, data, rank, mesh.get_group("tp"), vocab_size=5)
    return torch.allclose(found, token_logprobs(z, data, vocab_size=5))


def test_log_probs_beside_a_shard_of_padding_alone() -> None:
    """Its first column lies beyond the vocabulary, which was refused as a wrong `vocab_start`."""
    assert run_world(4, _beyond_the_vocabulary) == [True] * 4


def _truncated_and_given_up(rank: int) -> bool:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    case, group = Case("policy", {"surrogate": "reinforce"}, {"top_k": 5}), mesh.get_group("tp")
    batch = batch_of(case, SIZES[2, 2])
    whole = batch.logits.clone().requires_grad_()
    alone(case, whole, batch.data)[0].backward()
    logits = distribute_tensor(batch.logits, mesh, [Shard(-1)]).requires_grad_()
    loss_fn = case.build(cp_layout="contiguous", consume_logits=True)
    loss_fn(logits * 1, batch.data, *count_valid(batch.data), rank, group)[0].backward()
    assert whole.grad is not None and logits.grad is not None
    return torch.allclose(logits.grad.full_tensor(), whole.grad, rtol=1e-9, atol=1e-12)


def test_a_truncated_policy_of_logits_that_are_given_up() -> None:
    """Its forward wrote over the shard, which is a view: the backward then died of autograd's rules."""
    assert run_world(2, _truncated_and_given_up) == [True] * 2


def _refusals(rank: int) -> list[str]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "tp"))
    groups = ParallelGroups.from_device_mesh(mesh, tensor="tp", context="cp")
    data = {
        "input_ids": torch.zeros(2, 4, dtype=torch.int64),
        "token_mask": torch.ones(2, 4),
        "sample_mask": torch.ones(2),
    }
    z = torch.zeros(2, 4, 8)
    local = torch.zeros(2, 2, 4)

    def said(logits: object, tensor: object, context: object, cp_layout: str = "contiguous", **more: object) -> str:
        try:
            NLLLoss(cp_layout=cp_layout, **more)(logits, data, 2, 6, None, tensor, context)  # type: ignore[arg-type]
        except ValueError as error:
            return str(error)
        return "nothing"

    both = groups.tensor, groups.context
    partial = DTensor.from_local(local, mesh, [Shard(1), Partial()], run_check=False)
    found = [
        said(partial, *both),
        said(distribute_tensor(z, mesh, [Shard(1), Replicate()]), *both),
        said(distribute_tensor(z, mesh, [Replicate(), Shard(2)]), *both),
        said(distribute_tensor(z, mesh, [Shard(2), Shard(1)]), *both),
        said(distribute_tensor(z, mesh, [Shard(1), Shard(2)]), None, groups.context),
        said(distribute_tensor(z, mesh, [Shard(1), Shard(2)]), groups.tensor, None),
        said(distribute_tensor(z, mesh, [Shard(0), Shard(2)]), *both),
        said(distribute_tensor(z, mesh, [Shard(1), Shard(2)]), *both, cp_layout="zigzag"),
        said(distribute_tensor(z, mesh, [Shard(1), Shard(2)]), *both, vocab_size=9),
        said(distribute_tensor(z, mesh["tp"], [Shard(2)]), *both),
        said(distribute_tensor(z[0], mesh["tp"], [Shard(1)]), groups.tensor, None),
    ]
    hidden = distribute_tensor(torch.zeros(2, 4, 6), mesh["tp"], [Replicate()])
    found.append(said(LMHeadInput(hidden, torch.zeros(4, 6)), groups.tensor, None))  # type: ignore[arg-type]
    data["token_mask"] = distribute_tensor(torch.ones(2, 4), mesh["tp"], [Replicate()])
    found.append(said(distribute_tensor(z, mesh, [Shard(1), Shard(2)]), *both))
    return found


def test_placements_that_make_no_sense_are_refused_by_name() -> None:
    of_ranks = run_world(4, _refusals, timeout=60)
    assert of_ranks == [of_ranks[0]] * 4
    messages = (
        "over 'tp': sums that are not taken yet; redistribute them to Shard(-1) first",
        "over 'tp', the vocab_parallel_group, which needs Shard(-1)",
        "over 'cp', the context_parallel_group, which needs Shard(1)",
        "is not the vocab_parallel_group; take the groups of ParallelGroups.from_device_mesh(mesh, tensor='cp')",
        "is not the vocab_parallel_group; take the groups of ParallelGroups.from_device_mesh(mesh, tensor='tp')",
        "is not the context_parallel_group; take the groups of ParallelGroups.from_device_mesh(mesh, context='cp')",
        "over 'cp', the context_parallel_group, which needs Shard(1)",
        "cut into contiguous parts, not as cp_layout = 'zigzag' does",
        "vocab_size = 9 is more than the logits have, 8 over all tensor ranks",
        "the context_parallel_group is not a dimension of the logits' mesh (tp)",
        "got a DTensor [4, 8]",
        "hidden is a DTensor; give hidden.full_tensor()",
        "token_mask is a DTensor",
    )
    for said, message in zip(of_ranks[0], messages, strict=True):
        assert message in said, said
