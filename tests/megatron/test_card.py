"""What a card would lose to without a word: groups made twice, and bounds that the host waits for."""

from __future__ import annotations

import pytest
import torch

from parallel_rl.testing.pool import run_world
from tests.collectives import recorded

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
