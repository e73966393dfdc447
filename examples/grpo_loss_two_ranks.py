"""A GRPO loss from sharded logits on two ranks, against one process with all of them: python examples/grpo_loss_two_ranks.py

Each rank holds half of the vocabulary's columns. Nothing is gathered, and loss, metrics and gradients are those of the whole.
"""

import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from parallel_rl import (
    ClippedPGLossFn,
    ParallelGroups,
    count_valid,
    reduce_metrics,
    token_logprobs,
)
from parallel_rl.losses import ClippedPGLossConfig

B, S, V = 4, 12, 32


def batch() -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Logits [B, S, V] and the data of two prompts × two samples; the first five tokens of each row are the prompt."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(B, S, V, generator=generator)
    ids = torch.randint(0, V, (B, S), generator=generator)
    logprobs = token_logprobs(logits + 0.1 * torch.randn(B, S, V, generator=generator), {"input_ids": ids})
    return logits, {
        "input_ids": ids,
        "token_mask": (torch.arange(S) >= 5).float().expand(B, S),
        "sample_mask": torch.ones(B),
        "advantages": torch.tensor([1.0, -1.0, 0.5, -0.5])[:, None].expand(B, S),
        "prev_logprobs": logprobs,
        "generation_logprobs": logprobs,
        "reference_policy_logprobs": logprobs - 0.1,
    }


def main(rank: int, world_size: int, meeting: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=world_size)
    whole, data = batch()
    loss_fn = ClippedPGLossFn(ClippedPGLossConfig(ratio_clip_max=0.28, reference_policy_kl_penalty=0.05))
    counts = count_valid(data)

    expected = whole.clone().requires_grad_()
    expected_loss, _ = loss_fn(expected, data, *counts)
    expected_loss.backward()

    shard = whole.chunk(world_size, dim=-1)[rank].clone().requires_grad_()
    loss, metrics = loss_fn(shard, data, *counts, vocab_parallel_rank=rank, vocab_parallel_group=dist.group.WORLD)
    loss.backward()

    torch.testing.assert_close(loss, expected_loss)
    torch.testing.assert_close(shard.grad, expected.grad.chunk(world_size, dim=-1)[rank])
    if rank == 0:
        numbers = reduce_metrics([metrics], ParallelGroups(tensor=dist.group.WORLD))
        for name in ("loss", "kl_penalty", "probs_ratio", "clip_fraction_high", "entropy"):
            print(f"{name:>20} {numbers[name].item():10.6f}")
        print("loss and gradients equal those of one process")
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(main, args=(2, f"{folder}/meeting"), nprocs=2)
