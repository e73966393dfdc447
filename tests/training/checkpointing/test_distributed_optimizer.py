"""Megatron's distributed optimizer in the trainer: the run's curve is the same, and any layout continues its checkpoints."""

from __future__ import annotations

from pathlib import Path

import pytest

from parallel_rl.testing.pool import WorldError, run_world
from parallel_rl.training.config.load import load_config
from tests.training.checkpointing.saves import arguments
from tests.training.fused_adam import fused_adam_installed
from tests.training.helpers import Rows, assert_near, cut, train_rows

SHARDED = "use_distributed_optimizer: true, overlap_grad_reduce: true"
RUN = {
    "sft": "{steps: 3, batch_size: 16, optimizer: {lr: 3e-3, weight_decay: 0.1, clip: 0.5}}",
    "model__layers": 2,  # one for each pipeline rank
    "run__loggers": "[]",
    "evaluation": "null",
    "data__held_out": "null",
    "run__checkpoint_every": 1,
    "run__keep_checkpoints": 9,
}


def sft(folder: Path, parallel: str, dtype: str, **more: object) -> list[str]:
    return arguments(folder, parallel, **{**RUN, "run__dtype": dtype, **more})


WAYS = [
    ("sharded", 2, "{tensor: 2, sequence_parallel: true}"),
    ("plain", 4, f"{{tensor: 2, {SHARDED}}}"),
    ("sharded", 4, "{pipeline: 2, use_distributed_optimizer: true}"),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "rel", "ways"),
    [
        ("float32", 1e-6, WAYS),
        ("bfloat16", 2e-2, WAYS[1:2]),  # with master weights
    ],
)
def test_a_sharded_run_has_the_plain_one_s_curve_and_each_goes_on_as_the_other(
    dtype: str, rel: float, ways: list[tuple[str, int, str]], tmp_path: Path
) -> None:
    """Moments and master weights are in the checkpoint as a plain optimizer's; a wrong one shows a step after the first."""
    plain, sharded = tmp_path / "plain", tmp_path / "sharded"
    [rows, _] = run_world(2, train_rows, sft(plain, "{}", dtype))
    assert len(rows) == 3 and min(row["grad_norm"] for row in rows) > 0.5  # it clips
    for found in run_world(2, train_rows, sft(sharded, f"{{{SHARDED}}}", dtype)):
        assert_near(found, rows, rel=rel, abs=1e-6)
    for number, (source, world, parallel) in enumerate(ways):
        source = {"plain": plain, "sharded": sharded}[source]
        stopped = tmp_path / f"stopped{number}"
        cut(source, stopped, 1)
        for later in run_world(world, train_rows, sft(stopped, parallel, dtype)):
            assert_near(later, rows[1:], rel=max(rel, 1e-5), abs=1e-6)


def fused_rows(rank: int, given: list[str]) -> Rows:
    with fused_adam_installed():
        return train_rows(rank, given)


ALL_SHARDED = "{use_distributed_optimizer: true}"
ADAMS = [  # whose checkpoint, whether a fused one goes on, at which layout
    ("fused", True, ALL_SHARDED),
    ("fused", False, "{}"),
    ("torch", True, ALL_SHARDED),
    ("fused", True, "{}"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "rel", "ways"), [("float32", 1e-5, ADAMS[:3]), ("bfloat16", 2e-2, ADAMS[3:])])
def test_a_run_goes_on_at_the_step_of_whatever_adam_it_has(
    dtype: str, rel: float, ways: list[tuple[str, bool, str]], tmp_path: Path
) -> None:
    """A fused one counts steps elsewhere than torch's, and none for the norms where rank 0's shard has none of them: they
    were counted from 1 again, or a card with another Adam ended in a KeyError."""
    # the head is most of the parameters, and of the first shards all
    small = {"model__vocab_size": 4096, "model__layers": 1}
    first = {name: tmp_path / name for name in ("fused", "torch")}
    [rows, *_] = run_world(4, fused_rows, sft(first["fused"], ALL_SHARDED, dtype, **small))
    [others, *_] = run_world(2, train_rows, sft(first["torch"], "{}", dtype, **small))
    assert_near(others, rows, rel=rel, abs=1e-6)
    for number, (source, fused, parallel) in enumerate(ways):
        stopped = tmp_path / f"stopped{number}"
        cut(first[source], stopped, 1)
        goes_on, world = fused_rows if fused else train_rows, 4 if parallel == ALL_SHARDED else 2
        for later in run_world(world, goes_on, sft(stopped, parallel, dtype, **small)):
            assert_near(later, rows[1:], rel=rel, abs=1e-6)


@pytest.mark.parametrize(
    ("parallel", "dtype", "words"),
    [
        (f"{{{SHARDED}}}", "float64", "use_distributed_optimizer = True is incompatible with run.dtype = 'float64'"),
        (
            "{context: 1, tensor: 2, overlap_grad_reduce: true}",
            "float32",
            "parallel.overlap_grad_reduce = True has no effect",
        ),
        (
            "{pipeline: 2, use_distributed_optimizer: true}",
            "float32",
            "parallel.use_distributed_optimizer = True has no effect",
        ),
    ],
)
def test_options_that_could_do_nothing_are_refused(parallel: str, dtype: str, words: str, tmp_path: Path) -> None:
    given = sft(tmp_path, parallel, dtype)
    with pytest.raises((ValueError, WorldError), match=words):
        load_config(given[0], given[1:])
        run_world(2, train_rows, given)
