"""One rank of the pool: joins a fresh gloo world for each task, and ends with its parent."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import multiprocessing
import os
import pickle
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

Setting = tuple[int, str, float]  # ranks, the store's file, seconds
Task = tuple[Setting, Callable[[], tuple]]


def work(rank: int, connection: Connection, folder: str, first: Task | None = None) -> None:
    """Run tasks from the pipe until it closes; `first` came by fork, not through the pipe."""
    import torch

    if first is not None:  # a notebook's streams belong to its process
        sys.stdout, sys.stderr = sys.__stdout__ or sys.stdout, sys.__stderr__ or sys.stderr

    threading.Thread(target=_die_with_the_parent, daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    with open(os.path.join(folder, f"stack{rank}"), "w", encoding="utf-8") as stack:
        faulthandler.register(signal.SIGUSR1, file=stack)
        torch.set_num_threads(1)
        loopback = {"lo", "lo0"} & {name for _, name in socket.if_nameindex()}
        if loopback:
            os.environ["GLOO_SOCKET_IFNAME"] = loopback.pop()
        gc.freeze()  # shortens each gc.collect() below
        connection.send_bytes(b"ready")
        while True:
            try:
                task: bytes | Callable[[], tuple]
                if first is None:
                    setting, task = pickle.loads(connection.recv_bytes()), connection.recv_bytes()  # nosec B301 # of the parent
                else:
                    (setting, task), first = first, None
            except (EOFError, ConnectionResetError):
                os._exit(0)  # skips the interpreter's shutdown, which a wedged gloo thread can delay
            if setting is None:  # no rank can be in a handshake with this one any more
                _forget()
            else:
                with contextlib.suppress(BrokenPipeError):  # the parent no longer waits; the next read ends this rank
                    connection.send_bytes(_answer(rank, setting, task))
            del setting, task


def _die_with_the_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
    os._exit(1)


def _answer(rank: int, setting: Setting, task: bytes | Callable[[], tuple]) -> bytes:
    """Run a task and pickle ("result", value) or ("error", message, traceback)."""
    try:
        return pickle.dumps(("result", _call(rank, setting, task)))
    except BaseException as error:
        return pickle.dumps(("error", f"{type(error).__name__}: {error}", traceback.format_exc()))


def _call(rank: int, setting: Setting, task: bytes | Callable[[], tuple]) -> Any:
    import torch
    import torch.distributed as dist

    world_size, store, timeout = setting
    # unpickling imports modules, so it comes before the rendezvous
    fn, args = task() if callable(task) else pickle.loads(task)  # nosec B301 # of the parent
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
    os.environ.update(LOCAL_WORLD_SIZE=str(world_size))
    torch.manual_seed(0)
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, world_size),
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=timeout),
    )
    return fn(rank, *args)


def release_experts() -> None:
    """Drop every Megatron model with experts.

    Its layers keep their last graph, whose hooks keep the model's groups. Each group has threads that poll, and a hundred
    groups take most of a core.
    """
    layers = sys.modules.get("megatron.core.transformer.moe.moe_layer")
    if layers is not None:
        for referrer in gc.get_referrers(layers.MoELayer):
            if isinstance(referrer, layers.MoELayer):
                referrer.__dict__.clear()


def _forget() -> None:
    import torch
    import torch.distributed as dist

    release_experts()
    with contextlib.suppress(Exception):
        megatron = sys.modules.get("megatron.core.parallel_state")
        if megatron is not None:
            megatron.destroy_model_parallel()
    with contextlib.suppress(Exception):
        if dist.is_initialized():
            dist.destroy_process_group()
    torch.set_default_dtype(torch.float32)
    torch.set_grad_enabled(True)
    gc.collect()
