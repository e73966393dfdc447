"""Save and load checkpoints, random states included, through megatron's dist_checkpointing: whole or absent."""

from __future__ import annotations

import contextlib
import random
import shutil
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.dist_checkpointing.utils import add_prefix_for_sharding
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from torch import Tensor

from parallel_rl.agreement import gather_results, on_first_rank, raise_on_all_ranks
from parallel_rl.cluster.progress import tick
from parallel_rl.megatron import unwrap
from parallel_rl.training.checkpointing import manifest as files
from parallel_rl.training.checkpointing import storage
from parallel_rl.training.checkpointing.manifest import (
    CheckpointMetadata,
    FileEntry,
    Manifest,
    read_manifest,
    verify_checksums,
)
from parallel_rl.training.checkpointing.optimizer_state import fill_optimizer, optimizer_state
from parallel_rl.training.checkpointing.sharded import State, bytes_of, check_pickles, load_sharded, save_sharded
from parallel_rl.training.checkpointing.storage import Retention
from parallel_rl.training.models.engine import Engine


def begin_random_state(seed: int, data_rank: int) -> None:
    """Seed Python, numpy and, with a GPU, the host's torch generator, for reward functions."""
    rank_seed = random.Random(f"{seed} {data_rank}").getrandbits(32)
    random.seed(rank_seed)
    np.random.seed(rank_seed)
    if torch.cuda.is_available():
        torch.default_generator.manual_seed(rank_seed)


def random_state() -> Mapping[str, object]:
    kind, keys, place, has_gauss, gauss = np.random.get_state(legacy=True)
    return {
        "python": random.getstate(),
        "numpy": (
            str(kind),
            torch.from_numpy(np.array(keys, dtype=np.int64)),
            int(place),
            int(has_gauss),
            float(gauss),
        ),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
        "megatron": {name: state.cpu() for name, state in get_cuda_rng_tracker().get_states().items()},
    }


def restore_random_state(state: Mapping[str, object]) -> None:
    """Restore a state of `random_state`, on a machine of the same kind."""
    python, numpy, host, device, megatron = (state[name] for name in ("python", "numpy", "torch", "cuda", "megatron"))
    assert isinstance(python, tuple) and isinstance(numpy, tuple) and isinstance(megatron, dict)
    assert isinstance(host, torch.Tensor)
    random.setstate(python)
    np.random.set_state((numpy[0], numpy[1].numpy().astype(np.uint32), *numpy[2:]))
    torch.set_rng_state(host)
    if isinstance(device, torch.Tensor) and torch.cuda.is_available():
        torch.cuda.set_rng_state(device)
    get_cuda_rng_tracker().set_states(megatron)


NumberT = TypeVar("NumberT")


class Controller(Protocol[NumberT]):
    """A small state, equal on every rank and saved once: a KL controller, a loss's schedule."""

    def state_dict(self) -> Mapping[str, NumberT]: ...

    def load_state_dict(self, state: Mapping[str, NumberT]) -> None: ...


Controllers = Mapping[str, "Controller[int] | Controller[float]"]


class Stateful(Protocol):
    """Per-data-rank state in host tensors: rollouts in flight, a stream.

    The ranks of one data rank hold the same. `load_state_dict` gets the states of all data ranks, in order; their
    number may have changed.
    """

    def state_dict(self) -> Mapping[str, Tensor]: ...

    def load_state_dict(self, parts: Sequence[Mapping[str, Tensor]]) -> None: ...


@dataclass(frozen=True)
class Contents:
    """Parts of a run in a checkpoint; `reference` is the frozen policy that the main phase began with."""

    engine: Engine
    optimizer: MegatronOptimizer | None = None
    reference: torch.nn.Module | None = None
    critic: Engine | None = None
    critic_optimizer: MegatronOptimizer | None = None
    controllers: Controllers = field(default_factory=dict)
    extra: Mapping[str, Stateful] = field(default_factory=dict)

    @property
    def models(self) -> list[str]:
        """Return the parts that are sharded tensors, by name."""
        names = ("optimizer", "reference", "critic", "critic_optimizer")
        return ["model", *(name for name in names if getattr(self, name) is not None)]


