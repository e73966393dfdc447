"""A Megatron loop with a loss of ours, on any layout: torchrun --nproc-per-node 4 examples/megatron_loop.py --tp 2 --cp 2

One process works too: torchrun --nproc-per-node 1 examples/megatron_loop.py. The printed losses are the same for
every --tp and --cp. Another data parallel rank adds its own sequences.
"""

import argparse
import os

import torch
import torch.distributed as dist

from parallel_rl import NLLLoss, ParallelGroups
from parallel_rl import megatron as m


def train(tp: int, cp: int, steps: int = 5) -> list[float]:
    """The loss of each step."""
    m.initialize(tp, cp)
    config = m.build_config(num_layers=2, hidden_size=64, num_attention_heads=4, sequence_parallel=tp > 1)
    model = m.wrap_model(m.build_model(config, vocab_size=64, max_sequence_length=32))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(ParallelGroups.from_megatron().dp_rank)
    ids = torch.randint(0, 64, (8, 32), generator=generator).to(next(model.parameters()).device)
    batches = [
        {"input_ids": rows, "token_mask": torch.ones_like(rows), "sample_mask": torch.ones_like(rows[:, 0])}
        for rows in ids.split(4)
    ]
    losses = []
    for step in range(steps):
        model.zero_grad_buffer()
        report = m.forward_backward(model, NLLLoss(vocab_size=64), batches)
        norm = m.grad_norm(model)
        m.copy_main_grads(model)
        optimizer.step()
        losses.append(report.floats()["loss"])
        if dist.get_rank() == 0:
            print(f"step {step}  loss {losses[-1]:.6f}  gradient norm {norm.item():.6f}")
    return losses


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--cp", type=int, default=1)
    sizes = parser.parse_args()
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    train(sizes.tp, sizes.cp)
    m.destroy()
    dist.destroy_process_group()
