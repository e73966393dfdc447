"""Training under torch's own FSDP2 and tensor parallelism: its average over data ranks undone, DTensor logits as they are."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from parallel_rl import DPOLossFn, ParallelGroups, PolicyLossFn, count_valid
from parallel_rl.hosts.scaling import averaged
from parallel_rl.testing.pool import preload, run_world

preload("torch.distributed.tensor", "torch.distributed.fsdp")

VOCAB, WIDTH, ROWS = 31, 12, 8  # 31 words over two tensor ranks: 16 + 15


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(16)
        self.q, self.k, self.v, self.o = (nn.Linear(16, 16, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(16, 32, bias=False), nn.Linear(32, 16, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        q, k, v = (part(y).unflatten(-1, (-1, 4)).transpose(1, 2) for part in (self.q, self.k, self.v))
        x = x + self.o(nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.silu(self.up(x)))


class Model(nn.Module):
    """A decoder in the shape of Hugging Face's."""

    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens, self.layers = nn.Embedding(VOCAB, 16), nn.ModuleList(Block() for _ in range(2))
        self.norm, self.lm_head = nn.RMSNorm(16), nn.Linear(16, VOCAB, bias=False)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed_tokens(input_ids)
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(self.norm(x))


def _data() -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(2)
    mask = torch.rand(ROWS, WIDTH, generator=g) > 0.3
    mask[4:6] = False  # one data rank's first micro-batch carries nothing
    random = torch.randn(3, ROWS, WIDTH, generator=g, dtype=torch.float64)
    return {
        "input_ids": torch.randint(0, VOCAB, (ROWS, WIDTH), generator=g),
        "token_mask": mask,
        "sample_mask": torch.ones(ROWS),
        "advantages": random[0],
        "prev_logprobs": random[1] * 0.1 - 3.4,
        "reference_policy_logprobs": random[2] * 0.1 - 3.4,
    }


def _train(rank: int, tp: int, name: str) -> list[dict[str, Tensor]]:
    """Losses, and every gradient whole, of two steps of SGD with two micro-batches a data rank."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    torch.manual_seed(0)
    model, world = Model().double(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world // tp, tp), mesh_dim_names=("dp", "tp"))
    groups = ParallelGroups.from_device_mesh(mesh, tensor="tp", data="dp")
    if world > 1:
        columns, rows = ColwiseParallel, RowwiseParallel
        for layer in model.layers:
            plan = {"q": columns(), "k": columns(), "v": columns(), "up": columns(), "o": rows(), "down": rows()}
            parallelize_module(layer, mesh["tp"], plan)
            fully_shard(layer, mesh=mesh["dp"])
        head = ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
        parallelize_module(model, mesh["tp"], {"lm_head": head})
        fully_shard(model, mesh=mesh["dp"])
    options = {"grpo": {"surrogate": {"name": "ppo"}}, "dpo": {"reference_policy_kl_penalty": 0.1}}[name]
    loss_fn = {"grpo": PolicyLossFn, "dpo": DPOLossFn}[name](options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    size = ROWS // groups.dp_size
    mine = {key: field[groups.dp_rank * size :][:size] for key, field in _data().items()}
    batches = [{key: field[start : start + size // 2] for key, field in mine.items()} for start in (0, size // 2)]
    counts, steps = count_valid(batches, groups.data), []
    for _ in range(2):
        optimizer.zero_grad()
        total = torch.zeros((), dtype=torch.float64)
        for batch in batches:
            loss, _ = loss_fn(model(batch["input_ids"]), batch, *counts, groups.tp_rank, groups.tensor)
            averaged(loss, groups.dp_size).backward()
            total += loss.detach()
        dist.all_reduce(total, group=groups.data)
        grads = {key: parameter.grad for key, parameter in model.named_parameters()}
        whole = {key: grad.full_tensor() if hasattr(grad, "full_tensor") else grad for key, grad in grads.items()}
        steps.append({"loss": total, **{key: grad.clone() for key, grad in whole.items()}})
        optimizer.step()
    return steps


@pytest.mark.parametrize("name", ["grpo", pytest.param("dpo", marks=pytest.mark.slow)])
def test_two_tensor_ranks_and_two_shards_train_as_one_process(name: str) -> None:
    """A data rank without a valid token in a micro-batch, an uneven vocabulary, and two steps, so that an error grows."""
    [want] = run_world(1, _train, 1, name)
    for found in run_world(4, _train, 2, name):
        for step, of_one in zip(found, want, strict=True):
            for key, value in of_one.items():
                assert torch.allclose(step[key], value, rtol=1e-9, atol=1e-12), key
