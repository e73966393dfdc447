"""A loop in the style of Megatron-LM, of megatron-core alone: torchrun --nproc-per-node 2 examples/pretrain/gpt.py --tp 2

Beside it lie the same loop as GRPO and as DPO; docs/pretrain.md has the difference.
"""

import argparse
import os
from functools import partial

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.num_microbatches_calculator import get_num_microbatches, init_num_microbatches_calculator
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.transformer_config import TransformerConfig

VOCAB, LENGTH, ROWS, ROWS_OF_A_STEP = 64, 16, 2, 8


def model_provider(tp):
    """This rank's part of a small GPT."""
    config = TransformerConfig(
        num_layers=2,
        hidden_size=32,
        num_attention_heads=4,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=tp,
        use_cpu_initialization=not torch.cuda.is_available(),
        calculate_per_token_loss=True,
    )
    return GPTModel(config, get_gpt_layer_local_spec(), VOCAB, LENGTH, parallel_output=True)


def batches():
    """Micro-batches without end, those of this data rank."""
    generator = torch.Generator().manual_seed(1)
    rank, size = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    places = torch.arange(LENGTH, device=device).expand(ROWS, LENGTH)
    hidden = torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool, device=device).triu(1)
    while True:
        step = torch.randint(0, VOCAB, (ROWS_OF_A_STEP, LENGTH), generator=generator).to(device)
        for tokens in step.split(ROWS)[rank::size]:
            labels = tokens.roll(-1, dims=1)
            loss_mask = (places < LENGTH - 1).float()
            yield {
                "tokens": tokens,
                "labels": labels,
                "loss_mask": loss_mask,
                "position_ids": places,
                "attention_mask": hidden,
            }


def loss_func(loss_mask, losses):
    """The sum over tokens, their number, and both for the log."""
    total, tokens = (losses.float() * loss_mask).sum(), loss_mask.sum().int()
    return total, tokens, {"loss": torch.stack([total.detach(), tokens.float()])}


def forward_step(data_iterator, model):
    """One micro-batch."""
    batch = next(data_iterator)
    losses = model(batch["tokens"], batch["position_ids"], batch["attention_mask"], labels=batch["labels"])
    return losses, partial(loss_func, batch["loss_mask"])


def train_step(data_iterator, model, optimizer):
    """One step of the optimizer, and its log: sums of pairs over micro-batches and data ranks, divided."""
    model.zero_grad_buffer()
    optimizer.zero_grad()
    reports = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=data_iterator,
        model=[model],
        num_microbatches=get_num_microbatches(),
        seq_length=LENGTH,
        micro_batch_size=ROWS,
        forward_only=False,
    )
    _, norm, _ = optimizer.step()
    logged = {}
    for name in reports[0]:
        pair = torch.stack([report[name] for report in reports]).sum(0)
        dist.all_reduce(pair, group=parallel_state.get_data_parallel_group(with_context_parallel=True))
        logged[name] = (pair[0] / pair[1]).item()
    return {**logged, "gradient norm": float(norm)}


def train(tp, steps=3):
    """The logs of some steps."""
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=tp)
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    torch.manual_seed(1)
    data_ranks = parallel_state.get_data_parallel_world_size()
    init_num_microbatches_calculator(dist.get_rank(), None, ROWS_OF_A_STEP, ROWS, data_ranks)
    module = model_provider(tp)
    if torch.cuda.is_available():
        module.cuda()
    model = DistributedDataParallel(module.config, DistributedDataParallelConfig(), module)
    module.config.finalize_model_grads_func = finalize_model_grads
    optimizer = get_megatron_optimizer(OptimizerConfig(optimizer="adam", lr=1e-3), [model])
    data_iterator, logs = batches(), []
    for _ in range(steps):
        logs.append(train_step(data_iterator, model, optimizer))
        if dist.get_rank() == 0:
            print("  ".join(f"{name} {value:.5f}" for name, value in logs[-1].items()))
    return logs


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--tp", type=int, default=1)
    sizes = parser.parse_args()
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    else:
        from parallel_rl.megatron import enable_cpu  # megatron-core by itself asks for CUDA

        enable_cpu()
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    train(sizes.tp)
    dist.destroy_process_group()
