"""The gate finds what would break the first step of a pipeline; its other tests are in tests/test_slurm_scripts.py."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from unittest import mock

import pytest
import torch.distributed as dist

from parallel_rl.testing.pool import WorldError, run_world
from parallel_rl.training.config.sections import ParallelConfig
from tests.forked import run_ranks
from tests.training.helpers import CONFIGS


def _check_groups(rank: int, config: ParallelConfig, garbles: int | None) -> None:
    from parallel_rl.training.preflight import gate

    together = dist.batch_isend_irecv

    def garbled(ways: Sequence[dist.P2POp]) -> list[dist.Work]:
        for way in ways:
            if way.op is dist.isend and way.peer == 3:
                way.tensor[-1] += 1
        return together(list(ways))

    with mock.patch.object(dist, "batch_isend_irecv", garbled if rank == garbles else together):
        gate.check_groups(config)


def test_a_pair_of_pipeline_neighbours_that_garbles_is_named() -> None:
    for pipeline in (2, 4):
        run_world(4, _check_groups, ParallelConfig(pipeline=pipeline), None)
    with pytest.raises(WorldError) as failure:  # on the way from rank 2 to rank 3 only
        run_world(4, _check_groups, ParallelConfig(pipeline=4), 2)
    assert sorted(failure.value.errors) == [0, 1, 2, 3]
    for error in failure.value.errors.values():
        assert error.endswith("rank 3: RuntimeError: rank 3 received wrong numbers from its pipeline neighbour rank 2")


def _silent(config: list[str]) -> None:
    """Pass the gate of a run, where nothing that rank 1 sends to its neighbour leaves."""
    from parallel_rl.training.config.load import load_config
    from parallel_rl.training.preflight.gate import pass_gate

    if os.environ["RANK"] == "1":
        together = dist.batch_isend_irecv
        dist.batch_isend_irecv = lambda ways: together(ways[1:])
    pass_gate(load_config(config[0], config[1:]), 15.0)


@pytest.mark.slow
def test_a_pair_that_stands_still_is_named_when_the_gate_closes(tmp_path: Path) -> None:
    """Takes 15 seconds, in which two ranks come up on a busy machine."""
    config = [str(CONFIGS / "sft_arithmetic.yaml"), "--parallel={pipeline: 2}", f"--run.dir={tmp_path / 'run'}"]
    done = run_ranks(tmp_path, _silent, config)
    assert 0 not in done.statuses
    for rank, neighbour in ((0, 1), (1, 0)):  # the one whose time is up first lets the other speak
        assert (
            f"(rank {rank}): the groups were not checked in 15 s: rank 0, 1 hang; this rank was exchanging with rank "
            f"{neighbour}, its neighbour in the pipeline"
        ) in done.stderr, done.stderr[-4000:]
    assert not (tmp_path / "run").exists()


LAYOUTS = [
    (4, ["--parallel={tensor: 2, context: 2}", "--batch={packing: true, share_prefixes: true, micro_batch_size: 4}"]),
    (4, ["--parallel={context: 2, pipeline: 2}", "--batch={packing: true, micro_batch_size: 4}"]),
    (
        2,
        [
            "--parallel={tensor: 2}",
            "--model.fused_head=true",
            "--sampling={top_k: 9}",
            "--rl.loss={name: policy}",
            "--batch={packing: true, share_prefixes: true, micro_batch_size: 4}",
        ],
    ),
]
LOCAL = "--rl.loss={name: doc_local_mean}"


def _losses(rank: int, overrides: list[str]) -> tuple[list[str], bool]:
    """The losses that passed, and whether the model's groups are those of the gate."""
    from megatron.core import parallel_state

    from parallel_rl.megatron import initialize
    from parallel_rl.training.config.load import load_config
    from parallel_rl.training.preflight.gate import check_groups, check_losses
    from tests.training.preflight import local_loss  # noqa: F401  # registers doc_local_mean, as --import does

    config = load_config(str(CONFIGS / "grpo_arithmetic.yaml"), overrides)
    check_groups(config.parallel, config.run.seed, config.run.timeout)
    names, group = check_losses(config), parallel_state.get_tensor_model_parallel_group()
    sizes = config.parallel
    initialize(sizes.tensor, sizes.context, sizes.pipeline, seed=config.run.seed, timeout=config.run.timeout)
    return names, parallel_state.get_tensor_model_parallel_group() is group


@pytest.mark.parametrize(
    ("world", "overrides"),
    [LAYOUTS[0], *(pytest.param(*layout, marks=pytest.mark.slow) for layout in LAYOUTS[1:])],
    ids=["tensor, context, trees", "pipeline, packed", "fused head, truncated, trees"],
)
def test_the_losses_of_a_run_pass_on_its_groups_which_it_keeps(world: int, overrides: list[str]) -> None:
    """A second set of groups would be a second set of NCCL communicators."""
    for names, kept in run_world(world, _losses, overrides):
        assert names[1:] == ["nll"] and names[0] in ("clipped_pg", "policy") and kept


def test_a_run_whose_own_loss_has_a_local_denominator_is_refused() -> None:
    """The gate once looked at a loss of its own and let this run train on other numbers than one process has."""
    with pytest.raises(WorldError) as failure:
        run_world(4, _losses, ["--parallel={tensor: 2}", LOCAL])
    assert sorted(failure.value.errors) == [0, 1, 2, 3]
    for error in failure.value.errors.values():
        assert "the loss of this run must not train on this layout: doc_local_mean breaks the law" in error
        assert "local denominator" in error and "tokens of the step" in error
