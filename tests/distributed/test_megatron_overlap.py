"""Reductions that overlap with the backward do so for the model that trains, whatever else stands beside it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from parallel_rl.testing.pool import preload, run_world

pytest.importorskip("megatron.core")
preload("parallel_rl.megatron")

SIZES = {"num_layers": 1, "hidden_size": 16, "num_attention_heads": 2}


def _rows(rank: int, seed: int) -> dict[str, Tensor]:
    ids = torch.randint(0, 8, (1, 4), generator=torch.Generator().manual_seed(10 * seed + rank))
    return {"input_ids": ids, "token_mask": torch.ones(1, 4), "sample_mask": torch.ones(1)}


def _beside_a_critic(rank: int, overlap: bool) -> list[Tensor]:
    """The gradients of steps of two and of three micro-batches, of a policy whose config a critic has, too."""
    from megatron.core.distributed import DistributedDataParallelConfig

    import parallel_rl.megatron as M
    from parallel_rl import NLLLoss

    M.initialize()
    config = M.build_config(**SIZES)
    policy, _ = (
        M.wrap_model(
            M.build_model(config, 8, 4, scalar_head=critic),
            ddp=DistributedDataParallelConfig(overlap_grad_reduce=overlap),
        )
        for critic in (False, True)
    )
    gradients = []
    for count in (2, 3):
        policy.zero_grad_buffer()
        M.forward_backward(policy, NLLLoss(vocab_size=8), [_rows(rank, seed) for seed in range(count)])
        gradients.append(torch.cat([buffer.grad_data.clone() for buffer in policy.buffers]))
    M.destroy()
    return gradients


def test_a_policy_that_shares_its_config_with_a_critic_gets_its_own_gradient() -> None:
    """The critic's `no_sync` held back nothing of the policy's: its gradients went out before the last micro-batch had come."""
    for found, want in zip(run_world(2, _beside_a_critic, True), run_world(2, _beside_a_critic, False), strict=True):
        for overlapped, plain in zip(found, want, strict=True):
            assert (overlapped - plain).norm() < 1e-6 * plain.norm()
