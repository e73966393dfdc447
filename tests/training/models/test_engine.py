"""Where a run's ranks and their devices meet."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from parallel_rl.testing.pool import run_world
from parallel_rl.training.config.load import load_config
from parallel_rl.training.models import engine
from parallel_rl.training.models.engine import start_world
from tests.training.helpers import CONFIGS, assert_near, run, train_rows

pytest.importorskip("megatron.core")


@pytest.mark.parametrize(
    ("devices", "backend", "message"),
    [
        (
            1,
            None,
            "this machine has 1 GPU for 4 ranks, and NCCL takes one a GPU; start with torchrun --nproc-per-node 1",
        ),
        (3, "nccl", "this machine has 3 GPUs for 4 ranks"),
        (0, "nccl", "this machine has 0 GPUs for 4 ranks"),
        (8, "mpi", "PARALLEL_RL_BACKEND = 'mpi' is not valid; choose gloo or nccl"),
    ],
)
def test_fewer_devices_than_ranks(
    devices: int, backend: str | None, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 1 of four died of an invalid device ordinal on a workstation with one GPU, and said nothing else."""
    for name, value in (("WORLD_SIZE", "4"), ("LOCAL_WORLD_SIZE", "4"), ("LOCAL_RANK", "0"), ("RANK", "0")):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PARALLEL_RL_BACKEND", backend or "")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: devices > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: devices)
    with pytest.raises(ValueError, match=message):
        start_world(load_config(str(CONFIGS / "grpo_arithmetic.yaml")))


