"""What overlaps with a step belongs to the model that trains, and is over where its weights are read."""

from __future__ import annotations

from pathlib import Path

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


def _stepped(rank: int, overlap: bool, folder: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Weights under Hugging Face's names after an optimizer step over two data ranks, as they are exported and written."""
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from safetensors.torch import load_file

    import parallel_rl.megatron as M
    from parallel_rl import NLLLoss
    from parallel_rl.megatron.hf import export_tensors, save_hf

    M.initialize()
    wrapper = DistributedDataParallelConfig(
        use_distributed_optimizer=True, overlap_grad_reduce=overlap, overlap_param_gather=overlap
    )
    settings = OptimizerConfig(optimizer="adam", lr=0.1, clip_grad=0.0, use_distributed_optimizer=True)
    found = []
    for way in ("exported", "written"):
        model = M.wrap_model(M.build_model(M.build_config(**SIZES), 8, 4), ddp=wrapper)
        optimizer = get_megatron_optimizer(settings, [model])
        M.forward_backward(model, NLLLoss(vocab_size=8), [_rows(rank, seed=0)])
        optimizer.step()
        if way == "exported":
            found.append({name: tensor.clone() for name, tensor in export_tensors(model)})
        else:
            save_hf(model, folder)
            found.append(load_file(f"{folder}/model.safetensors"))
    M.destroy()
    return found[0], found[1]


def test_weights_leave_whole_though_the_next_forward_would_gather_them(tmp_path: Path) -> None:
    """Each rank has stepped its shards alone: half of what was written was of before the step, without a word."""
    plain, _ = run_world(2, _stepped, False, str(tmp_path / "plain"))[0]
    for exported, written in run_world(2, _stepped, True, str(tmp_path / "overlapped")):
        for name, want in plain.items():
            assert torch.equal(exported[name], want) and torch.equal(written[name], want), name