def save(folder: Path, number: int, contents: Contents, metadata: CheckpointMetadata, keep: Retention) -> Path:
    """Write `folder/step_<number>` atomically, then remove checkpoints that `keep` does not hold.

    The files go into a hidden folder, are synced with a manifest of their checksums, and are renamed when every rank is
    done. A kill at any moment leaves the previous checkpoint. `number` counts the steps of all phases; `save` fills in
    layout and parts of `metadata`. RuntimeError on all ranks names the failed rank and the cause; earlier checkpoints
    are untouched.
    """
    final = storage.path_of(folder, number)
    failed = f"the checkpoint {final} could not be written, those before it are untouched"
    state = _state(contents, loading=False)
    state["controllers"] = {name: dict(controller.state_dict()) for name, controller in contents.controllers.items()}
    state["random"] = ShardedObject("random", random_state(), (dist.get_world_size(),), (dist.get_rank(),))
    state["extra"] = raise_on_all_ranks(lambda: _extra(contents), what=failed)
    named = [*(f"controllers.{name}" for name in contents.controllers), *(f"extra.{name}" for name in contents.extra)]
    metadata = replace(metadata, layout=_layout(contents.engine), parts=(*contents.models, *named))
    needed = bytes_of(state, contents.engine.device)
    partial = on_first_rank(lambda: storage.make_partial(final, needed), failed)
    tick("writing a checkpoint", saving=True)
    try:
        save_sharded(state, partial, failed)
        entries = _seal(partial, failed)
        on_first_rank(lambda: files.write_manifest(partial, Manifest(metadata, entries)), failed)
        on_first_rank(lambda: storage.publish(partial, final), failed)
    except (RuntimeError, ValueError):
        if dist.get_rank() == 0:
            shutil.rmtree(partial, ignore_errors=True)
        raise
    why = f"the checkpoint {final} is written, but older ones than run.keep_checkpoints could not be removed"
    on_first_rank(lambda: storage.prune(folder, keep, final), why)
    return final


def load(path: Path, contents: Contents, metadata: CheckpointMetadata) -> Mapping[str, object] | None:
    """Fill `contents` from a verified checkpoint of any layout.

    Returns this rank's random states, or None if the layout has changed. ValueError on all ranks if a part is missing or
    does not fit.
    """
    for name in (*contents.models, *(f"controllers.{name}" for name in contents.controllers)):
        if name not in metadata.parts:
            raise ValueError(
                f"the checkpoint {path} holds no {name}, which this run has; it holds {', '.join(metadata.parts)}"
            )
    wanted = _state(contents, loading=True)
    same_layout = dict(metadata.layout) == _layout(contents.engine)
    if same_layout:
        wanted["random"] = ShardedObject("random", None, (dist.get_world_size(),), (dist.get_rank(),))
    ranks, extra = metadata.layout["data"], [name for name in contents.extra if f"extra.{name}" in metadata.parts]
    wanted["extra"] = {
        f"{name}.{rank}": ShardedObject(f"extra.{name}", None, (ranks,), (rank,), dist.get_rank())
        for name in extra
        for rank in range(ranks)
    }
    state = _load(path, wanted)

    def fill() -> None:
        _fill(contents, state)
        for name in extra:
            contents.extra[name].load_state_dict([state["extra"][f"{name}.{rank}"] for rank in range(ranks)])
        for name, controller in contents.controllers.items():
            controller.load_state_dict(state["controllers"][name])

    _or_refuse(fill, path)
    return state["random"] if same_layout else None


def load_weights(
    path: Path, model: torch.nn.Module, check: Callable[[Path, CheckpointMetadata], None], *, scalar_head: bool = False
) -> None:
    """Fill a model from a checkpoint with verified files; ValueError on all ranks if they do not fit.

    A scalar head keeps its values if the checkpoint is a policy's.
    """
    with storage.reading(path) if dist.get_rank() == 0 else contextlib.nullcontext():
        manifest = on_first_rank(lambda: read_manifest(path), f"the checkpoint {path} cannot be read")
        check(path, manifest.metadata)
        verify_checksums(path, manifest)
        bare, has_head = unwrap(model), bool(manifest.metadata.model["scalar_head"])
        wanted = bare.sharded_state_dict()
        if scalar_head and not has_head:
            wanted = {name: value for name, value in wanted.items() if not name.startswith("output_layer.")}
        state = _load(path, {"model": wanted})
    _or_refuse(lambda: fill_weights(bare, state["model"], whole=has_head == scalar_head), path)


