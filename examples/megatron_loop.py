"""A Megatron loop with a loss of ours, on any layout: torchrun --nproc-per-node 4 examples/megatron_loop.py --tp 2 --cp 2

One process works too: torchrun --nproc-per-node 1 examples/megatron_loop.py. The printed losses are the same for every
--tp and --cp; a further data parallel rank brings sequences of its own.
"""

import argparse
import os

import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel import get_forward_backward_func

from parallel_rl import NLLLoss, ParallelGroups, count_valid, reduce_metrics
from parallel_rl import megatron as m

parser = argparse.ArgumentParser()
parser.add_argument("--tp", type=int, default=1)
parser.add_argument("--cp", type=int, default=1)
sizes = parser.parse_args()

if torch.cuda.is_available():
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
m.initialize(sizes.tp, sizes.cp)
config = m.build_config(num_layers=2, hidden_size=64, num_attention_heads=4, sequence_parallel=sizes.tp > 1)
model = m.wrap_model(m.build_model(config, vocab_size=64, max_sequence_length=32))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
groups, device = ParallelGroups.from_megatron(), next(model.parameters()).device

ids = torch.randint(0, 64, (8, 32), generator=torch.Generator().manual_seed(groups.dp_rank)).to(device)
batches = [
    {
        "input_ids": rows,
        "token_mask": torch.ones_like(rows, dtype=torch.float32),
        "sample_mask": torch.ones(len(rows), device=device),
    }
    for rows in ids.split(4)
]


def forward_step(iterator, model):
    data = next(iterator)
    loss_func = m.megatron_loss_func(
        NLLLoss(vocab_size=64), data, *counts, config=config, num_microbatches=len(batches)
    )
    return m.forward_logits(model, m.padded_input(data["input_ids"])), loss_func


for step in range(5):
    counts = count_valid(batches, groups.data)
    model.zero_grad_buffer()
    reports = get_forward_backward_func()(
        forward_step_func=forward_step, data_iterator=iter(batches), model=[model], num_microbatches=len(batches),
        seq_length=32, micro_batch_size=4, forward_only=False,
    )  # fmt: skip
    for parameter in model.parameters():
        parameter.grad = parameter.main_grad
    optimizer.step()
    metrics = reduce_metrics([report["metrics"] for report in reports], groups)
    if dist.get_rank() == 0:
        print(f"step {step}  loss {metrics['loss'].item():.6f}  gradient norm {m.grad_norm([model]).item():.6f}")
    else:
        m.grad_norm([model])
dist.destroy_process_group()