@pytest.mark.parametrize(("rank", "device"), [(0, 0), (3, 1)])
def test_ranks_share_a_gpu_through_gloo(rank: int, device: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four ranks on two cards: a layout may be tried where NCCL, which takes one rank a card, cannot start."""
    for name, value in (("WORLD_SIZE", "4"), ("LOCAL_WORLD_SIZE", "4"), ("LOCAL_RANK", str(rank)), ("RANK", str(rank))):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PARALLEL_RL_BACKEND", "gloo")
    chosen: list[object] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setattr(torch.distributed, "init_process_group", lambda backend, timeout: chosen.append(backend))
    monkeypatch.setattr(engine, "check_same_config", lambda config: None)  # there is no world
    start_world(load_config(str(CONFIGS / "grpo_arithmetic.yaml")))
    assert chosen == [device, "gloo"]


@pytest.mark.parametrize(
    ("parallel", "message"),
    [
        ("{pipeline: 2}", "parallel.pipeline = 2 does not run over gloo on GPUs"),
        ("{data: 4, overlap_grad_reduce: true}", "parallel.overlap_grad_reduce = True does not run over gloo on GPUs"),
    ],
)
def test_a_layout_that_gloo_cannot_run_on_a_gpu(parallel: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each would fail in the first step; over gloo among CPU ranks both run."""
    for name, value in (("WORLD_SIZE", "4"), ("LOCAL_WORLD_SIZE", "4"), ("LOCAL_RANK", "0"), ("RANK", "0")):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PARALLEL_RL_BACKEND", "gloo")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ValueError, match=message):
        start_world(load_config(str(CONFIGS / "grpo_arithmetic.yaml"), [f"--parallel={parallel}"]))


@pytest.mark.parametrize(
    ("card", "package", "dtype", "kind"),
    [
        (True, True, "bfloat16", "Transformer Engine"),
        (True, True, "float32", "Megatron's local layers"),
        (True, True, "float64", "Megatron's local layers"),
        (True, False, "bfloat16", "Megatron's local layers"),
        (False, True, "bfloat16", "Megatron's local layers"),
    ],
)
def test_the_layers_of_a_dtype(
    card: bool, package: bool, dtype: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine's attention takes no float32 under context parallelism; and its layers are part of a checkpoint's identity."""
    from parallel_rl.megatron import model_config
    from parallel_rl.training.checkpointing.contents import checkpoint_metadata
    from parallel_rl.training.session import TrainProgress

    monkeypatch.setattr(torch.cuda, "is_available", lambda: card)
    monkeypatch.setattr(model_config.importlib.util, "find_spec", lambda name: object() if package else None)
    monkeypatch.setattr(model_config, "_import_fault", lambda: None)
    config = load_config(str(CONFIGS / "grpo_arithmetic.yaml"), [f"--run.dtype={dtype}"])
    assert checkpoint_metadata(config, TrainProgress("rl", 0), {}).model["model.kind"] == kind
    assert model_config.has_transformer_engine(getattr(torch, dtype)) == (kind == "Transformer Engine")


def _recomputed(rank: int, arguments: list[str]) -> tuple[list[dict[str, float | int | str]], int]:
    """Rows of a run, and how often a layer or its core attention ran."""
    from unittest.mock import patch

    from megatron.core.transformer.transformer_layer import TransformerLayer

    import parallel_rl.megatron as M

    calls = []
    attend, forward = M.SelfAttentionCore.forward, TransformerLayer.forward
    with (
        patch.object(M.SelfAttentionCore, "forward", lambda self, *a, **k: (calls.append(1), attend(self, *a, **k))[1]),
        patch.object(TransformerLayer, "forward", lambda self, *a, **k: (calls.append(100), forward(self, *a, **k))[1]),
    ):
        return train_rows(rank, arguments), sum(calls)


@pytest.mark.slow
def test_recomputed_activations_give_the_same_rows(tmp_path: Path) -> None:
    """Each way of the config runs what it names once more in the backward, and nothing else."""
    shared = {
        "run__dtype": "float64",
        "model__layers": 3,
        "model__hidden": 16,
        "sft": "{steps: 2, batch_size: 8, optimizer: {lr: 3e-3}}",
        "batch__micro_batch_size": 8,
        "evaluation": "null",
        "data__held_out": "null",
        "parallel": "{}",
    }
    ways = {
        "null": 0,
        "{}": 3 * 101,
        "{method: block, num_layers: 1}": 101,
        "{method: uniform, num_layers: 3}": 3 * 101,
        "{granularity: selective}": 3,
        "{granularity: selective, modules: [mlp]}": 0,
    }
    outcomes = {}
    for number, way in enumerate(ways):
        more = {**shared, "run__dir": tmp_path / str(number), "model__recompute": way}
        [(rows, calls)] = run_world(1, _recomputed, run("sft_arithmetic.yaml", **more))
        outcomes[way] = rows, calls
    plain, least = outcomes["null"]
    assert len(plain) == 2
    for way, again in ways.items():
        rows, calls = outcomes[way]
        assert calls - least == 2 * again, way
        assert_near(rows, plain, rel=1e-12)


@pytest.mark.parametrize(
    ("way", "message"),
    [
        ("{granularity: selective, method: block}", "method = 'block' has no effect with granularity = 'selective'"),
        ("{modules: [mlp]}", r"modules = \('mlp',\) has no effect with granularity = 'full'"),
        ("{num_layers: 0}", "num_layers = 0 must be at least 1"),
        ("true", "model.recompute"),
    ],
)
def test_options_of_recompute_that_contradict_are_refused(way: str, message: str) -> None:
    given = run("sft_arithmetic.yaml", model__recompute=way)
    with pytest.raises(ValueError, match=message):
        load_config(given[0], given[1:])


def _given_another_config(rank: int, given: list[str]) -> str:
    with pytest.raises(ValueError, match="all ranks need one config") as refused:
        start_world(load_config(given[0], [*given[1:], "--rl.optimizer.lr=1e-4"] if rank else given[1:]))
    return str(refused.value)


def test_ranks_that_were_given_different_configs_are_refused() -> None:
    """An override that was forgotten on the second host: each data rank's weights went their own way, without a word."""
    for text in run_world(2, _given_another_config, run("grpo_arithmetic.yaml", parallel="{}")):
        assert text.startswith("rank 1: rl.optimizer.lr is 0.0001 on ") and " and 0.001 on rank 0" in text