def fill_weights(model: torch.nn.Module, state: State, *, whole: bool = True) -> None:
    """Load a state's weights without `_extra_state` (a pickle); ValueError if `whole` and one is missing."""
    engine = "_extra_state"
    missing, unknown = model.load_state_dict({name: x for name, x in state.items() if engine not in name}, strict=False)
    missing = [name for name in missing if engine not in name]
    if whole and (missing or unknown):
        raise ValueError(
            f"it lacks the model's weights {missing}, and has the weights {unknown}, which the model lacks"
        )


def _seal(partial: Path, failed: str) -> Mapping[str, FileEntry]:
    """Sync every file, by the rank that wrote it, and return all manifest entries."""
    names = on_first_rank(lambda: sorted(path.name for path in partial.iterdir()), failed)
    rank, ranks = dist.get_rank(), dist.get_world_size()

    def seal() -> Mapping[str, FileEntry]:
        there = [path.name for path in partial.iterdir() if files.written_by(path.name, ranks) == rank]
        if unseen := sorted({*there} - {*names}):  # Megatron's writer would create the missing folder
            raise OSError(f"{unseen[0]}, written on {socket.gethostname()}, is not visible to rank 0")
        mine = [name for name in names if files.written_by(name, ranks) == rank]
        return {name: files.checksum(partial / name, sync=True) for name in mine}

    return {name: entry for part in gather_results(seal, failed) for name, entry in part.items()}


def _load(path: Path, wanted: State) -> State:
    on_first_rank(lambda: check_pickles(path), f"the checkpoint {path} cannot be read")
    try:
        return load_sharded(wanted, path, f"the checkpoint {path} does not fit this run")
    except RuntimeError as error:
        raise ValueError(str(error)) from error


def _or_refuse(fill: Callable[[], object], path: Path) -> None:
    try:
        raise_on_all_ranks(fill, what=f"the checkpoint {path} does not fit this run")
    except RuntimeError as error:
        raise ValueError(str(error)) from error


def _fill(contents: Contents, state: State) -> None:
    fill_weights(contents.engine.bare, state["model"])
    if contents.optimizer is not None:
        fill_optimizer(contents.optimizer, state["optimizer"])
    if contents.reference is not None:
        fill_weights(unwrap(contents.reference), state["reference"])
    if contents.critic is not None:
        fill_weights(contents.critic.bare, state["critic"])
    if contents.critic_optimizer is not None:
        fill_optimizer(contents.critic_optimizer, state["critic_optimizer"])


def _state(contents: Contents, *, loading: bool) -> State:
    model = contents.engine.bare.sharded_state_dict()
    state: State = {"model": model}
    if contents.optimizer is not None:
        state["optimizer"] = optimizer_state(contents.optimizer, model, loading=loading)
    if contents.reference is not None:
        state["reference"] = _prefixed(unwrap(contents.reference), "reference.")
    if contents.critic is not None:
        state["critic"] = _prefixed(contents.critic.bare, "critic.")
        if contents.critic_optimizer is not None:
            critic_optimizer = contents.critic_optimizer
            state["critic_optimizer"] = optimizer_state(critic_optimizer, state["critic"], loading=loading)
    return state


def _extra(contents: Contents) -> dict[str, ShardedObject]:
    """Gather the state of each data rank from its first tensor, context and pipeline rank."""
    groups = contents.engine.groups
    replica = (parallel_state.get_pipeline_model_parallel_rank(), groups.tp_rank, groups.cp_rank)
    return {
        name: ShardedObject(f"extra.{name}", stateful.state_dict(), (groups.dp_size,), (groups.dp_rank,), replica)
        for name, stateful in contents.extra.items()
    }


def _layout(engine: Engine) -> dict[str, int]:
    sizes, groups = engine.config.parallel, engine.groups
    return {
        "tensor": groups.tp_size,
        "context": groups.cp_size,
        "pipeline": sizes.pipeline,
        "data": groups.dp_size,
    }


def _prefixed(model: GPTModel, prefix: str) -> State:
    state: State = model.sharded_state_dict()
    add_prefix_for_sharding(state, prefix)
    return state
