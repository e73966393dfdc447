"""Servers that follow the policy: checked before a run, and sent a Hugging Face folder per version of the weights."""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch.distributed as dist

from parallel_rl.agreement import on_first_rank
from parallel_rl.cluster.heartbeat import tick
from parallel_rl.megatron.hf import save_hf
from parallel_rl.servers.completion_server import CompletionServer, CompletionServerError, Sampling
from parallel_rl.servers.weights import ServerWeights
from parallel_rl.servers.workers import Workers
from parallel_rl.training.config.sections import ServerConfig
from parallel_rl.training.config.train import TrainConfig
from parallel_rl.training.models.engine import Engine
from parallel_rl.training.rollouts.sharing import wait_together
from parallel_rl.training.tokenizer.protocol import Vocabulary

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
