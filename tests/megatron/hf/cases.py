"""What the ranks of a world do with a folder: logits, exported tensors, a written folder."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from tests.megatron.hf.golden import logits, tokens, weights

BOUND = 2e-6  # of float32 logits of about 0.6


@dataclass(frozen=True)
class Layout:
    """Sizes of the parallel dimensions; the tests' worlds are as large as these ask for."""

    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int = 1
    virtual_pp: int | None = None
    sp: bool = False

    @property
    def world(self) -> int:
        return max(self.tp * self.pp * self.cp, self.etp * self.ep * self.pp)

    @property
    def runs(self) -> bool:
        """Whether gloo can run it: its gathers have one length, those of the tokens of shared experts have many."""
        return self.ep == 1 or self.etp == 1


@contextlib.contextmanager
def layout(sizes: Layout) -> Iterator[None]:
    from parallel_rl import megatron as M

    M.initialize(sizes.tp, sizes.cp, sizes.pp, ep=sizes.ep, etp=sizes.etp, virtual_pp=sizes.virtual_pp)
    try:
        yield
    finally:
        M.destroy()


def whole_logits(models: list[torch.nn.Module]) -> Tensor:
    """[B, S, V_padded] of the golden tokens, on every rank."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region

    from parallel_rl import megatron as M

    ids = tokens()
    for model in models:
        model.eval()
    batch = M.padded_input(ids)

    def collect(output: Tensor, index: int) -> Tensor:
        whole = gather_from_tensor_model_parallel_region(output).flatten(0, 1)
        found = batch.layout.unshard(whole, parallel_state.get_context_parallel_group(), shift=False)
        return found.view(*ids.shape, -1)

    # an interleaved schedule wants as many micro-batches as there are stages
    count = parallel_state.get_pipeline_model_parallel_world_size() if len(models) > 1 else 1
    found = M.forward_only(
        M.forward_logits, models, [batch] * count, collect, seq_length=ids.shape[1], micro_batch_size=len(ids)
    )
    return M.broadcast_from_last_stage(None if found is None else found[0])


def apart(found: Tensor, name: str) -> float:
    """The largest difference from transformers' logits; vocabulary padding stands behind them."""
    right = logits(name)
    return float((found[..., : right.shape[-1]] - right).abs().max())


def round_trip(rank: int, folders: list[tuple[str, str]], out: str, layouts: list[Layout]) -> list[str]:
    """What is wrong with the logits, the exported tensors and what was read, of each (case, folder) on each layout.

    Every rank writes its part of each folder to `out`/NAME/NUMBER OF THE LAYOUT.
    """
    from parallel_rl.megatron.hf import export_tensors, folder, load_hf, save_hf

    read: list[int] = []
    rows = folder.Reader.rows

    def counted(*args: object) -> Tensor:
        found: Tensor = rows(*args)
        read.append(found.numel())
        return found

    folder.Reader.rows = counted
    wrong = []
    try:
        for number, sizes in enumerate(layouts):
            with layout(sizes):
                for name, path in folders:
                    read.clear()
                    models = load_hf(path, sequence_parallel=sizes.sp)
                    held = sum(parameter.numel() for model in models for parameter in model.parameters())
                    if not 0.9 * held < sum(read) <= held:  # less by the padding of the vocabulary
                        wrong.append(f"{name} {sizes}: read {sum(read)} numbers for {held}")
                    if sizes.runs and (off := apart(whole_logits(models), name)) > BOUND:
                        wrong.append(f"{name} {sizes}: logits off by {off}")
                    # compared as they come: nobody keeps them
                    left = dict(weights(name))
                    for key, tensor in export_tensors(models):
                        if not torch.equal(tensor, left.pop(key)):
                            wrong.append(f"{name} {sizes}: {key} is not what was read")
                    wrong += [f"{name} {sizes}: {key} was not exported" for key in left]
                    save_hf(models, Path(out) / name / str(number), max_file_bytes=50_000)
    finally:
        folder.Reader.rows = rows
    return wrong
