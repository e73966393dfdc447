"""One rank of the pool: it joins a fresh gloo world for each task, and ends with its parent."""

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
    """The life of one rank: tasks in, results out, until the pipe closes.

    Args:
        rank, connection, folder: of this worker.
        first: a task that came by fork, not through the pipe.
    """
    import torch

    if first is not None:  # a notebook's streams belong to its own process
        sys.stdout, sys.stderr = sys.__stdout__ or sys.stdout, sys.__stderr__ or sys.stderr

    threading.Thread(target=_die_with_the_parent, daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    with open(os.path.join(folder, f"stack{rank}"), "w", encoding="utf-8") as stack:
        faulthandler.register(signal.SIGUSR1, file=stack)
        torch.set_num_threads(1)
        loopback = {"lo", "lo0"} & {name for _, name in socket.if_nameindex()}
        if loopback:
            os.environ["GLOO_SOCKET_IFNAME"] = loopback.pop()
        gc.freeze()  # the preloaded modules: each gc.collect() below is then short
        connection.send_bytes(b"ready")
        while True:
            try:
                task: bytes | Callable[[], tuple]
                if first is None:
                    setting, task = pickle.loads(connection.recv_bytes()), connection.recv_bytes()  # nosec B301 # of the parent
                else:
                    (setting, task), first = first, None
            except (EOFError, ConnectionResetError):
                os._exit(0)  # skips the interpreter's shutdown, which a wedged gloo thread can hold up
            if setting is None:  # once no rank can be inside a handshake with this one any more
                _forget()
            else:
                with contextlib.suppress(BrokenPipeError):  # the parent no longer waits; the next read ends this rank
                    connection.send_bytes(_answer(rank, setting, task))
            del setting, task


def _die_with_the_parent() -> None:
    """No orphan stays behind, even if pytest is killed while this rank waits in a collective."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
    os._exit(1)


def _answer(rank: int, setting: Setting, task: bytes | Callable[[], tuple]) -> bytes:
    """("result", what the task gives) or ("error", message, traceback), pickled."""
    try:
        return pickle.dumps(("result", _call(rank, setting, task)))
    except BaseException as error:
        return pickle.dumps(("error", f"{type(error).__name__}: {error}", traceback.format_exc()))


def _call(rank: int, setting: Setting, task: bytes | Callable[[], tuple]) -> Any:
    import torch
    import torch.distributed as dist

    world_size, store, timeout = setting
    # unpickling imports modules: before the rendezvous, so that no rank waits for it in a collective
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


def _forget() -> None:
    """Undo what the last task left behind: groups, default dtype, gradient mode."""
    import torch
    import torch.distributed as dist

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
