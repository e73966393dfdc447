"""Predicted bytes are those that a process takes, and those that others published."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from parallel_rl.plan.memory import BYTES_PER_LOGIT, Layout, loss_stages, states
from parallel_rl.plan.source import ModelShape

ROOT = Path(__file__).parents[2]
EAGER, FUSED = BYTES_PER_LOGIT
# each mode's peak resident bytes in a process of its own, forward and backward, as the kernel counts them
MEASURE = """
import json, sys, torch
from benchmarks.common import PeakMemory, return_freed_memory
from parallel_rl import linear_token_stats, token_stats
return_freed_memory()
torch.set_num_threads(1)
tokens, hidden, vocab = map(int, sys.argv[1:4])
dtype, budget = getattr(torch, sys.argv[4]), int(sys.argv[5]) or None
torch.manual_seed(0)
def step(mode, h, w, y):
    if mode.startswith("whole logits"):
        loss = token_stats(h @ w.T, y, consume_logits=mode.endswith("consumed")).logprobs.sum()
    else:
        loss = linear_token_stats(h, w, y, mode=mode, budget=budget, objective=lambda stats: stats.logprobs.sum()).loss
    loss.backward()
def peak(mode):
    peaks = []
    for _ in range(2):
        h = torch.randn(tokens, hidden).to(dtype).requires_grad_()
        w = (torch.randn(vocab, hidden) / 50).to(dtype).requires_grad_()
        y = torch.randint(vocab, (tokens,))
        memory = PeakMemory()
        step(mode, h, w, y)
        peaks.append(memory())
    return min(peaks)
print(json.dumps({mode: peak(mode) for mode in sys.argv[6:]}))
"""
FUSED_MODES = ("in_forward", "resident", "recompute")
WHOLE = ("whole logits, consumed", "whole logits")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "dtype", "budget", "modes"),
    [
        ((512, 64, 32768), torch.float32, 3 << 22, ("in_forward",)),
        ((2048, 64, 32768), torch.float32, 3 << 24, ("recompute",)),
        ((512, 128, 32768), torch.float32, None, FUSED_MODES + WHOLE),
        # a CPU's own bfloat16 product, of whole logits, takes scratch; the gradient of the hidden states, 3 MiB here, is
        # written at the end of recompute, and not resident before
        ((4096, 384, 16384), torch.bfloat16, None, FUSED_MODES),
    ],
)
def test_predicted_bytes_are_measured(
    shape: tuple[int, int, int], dtype: torch.dtype, budget: int | None, modes: tuple[str, ...]
) -> None:
    """Within 5 %, or the 3 MiB that a process takes for itself: a change of the head's buffers that the plan does not know of
    fails here. The slow ones multiply hundreds of MB, half a minute each.
    """
    tokens, hidden, vocab = shape
    numbers = [*map(str, shape), str(dtype).removeprefix("torch."), str(budget or 0)]
    command = [sys.executable, "-c", MEASURE, *numbers, *modes]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=True)
    measured = json.loads(done.stdout)
    stages = loss_stages(hidden, vocab, Layout(tokens, dtype=dtype, device="cpu", budget=budget))
    predicted = {stage.mode: stage.bytes for stage in stages if stage.mode in modes}
    assert predicted == pytest.approx(measured, rel=0.05, abs=3 << 20)


@pytest.mark.parametrize(
    ("name", "columns", "published"),
    [(EAGER, 62080, 11.7), (FUSED, 62080, 19.3)],
)  # fmt: skip
def test_bytes_that_skyrl_published(name: str, columns: int, published: float) -> None:
    """SkyRL's pull request 1841, 32k tokens on a B300: GiB of the loss stage with the head's weight and its input."""
    tokens, hidden = 32768, 2048
    stage = next(stage for stage in loss_stages(hidden, columns, Layout(tokens)) if stage.mode == name)
    assert round((stage.bytes + 2 * hidden * (tokens + columns)) / 2**30, 1) == published


@pytest.mark.parametrize(
    ("name", "vocab", "tensor", "published"),
    [(EAGER, 131072, 1, 8192), (FUSED, 131072, 1, 12288), (EAGER, 32768, 8, 256), (FUSED, 32768, 8, 384)],
)
def test_bytes_that_liger_published(name: str, vocab: int, tensor: int, published: int) -> None:
    """Liger's table for an H100, 8192 tokens: MiB, with the logits that the benchmark holds besides."""
    stage = next(stage for stage in loss_stages(4096, vocab, Layout(8192, tensor=tensor)) if stage.mode == name)
    assert (stage.bytes + 2 * 8192 * vocab // tensor) / 2**20 == published


def test_states_are_split_as_megatron_splits_them() -> None:
    """Llama-3 8B in bfloat16: 2 + 4 + 12 bytes a weight on one rank, Adam's part over data ranks, layers over stages."""
    model = ModelShape(32, 4096, 32, 8, 128, 14336, 128256)
    one = states(model, Layout(8192))
    assert sum(one.values()) == 18 * 8_030_261_248
    assert states(model, Layout(8192, data=4))["optimizer"] == 3 * 8_030_261_248
    assert states(model, Layout(8192, data=4, distributed_optimizer=False)) == one
    last = states(model, Layout(8192, pipeline=4))["weights"]
    assert last == 2 * (8 * (model.attention + model.mlp + model.replicated) + model.embedding + model.hidden)
    assert states(model, Layout(8192, frozen=2))["frozen models"] == 2 * one["weights"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tensor": 3}, "heads = 32 is not divisible by 3 ranks"),
        ({"pipeline": 5}, "layers = 32 is not divisible by 5 ranks"),
    ],
)
def test_layouts_that_do_not_fit_a_model(change: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        states(ModelShape(32, 4096, 32, 8, 128, 14336, 128256), Layout(8192, **change))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokens": 0}, "tokens = 0 must be at least 1"),
        ({"tokens": 100, "context": 8}, "tokens = 100 is not divisible by the 8 ranks"),
        ({"tokens": 8, "frozen": -1}, "frozen = -1 must be at least 0"),
    ],
)
def test_bad_layouts(change: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Layout(**change)
