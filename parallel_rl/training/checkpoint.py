"""Checkpoints through megatron's dist_checkpointing; one is either whole or not there."""

from __future__ import annotations

import queue
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.utils import add_prefix_for_sharding
from megatron.core.optimizer import MegatronOptimizer
from torch.distributed.checkpoint import CheckpointException

from parallel_rl.megatron import unwrap
from parallel_rl.training.engine import Engine

_NAME = re.compile(r"step_(\d{6,})")


@dataclass(frozen=True)
class Position:
    """Where a run stands: the phase ("warmup" or the objective) and the steps done in it.

    The order of the data and every draw follow from (seed, phase, step), so no random state needs to be kept.
    """

    phase: str
    step: int


def newest(folder: Path) -> Path | None:
    """The whole checkpoint with the highest number, or None."""
    found = [path for path in folder.glob("step_*") if _NAME.fullmatch(path.name)] if folder.is_dir() else []
    return max(found, key=lambda path: int(path.name[5:]), default=None)


def save(
    folder: Path,
    number: int,
    engine: Engine,
    optimizer: MegatronOptimizer | None,
    reference: torch.nn.Module | None,
    position: Position,
    facts: Mapping[str, float | int | str],
    keep: int,
) -> Path:
    """Writes `folder/step_<number>`: model, optimizer, reference, position and `facts`.

    Everything goes into a hidden folder first and is renamed when every rank is done, so that no reader sees a part of it.
    Where a rank fails, all raise and the hidden folder is removed.

    Raises:
        RuntimeError: the checkpoint could not be written; what was there before is untouched.
    """
    final = folder / f"step_{number:06d}"
    partial = folder / f".partial_{final.name}"
    first = dist.get_rank() == 0
    if first:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    dist.barrier()
    state = _state(engine, optimizer, reference, loading=False)
    state["position"] = {"phase": position.phase, "step": position.step}
    state["facts"] = dict(facts)
    failure: BaseException | None = None
    # Megatron keeps its writers' results in a process of its own, made for asynchronous saves: slow to start, and left behind
    # where a rank is killed. Here they are read in the process that collects them, so a plain queue will do.
    filesystem_async._results_queue = queue.Queue()
    try:
        dist_checkpointing.save(state, str(partial))
    except (Exception, CheckpointException) as error:  # the second is no Exception
        failure = error
    failed = torch.tensor(float(failure is not None), device=engine.device)
    dist.all_reduce(failed)
    if failed:
        shutil.rmtree(partial, ignore_errors=True)
        why = _last_line(failure) if failure else "another rank failed"
        raise RuntimeError(f"the checkpoint {final} could not be written: {why}") from failure
    if first:
        shutil.rmtree(final, ignore_errors=True)
        partial.rename(final)
        old = sorted(
            (path for path in folder.glob("step_*") if _NAME.fullmatch(path.name)), key=lambda path: int(path.name[5:])
        )
        for path in old[:-keep]:
            shutil.rmtree(path, ignore_errors=True)
    dist.barrier()
    return final


def peek(path: Path) -> tuple[Position, dict[str, float | int | str]]:
    """The position and the facts of a checkpoint, without its tensors."""
    common = dist_checkpointing.load_common_state_dict(str(path))
    return Position(**common["position"]), common["facts"]


def load(path: Path, engine: Engine, optimizer: MegatronOptimizer | None, reference: torch.nn.Module | None) -> None:
    """Fills model, optimizer and reference from a checkpoint of any layout.

    Raises:
        ValueError: no checkpoint there, or one of another model.
    """
    if not (path / "metadata.json").is_file():
        raise ValueError(f"{path.absolute()} is no checkpoint")
    wanted = _state(engine, optimizer, reference, loading=True)
    try:
        state = dist_checkpointing.load(wanted, str(path))
    except (Exception, CheckpointException) as error:
        raise ValueError(f"the checkpoint {path} does not fit this run: {_last_line(error)}") from error
    engine.bare.load_state_dict(state["model"])
    if optimizer is not None:
        optimizer.load_state_dict(state["optimizer"])
    if reference is not None:
        unwrap(reference).load_state_dict(state["reference"])


def _last_line(error: BaseException) -> str:
    """torch puts whole tracebacks into its message; what went wrong stands last."""
    lines = str(error).strip().splitlines()
    return lines[-1] if lines else type(error).__name__


def _state(
    engine: Engine, optimizer: MegatronOptimizer | None, reference: torch.nn.Module | None, *, loading: bool
) -> dict[str, object]:
    model = engine.bare.sharded_state_dict()
    state: dict[str, object] = {"model": model}
    if optimizer is not None:
        state["optimizer"] = optimizer.sharded_state_dict(model, is_loading=loading)
    if reference is not None:
        frozen = unwrap(reference).sharded_state_dict()
        add_prefix_for_sharding(frozen, "reference.")
        state["reference"] = frozen
    return state
