"""Experts in a run: expert parallelism, with and without Megatron's distributed optimizer, is one process's run."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from parallel_rl.testing.pool import run_world
from tests.megatron.hf.golden import write_folder
from tests.training.helpers import assert_near, cut, train_rows
from tests.training.models.test_hf import arguments

pytest.importorskip("safetensors")

STEPS = 2
OPTIMIZER = {"lr": 1e-3, "clip": 0.05, "weight_decay": 0.1}  # it clips: the norm is over all experts


def exported(rank: int, given: list[str], runs: list[str]) -> list[dict[str, Tensor]]:
    """The tensors of the folder that the last checkpoint of each run gives."""
    from safetensors.torch import load_file

    from parallel_rl.training.checkpointing.export import export_checkpoint
    from parallel_rl.training.config.load import load_config

    found, config = [], load_config(given[0], given[1:])
    for run in map(Path, runs):
        export_checkpoint(run / f"checkpoints/step_{STEPS:06d}", run / "out", config)
        found.append(load_file(run / "out/model.safetensors"))
    return found


EXPERTS = {"expert": 2, "use_distributed_optimizer": True}
WAYS: list[tuple[str, int, dict[str, object]]] = [
    ("sharded", 1, {}),
    ("one", 2, EXPERTS),
    ("sharded", 2, {"expert": 2, "tensor": 2, "sequence_parallel": True, "expert_tensor": 1}),
    ("sharded", 2, {"use_distributed_optimizer": True}),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "rel", "ways"),
    [
        ("float32", 1e-6, WAYS),
        ("bfloat16", 5e-2, WAYS[2:3]),
    ],
)
def test_experts_on_two_ranks_are_one_process(
    dtype: str, rel: float, ways: list[tuple[str, int, dict[str, object]]], tmp_path: Path
) -> None:
    """Their own optimizer leaves no trace in a checkpoint: each layout goes on from the other's, to the same weights."""
    hf = write_folder("qwen3_moe", tmp_path / "qwen3_moe")

    def given(name: str, parallel: dict[str, object]) -> list[str]:
        more = {"run__dtype": dtype, "run__keep_checkpoints": 9, "rl__steps": STEPS, "rl__optimizer": OPTIMIZER}
        return arguments(tmp_path / name, hf, parallel=parallel, **more)

    [rows] = run_world(1, train_rows, given("one", {}))
    assert len(rows) == STEPS and min(row["grad_norm"] for row in rows) > OPTIMIZER["clip"]
    for found in run_world(2, train_rows, given("sharded", EXPERTS)):
        assert_near(found, rows, rel=rel, abs=1e-6)
    names = ["one", "sharded"]
    for number, (source, world, parallel) in enumerate(ways):
        names.append(f"stopped{number}")
        cut(tmp_path / source, tmp_path / names[-1], 1)
        for later in run_world(world, train_rows, given(names[-1], parallel)):
            assert_near(later, rows[1:], rel=max(rel, 1e-5), abs=1e-6)
    [weights] = run_world(1, exported, given("one", {}), [str(tmp_path / name) for name in names])
    for found in weights[1:]:
        assert found.keys() == weights[0].keys()
        for name, tensor in weights[0].items():
            torch.testing.assert_close(found[name], tensor, rtol=0, atol=rel)


def test_a_layout_that_gloo_cannot_run_is_refused_at_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its all-gather fails in the first forward, when a run has read its data and weights."""
    from parallel_rl.training.config.load import load_config
    from parallel_rl.training.models.engine import start_world

    hf = write_folder("qwen3_moe", tmp_path / "qwen3_moe")
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("PARALLEL_RL_BACKEND", "gloo")
    parallel = {"tensor": 2, "sequence_parallel": True, "expert": 2}
    path, *given = arguments(tmp_path / "run", hf, parallel=parallel)
    with pytest.raises(ValueError, match=r"parallel.expert = 2 with parallel.expert_tensor = 2 does not run over gloo"):
        start_world(load_config(path, given))
