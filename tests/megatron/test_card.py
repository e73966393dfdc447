"""What a card would lose to without a word: groups made twice, what the host waits for, masks that nobody needs again."""

from __future__ import annotations

import weakref
from unittest import mock

import pytest
import torch

from parallel_rl.testing.pool import run_world
from tests.collectives import recorded
from tests.watch import Watch

pytest.importorskip("megatron.core")


def _groups(rank: int) -> list[bool]:
    from megatron.core import parallel_state

    from parallel_rl import megatron as M

    kept = []
    for sizes in ({"tp": 2}, {"tp": 2}, {"tp": 1, "cp": 2}, {"tp": 2}):
        before = parallel_state.get_context_parallel_group(check_initialized=False)
        M.initialize(**sizes)
        kept.append(parallel_state.get_context_parallel_group() is before)
    M.destroy()
    assert len(torch.distributed.distributed_c10d._world.pg_map) == 1, "only the default group is left"
    return kept


def test_groups_of_one_layout_are_made_once() -> None:
    """The gate's and the trainer's were two sets of NCCL communicators, some 100 MB each."""
    assert run_world(2, _groups) == [[False, True, False, False]] * 2


def _bounds(rank: int) -> tuple[bool, bool]:
    from parallel_rl import megatron as M

    M.initialize(cp=2 if torch.distributed.get_world_size() == 2 else 1)
    packed = M.packed_input(torch.zeros(2, 8, dtype=torch.int64), torch.tensor([0, 4, 12])).packed
    assert packed.cu_seqlens_q.tolist() == [0, 4, 12]
    return packed.cu_seqlens_q_padded is None, packed.cu_seqlens_kv_padded is None


def test_bounds_come_once_where_no_context_ranks_need_them_twice() -> None:
    """Transformer Engine up to 2.9 compares the two on the host, in every layer's forward."""
    assert run_world(1, _bounds) == [(True, True)] and run_world(2, _bounds) == [(False, False)] * 2


def _counted(rank: int) -> tuple[torch.dtype, list[str]]:
    from parallel_rl import NLLLoss, ParallelGroups, count_valid
    from parallel_rl import megatron as M
    from parallel_rl.config.architecture import Experts
    from parallel_rl.megatron.auxiliary import RoutedTokens

    M.initialize()
    config = M.build_config(num_layers=1, hidden_size=8, num_attention_heads=2, experts=Experts(2, 8), aux_loss=0.1)
    M.wrap_model(M.build_model(config, 8, 4))
    data = {name: torch.ones(2, 4, dtype=torch.int64, device="meta") for name in ("input_ids", "token_mask")}
    data["sample_mask"] = torch.ones(2, device="meta")
    routed = RoutedTokens(8, torch.zeros((), dtype=torch.int64, device="meta"))
    call = M.megatron_loss_func(
        NLLLoss(), data, *count_valid(data), config=config, num_microbatches=1, groups=ParallelGroups(), routed=routed
    )
    with Watch() as watch:
        _, here, _ = call(torch.zeros(2, 4, 8, device="meta", requires_grad=True))  # type: ignore[misc]
    M.destroy()
    return here.dtype, watch.syncs


def test_counting_routed_tokens_waits_for_nothing() -> None:
    """The callback of every micro-batch with auxiliary losses copied one number to the card, between loss and backward."""
    assert run_world(1, _counted) == [(torch.int, [])]


class _Engine(torch.nn.Module):
    """Transformer Engine's attention where Megatron started without context ranks: it was given no stream."""

    cp_group = cp_global_ranks = cp_stream = None
    cp_comm_type = "p2p"

    def __init__(self) -> None:
        super().__init__()
        self.ways: list[tuple[object, ...]] = []

    def set_context_parallel_group(self, *way: object) -> None:
        self.ways.append(way)


def _streams(rank: int) -> list[tuple[object, ...]]:
    from parallel_rl import megatron as M
    from parallel_rl.megatron import process_groups as context

    M.initialize()
    model = M.build_model(M.build_config(num_layers=1, hidden_size=8, num_attention_heads=2), 8, 4)
    model.engine = _Engine()
    with mock.patch.object(context, "_side", lambda: "a stream"):
        with context.context_group(model, torch.distributed.group.WORLD):
            pass
        with M.replicas([model]):
            pass
    M.destroy()
    return [way[1:] for way in model.engine.ways]


def test_attention_has_a_stream_on_a_micro_batch_s_own_context_group() -> None:
    """Ring attention waits for it: the first micro-batch on two ranks ended in an AttributeError of None."""
    alone = (None, None, "p2p")
    assert run_world(2, _streams) == [[([0, 1], "a stream", "p2p"), alone, alone, alone]] * 2


def test_masks_of_rows_that_are_done_are_dropped() -> None:
    """64 were kept: 17 GB at rows of 32,768 tokens and CP 4."""
    from parallel_rl.megatron.layers import _plan

    masks = []
    for length in range(16, 176, 16):
        [block] = _plan((0, length), (2, 0, "zigzag"), torch.device("cpu"))
        assert block.mask is not None and block.mask.shape == (length // 2, length)
        masks.append(weakref.ref(block.mask))
        del block
    assert sum(mask() is not None for mask in masks) <= 4


def _reduced(rank: int) -> list[tuple[list[str], list[float]]]:
    from megatron.core.distributed import param_and_grad_buffer

    from parallel_rl import megatron as M
    from parallel_rl.megatron import process_groups

    M.initialize()
    config = M.build_config(num_layers=1, hidden_size=8, num_attention_heads=2)
    model, found = M.wrap_model(M.build_model(config, 8, 4)), []
    coalesced = param_and_grad_buffer._coalescing_manager
    for one_by_one in (False, True):
        for buffer in model.buffers:
            buffer.grad_data.fill_(rank + 1.0)
        if one_by_one:
            process_groups.reduce_one_by_one()
        try:
            with recorded() as names:
                model.finish_grad_sync()
        finally:
            param_and_grad_buffer._coalescing_manager = coalesced
        found.append((names, [float(buffer.grad_data[0]) for buffer in model.buffers]))
    M.destroy()
    return found


def test_gradients_are_reduced_one_by_one_where_ranks_share_a_card() -> None:
    """Over gloo, which all-reduces tensors of a card, and refuses the same where torch has coalesced it."""
    for (coalesced, before), (names, after) in run_world(2, _reduced):
        assert coalesced == ["allreduce_coalesced_"] and names == ["allreduce_ SUM"]
        assert before == after == [3.0]  # a sum: 1 + 2
