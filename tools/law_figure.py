"""Draw docs/law.png: the loss of one GRPO step on many layouts, by local means and by `parallel_rl`.

    python -m tools.law_figure

Both see the same eight responses of 1 to 40 tokens. A loss by "local means" divides by the tokens that it happens to hold and
is averaged over ranks and micro-batches, as data parallelism and gradient accumulation do.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from parallel_rl import ClippedPGLossFn, ParallelGroups, SequenceLayout, count_valid

FILE = Path(__file__).parents[1] / "docs" / "law.png"
B, S, V, PROMPT = 8, 48, 64, 8
WORLD = 4


class Layout(NamedTuple):
    """Ranks along each dimension, and micro-batches a data rank."""

    tp: int = 1
    cp: int = 1
    dp: int = 1
    micro_batches: int = 1

    def __str__(self) -> str:
        sizes = {"TP": self.tp, "CP": self.cp, "DP": self.dp, "micro-batches": self.micro_batches}
        return " · ".join(f"{name} {size}" for name, size in sizes.items() if size > 1) or "one process"


LAYOUTS = (
    Layout(),
    Layout(tp=2),
    Layout(tp=4),
    Layout(cp=2),
    Layout(cp=4),
    Layout(dp=2),
    Layout(dp=4),
    Layout(micro_batches=2),
    Layout(micro_batches=4),
    Layout(micro_batches=8),
    Layout(tp=2, cp=2),
    Layout(cp=2, dp=2, micro_batches=2),
)


class Losses(NamedTuple):
    """The loss of the whole step: as `parallel_rl` gives it, and as a mean of local means."""

    ours: float
    local_means: float


def step() -> tuple[Tensor, dict[str, Tensor]]:
    """Logits [B, S, V] of eight sequences, and what GRPO reads beside them; long answers are the wrong ones."""
    generator = torch.Generator().manual_seed(0)
    responses = torch.tensor([1, 2, 3, 5, 8, 13, 28, 40])
    advantages = torch.tensor([1.5, 1.0, 1.2, 0.5, -0.2, -0.8, -1.2, -2.0])
    column = torch.arange(S)
    data = {
        "input_ids": torch.randint(V, (B, S), generator=generator),
        "token_mask": ((column >= PROMPT) & (column < PROMPT + responses[:, None])).double(),
        "sample_mask": torch.ones(B),
        "advantages": advantages.double()[:, None].expand(B, S),
        "prev_logprobs": -4.0 + torch.randn(B, S, generator=generator, dtype=torch.float64),
    }
    data["generation_logprobs"] = data["prev_logprobs"]
    return torch.randn(B, S, V, generator=generator, dtype=torch.float64), data


def losses_on(layout: Layout) -> Losses:
    """The step's loss on a layout, both ways; every rank of a world of four calls it."""
    names = ("copies", "data", "context", "tensor")
    copies = WORLD // (layout.tp * layout.cp * layout.dp)
    mesh = init_device_mesh("cpu", (copies, layout.dp, layout.cp, layout.tp), mesh_dim_names=names)
    groups = ParallelGroups.from_device_mesh(mesh, tensor="tensor", context="context", data="data")
    logits, data = step()
    rows = torch.arange(B).chunk(layout.dp)[groups.dp_rank].chunk(layout.micro_batches)
    batches = [{name: x[part] for name, x in data.items()} for part in rows]
    counts = count_valid(batches, groups.data)
    loss_fn = ClippedPGLossFn({"reference_policy_kl_penalty": 0.0, "ratio_clip_max": 0.28})
    ours = means = torch.zeros((), dtype=torch.float64)
    for part, batch in zip(rows, batches, strict=True):
        place = SequenceLayout.padded(len(part), S, cp_size=groups.cp_size, cp_rank=groups.cp_rank)
        columns = place.shard(torch.arange(S).expand(len(part), S), shift=False).view(place.local_shape)
        local = logits[part].gather(1, columns[..., None].expand(-1, -1, V)).chunk(layout.tp, -1)[groups.tp_rank]
        share, _ = loss_fn(local, batch, *counts, groups.tp_rank, groups.tensor, groups.context)
        held = place.shard(batch["token_mask"]).sum().clamp(min=1)
        ours, means = ours + share, means + share * counts.toks / held / (layout.micro_batches * layout.cp * layout.dp)
    total = torch.stack([ours, means])
    for group in (groups.context, groups.data):
        dist.all_reduce(total, group=group)
    return Losses(*total.tolist())


def all_losses(rank: int) -> dict[Layout, Losses]:
    """Every layout of the figure, on a world of four."""
    return {layout: losses_on(layout) for layout in LAYOUTS}


def draw(found: dict[Layout, Losses], file: Path) -> None:
    """One point a layout for each way, and the loss that one process computes as a line."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(9, 3.6), layout="constrained")
    places = range(len(found))
    axes.axhline(found[Layout()].ours, color="0.6", linewidth=1)
    axes.plot(places, [x.local_means for x in found.values()], "s", color="tab:orange", label="local means")
    axes.plot(places, [x.ours for x in found.values()], "o", color="tab:blue", label="parallel_rl")
    axes.set_xticks(places, [str(layout).replace(" · ", "\n") for layout in found], rotation=35, ha="right", fontsize=8)
    axes.set_ylabel("loss of the step")
    axes.set_title("One GRPO step, the same data and weights, on twelve layouts", fontsize=10)
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(file, dpi=120)


def _main(rank: int, meeting: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=WORLD)
    found = all_losses(rank)
    if rank == 0:
        for layout, (ours, means) in found.items():
            print(f"{layout!s:>32}  parallel_rl {ours:.12f}   local means {means:.4f}")
        draw(found, FILE)
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_main, args=(f"{folder}/meeting",), nprocs=WORLD)
