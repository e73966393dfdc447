"""Checkpoints through megatron's dist_checkpointing; one is either whole or not there."""

from __future__ import annotations

import queue
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.utils import add_prefix_for_sharding
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import MegatronOptimizer
from torch.distributed.checkpoint import CheckpointException

from parallel_rl.losses.mix import MuSchedule
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


@dataclass(frozen=True)
class Contents:
    """What a checkpoint holds of a run, each part where the run has it.

    Attributes:
        engine: the trained model. optimizer: its moments.
        reference: the frozen policy that the objective began with.
        critic, critic_optimizer: the value function.
        schedule: of a loss with a state.
    """

    engine: Engine
    optimizer: MegatronOptimizer | None = None
    reference: torch.nn.Module | None = None
    critic: Engine | None = None
    critic_optimizer: MegatronOptimizer | None = None
    schedule: MuSchedule | None = None


def newest(folder: Path) -> Path | None:
    """The whole checkpoint with the highest number, or None."""
    found = [path for path in folder.glob("step_*") if _NAME.fullmatch(path.name)] if folder.is_dir() else []
    return max(found, key=lambda path: int(path.name[5:]), default=None)


def save(
    folder: Path,
    number: int,
    contents: Contents,
    position: Position,
    facts: Mapping[str, float | int | str],
    keep: int,
) -> Path:
    """Writes `folder/step_<number>`: contents, position and `facts`.

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
    state = _state(contents, loading=False)
    if contents.schedule is not None:
        state["schedule"] = contents.schedule.state_dict()
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
    failed = torch.tensor(float(failure is not None), device=contents.engine.device)
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


def load(path: Path, contents: Contents) -> None:
    """Fills `contents` from a checkpoint of any layout.

    Raises:
        ValueError: no checkpoint there, or one of another run.
    """
    state = _load(path, _state(contents, loading=True))
    contents.engine.bare.load_state_dict(state["model"])
    if contents.optimizer is not None:
        contents.optimizer.load_state_dict(state["optimizer"])
    if contents.reference is not None:
        unwrap(contents.reference).load_state_dict(state["reference"])
    if contents.critic is not None:
        contents.critic.bare.load_state_dict(state["critic"])
    if contents.critic_optimizer is not None:
        contents.critic_optimizer.load_state_dict(state["critic_optimizer"])
    if contents.schedule is not None:
        contents.schedule.load_state_dict(state["schedule"])


def load_weights(path: Path, model: torch.nn.Module, *, scalar_head: bool = False) -> None:
    """Fills a model from the trained model of a checkpoint; a scalar head from a policy's checkpoint keeps its own head.

    Raises:
        ValueError: no checkpoint there, or one of another model.
    """
    bare = unwrap(model)
    wanted = bare.sharded_state_dict()
    _check_there(path)
    theirs = bool(peek(path)[1].get("scalar_head", 0))
    if theirs and not scalar_head:
        raise ValueError(f"the checkpoint {path} is of a model with a scalar head; one with logits is needed")
    if scalar_head and not theirs:
        wanted = {name: value for name, value in wanted.items() if not name.startswith("output_layer.")}
    bare.load_state_dict(_load(path, {"model": wanted})["model"], strict=theirs == scalar_head)


def _check_there(path: Path) -> None:
    if not (path / "metadata.json").is_file():
        raise ValueError(f"{path.absolute()} is no checkpoint")


def _load(path: Path, wanted: dict[str, Any]) -> dict[str, Any]:
    _check_there(path)
    try:
        state: dict[str, Any] = dist_checkpointing.load(wanted, str(path))
    except (Exception, CheckpointException) as error:
        raise ValueError(f"the checkpoint {path} does not fit this run: {_last_line(error)}") from error
    return state


def _last_line(error: BaseException) -> str:
    """torch puts whole tracebacks into its message; what went wrong stands last."""
    lines = str(error).strip().splitlines()
    return lines[-1] if lines else type(error).__name__


def _state(contents: Contents, *, loading: bool) -> dict[str, Any]:
    model = contents.engine.bare.sharded_state_dict()
    state: dict[str, Any] = {"model": model}
    if contents.optimizer is not None:
        state["optimizer"] = contents.optimizer.sharded_state_dict(model, is_loading=loading)
    if contents.reference is not None:
        state["reference"] = _prefixed(unwrap(contents.reference), "reference.")
    if contents.critic is not None:
        state["critic"] = _prefixed(contents.critic.bare, "critic.")
        if contents.critic_optimizer is not None:
            state["critic_optimizer"] = contents.critic_optimizer.sharded_state_dict(
                state["critic"], is_loading=loading
            )
    return state


def _prefixed(model: GPTModel, prefix: str) -> dict[str, Any]:
    """Sharded weights under a name of their own among all weights of the checkpoint."""
    state: dict[str, Any] = model.sharded_state_dict()
    add_prefix_for_sharding(state, prefix)
    return state
