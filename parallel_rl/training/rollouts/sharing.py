"""Share rollout servers among ranks: their requests, and the weights that they get."""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ALL_COMPLETED, FIRST_EXCEPTION, Future, wait
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from parallel_rl.agreement import (
    Unavailable,
    communication_device,
    on_first_rank,
    raise_on_all_ranks,
    sum_over_groups,
)
from parallel_rl.cluster import preemption
from parallel_rl.cluster.progress import tick
from parallel_rl.groups import group_rank
from parallel_rl.megatron.hf import save_hf
from parallel_rl.servers.completion_server import CompletionServer, CompletionServerError, Sampling
from parallel_rl.servers.http_client import Workers, any_server_away
from parallel_rl.servers.weights import ServerWeights
from parallel_rl.training.config.sections import ServerConfig
from parallel_rl.training.config.train import TrainConfig
from parallel_rl.training.models.engine import Engine
from parallel_rl.training.tokenizer.protocol import Vocabulary

_LOOK = 20.0  # seconds
_WAITING, _FAILED = 1, 2


def wait_together(futures: Sequence[Future], timeout: float, *, tolerant: bool = False, stoppable: bool = True) -> bool:
    """Wait until all are done on every rank; False on all if one failed, unless `tolerant`.

    Ranks poll each other, so that no collective reaches its `timeout`. If `stoppable`, Unavailable on every rank when a
    stop was requested while a server is away.
    """
    until = ALL_COMPLETED if tolerant else FIRST_EXCEPTION
    device = communication_device(dist.group.WORLD, torch.device("cpu"))
    while True:
        tick("waiting for the server")
        done, pending = wait(futures, min(_LOOK, timeout / 4), until)
        failed = not tolerant and any(map(failure, done))
        mine = [_FAILED if failed else _WAITING if pending else 0, preemption.asked(), any_server_away()]
        state = torch.tensor(mine, device=device)
        dist.all_reduce(state, dist.ReduceOp.MAX)
        outcome, stopping, away = state.tolist()
        if outcome != _WAITING:
            return outcome != _FAILED
        if stoppable and stopping and away:
            raise Unavailable("a stop was requested while a server is away")


class Sharing:
    """Place of this rank among `groups` that hold the same data; if it `asks`, it talks to the servers."""

    def __init__(self, engine: Engine) -> None:
        self.groups = engine.replica_groups
        self.asks = all(group_rank(group) == 0 for group in self.groups)
        self._timeout = engine.config.run.timeout

    def wait(self, futures: Sequence[Future], *, tolerant: bool = False, stoppable: bool = True) -> bool:
        return wait_together(futures, self._timeout, tolerant=tolerant, stoppable=stoppable)

    def spread(self, values: Tensor, shape: tuple[int, ...]) -> Tensor:
        """Broadcast the requesting rank's values to its replicas, as a sum with zeros."""
        local = values if self.asks else torch.zeros(shape, dtype=values.dtype)
        return sum_over_groups(local, self.groups)

    def finish(self, orders: Sequence[Future]) -> None:
        """Wait for the world's first rank's orders; ValueError on every rank if one failed, or Unavailable."""
        self.wait(orders)
        raise_on_all_ranks(lambda: raise_first(orders))


@contextmanager
def queued_again_without_servers() -> Iterator[None]:
    """Request a restart of the job if the block raises Unavailable, and re-raise; every rank gets there."""
    try:
        yield
    except Unavailable as error:
        text = f"{error}; the same command resumes from the last checkpoint"
        on_first_rank(lambda: preemption.ask_for_restart(text), "the marker REQUEUE could not be written")
        raise


def failure(future: Future) -> BaseException | None:
    """Return the error of a finished future, if any."""
    return future.exception() if future.done() else None


def raise_first(futures: Sequence[Future]) -> None:
    """Raise the first failure: `Unavailable` unchanged, others as a ValueError."""
    if error := next((error for future in futures if (error := failure(future)) is not None), None):
        raise error if isinstance(error, Unavailable) else ValueError(str(error))


_TIMEOUT = 20.0  # seconds for a completion of one token


def check_servers(config: TrainConfig, vocabulary: Vocabulary) -> None:
    """Check the servers of `server.update` from the first rank; every rank calls it.

    On every rank, ValueError if a server cannot receive weights, serves another model or vocabulary, or returns no
    log-probs, and Unavailable if one refuses connections for too long or a stop was requested.
    """
    server = config.server
    if server is None or server.update is None:
        return
    checks = [Workers(1).submit(partial(_check, config, server, vocabulary))] if dist.get_rank() == 0 else []
    wait_together(checks, config.run.timeout)
    on_first_rank(lambda: [done.result() for done in checks], "the completion servers could not be checked")


def _check(config: TrainConfig, server: ServerConfig, vocabulary: Vocabulary) -> None:
    assert server.update is not None
    rule = config.sampling
    as_drawn = rule.temperature != 1 or bool(rule.truncation)
    try:
        ServerWeights(server, server.update).check(_shape(config, vocabulary.size), as_drawn=as_drawn)
        for url in server.urls:
            single = replace(server, url=url, timeout=min(server.timeout, _TIMEOUT))
            sampling = Sampling(1, tuple(sorted(vocabulary.ends)), vocabulary.size)
            CompletionServer(single, sampling).complete([[vocabulary.size - 1]], [0])
    except CompletionServerError as error:
        raise ValueError(str(error)) from None


def _shape(config: TrainConfig, vocab_size: int) -> Mapping[str, object]:
    """Return the policy's config.json."""
    model = config.model
    return {
        "vocab_size": vocab_size,
        "hidden_size": model.hidden,
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.heads,
        "tie_word_embeddings": model.tie_embeddings,
    }


_NEWEST = 2  # a server may still read the previous one
_NAME = re.compile(r"version_\d{6,}_\d+")


def write_policy(engine: Engine, version: int) -> Path:
    """Write the weights to a new folder of run.dir/policy, on every rank; keep the newest two.

    Every path is new, even after a restart, since engines may cache by path. Folders are published whole. RuntimeError
    or ValueError on every rank if the folder cannot be written, or the model has no Hugging Face family.
    """
    tick("writing the policy")
    parent = Path(engine.config.run.dir).absolute() / "policy"
    folder = on_first_rank(
        lambda: parent / f"version_{version:06d}_{time.time_ns() // 1_000_000}", "the policy has no folder"
    )
    save_hf(engine.bare, folder)
    on_first_rank(partial(_prune, parent), f"old weights cannot be removed from {parent}")
    return folder


def _prune(parent: Path) -> None:
    for path in parent.glob(".version_*.partial"):  # of an interrupted write
        shutil.rmtree(path)
    folders = [path for path in parent.iterdir() if _NAME.fullmatch(path.name)]
    for path in sorted(folders, key=lambda path: path.stat().st_mtime_ns)[:-_NEWEST]:
        shutil.rmtree(path)
