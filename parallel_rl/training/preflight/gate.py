"""The gate before a long run: every rank is up, groups and pipeline neighbours communicate, a tiny step is right."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from parallel_rl.agreement import describe, raise_on_all_ranks
from parallel_rl.cluster.heartbeat import doing, tick
from parallel_rl.counts import count_valid
from parallel_rl.groups import ParallelGroups
from parallel_rl.losses import ClippedPGLossFn
from parallel_rl.megatron import initialize, padded_input
from parallel_rl.training.config.sections import ParallelConfig, data_parallel_size
from parallel_rl.training.config.train import TrainConfig
from parallel_rl.training.models.engine import start_world

_GRACE = 2.0  # seconds in which rank 0 tells the others
_MESSAGE = 1 << 16  # numbers that neighbours exchange: as many as take the way of activations
_TOLERANCE = 1e-10  # float64 on both sides; what differs is the order of sums


def pass_gate(config: TrainConfig, seconds: float) -> None:
    """Check that all of torchrun's ranks are up, the world and the layout's groups are formed, and one tiny step is right.

    What is not done in `seconds` ends this process with status 1 and names the ranks and hosts that are behind.

    Raises:
        ValueError: ranks or the rendezvous are missing; a world that does not match the layout.
        RuntimeError: groups or numbers that are wrong, see `tiny_step`.
    """
    began = time.monotonic()
    if (world := int(os.environ.get("WORLD_SIZE", "1"))) > 1:
        store = check_in(seconds)
        with _ends(store, "the process group was not formed", "world", seconds):
            start_world(config)
        with _ends(store, "the tiny step was not done", "step", seconds):
            tiny_step(config.parallel)
    else:
        start_world(config)
        tiny_step(config.parallel)
    if dist.get_rank() == 0:
        took = time.monotonic() - began
        print(f"gate: {world} ranks are up, a tiny step has the numbers of one process ({took:.1f} s)", flush=True)


def check_in(seconds: float) -> dist.Store:
    """Wait until every rank of torchrun's world has reported, before any process group; return their store.

    Raises:
        ValueError: some did not in `seconds`: which ranks, and on which host where Slurm tells; on all ranks alike.
    """
    end, world = time.monotonic() + seconds, int(os.environ["WORLD_SIZE"])
    try:
        store, rank, _ = next(dist.rendezvous("env://", timeout=timedelta(seconds=seconds)))
    except (dist.DistError, TimeoutError) as error:
        where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        raise ValueError(f"the rendezvous at {where} was not there in {seconds:g} s: {error}") from None
    store.set(f"gate/up/{rank}", "")
    if rank == 0:
        missing = _missing(store, "up", range(world))
        while missing and time.monotonic() < end:
            time.sleep(0.05)
            missing = _missing(store, "up", missing)
        store.set("gate/verdict", f"{_named(missing)} did not come up in {seconds:g} s" if missing else "")
    else:
        try:
            store.wait(["gate/verdict"], timedelta(seconds=seconds + _GRACE))
        except (dist.DistError, TimeoutError):
            raise ValueError(f"{_named([0])} did not come up in {seconds:g} s") from None
    if verdict := store.get("gate/verdict").decode():
        raise ValueError(verdict)
    return store


def tiny_step(config: ParallelConfig) -> None:
    """Forms the groups of the layout, has pipeline neighbours exchange, and compares the loss of a few tokens and its gradient
    with one process's.

    Raises:
        RuntimeError: a rank found a group of another size, a neighbour that it cannot exchange with, or other numbers; on all
            ranks.
    """
    tick("forming the groups")
    initialize(config.tensor, config.context, config.pipeline)
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    groups, ranks = ParallelGroups.from_megatron(), data_parallel_size(config, dist.get_world_size())
    pipeline = parallel_state.get_pipeline_model_parallel_group()
    ones = torch.ones(1, device=device)
    tick("summing over the groups")
    sizes = {"tensor": groups.tensor, "context": groups.context, "data": groups.data, "pipeline": pipeline}
    sums = {name: _sum(ones, group) for name, group in sizes.items()}
    wanted = {"tensor": config.tensor, "context": config.context, "data": ranks, "pipeline": config.pipeline}
    broken = _exchange(pipeline, device)
    tick("comparing a tiny step")

    rows, width, vocab = 2 * ranks, 8 * config.context, 4 * config.tensor
    generator = torch.Generator("cpu").manual_seed(0)
    logits = torch.randn(rows, width, vocab, dtype=torch.float64, generator=generator).to(device)
    data = {
        "input_ids": torch.randint(0, vocab, (rows, width), generator=generator),
        "token_mask": torch.rand(rows, width, generator=generator, dtype=torch.float64).round(),
        "sample_mask": torch.ones(rows, dtype=torch.float64),
        **{
            name: torch.randn(rows, width, generator=generator, dtype=torch.float64)
            for name in ("advantages", "prev_logprobs", "generation_logprobs", "reference_policy_logprobs")
        },
    }
    data = {name: value.to(device) for name, value in data.items()}
    loss_fn = ClippedPGLossFn({"reference_policy_kl_penalty": 0.1}, vocab_size=vocab)

    whole = logits.clone().requires_grad_()
    expected, _ = loss_fn(whole, data, *count_valid([data], None))
    expected.backward()

    mine = slice(2 * groups.dp_rank, 2 * groups.dp_rank + 2)
    columns = slice(4 * groups.tp_rank, 4 * groups.tp_rank + 4)
    positions = torch.arange(width, device=device).expand(2, width)
    local = padded_input(positions).tokens[0]  # of this context rank
    part = logits[mine][:, local, columns].clone().requires_grad_()
    share = {name: value[mine] for name, value in data.items()}
    loss, _ = loss_fn(part, share, *count_valid([share], groups.data), groups.tp_rank, groups.tensor, groups.context)
    loss.backward()
    total = _sum(_sum(loss.detach()[None], groups.context), groups.data)
    assert part.grad is not None and whole.grad is not None
    errors = [(total - expected.detach()).abs().max(), (part.grad - whole.grad[mine][:, local, columns]).abs().max()]

    def verdict() -> None:
        if broken:
            raise RuntimeError(broken)
        for name, size in wanted.items():
            if float(sums[name]) != size:
                raise RuntimeError(f"the {name} group has {float(sums[name]):g} ranks in place of {size}")
        for what, error in zip(("loss", "gradient"), errors, strict=True):
            if not float(error) <= _TOLERANCE:
                raise RuntimeError(f"the {what} of a tiny step is {float(error):.1e} off a single process's")

    raise_on_all_ranks(verdict, what="the gate before the run")


@contextlib.contextmanager
def _ends(store: dist.Store, what: str, stage: str, seconds: float) -> Iterator[None]:
    """Ends the process where what is inside hangs: a collective that a rank does not come to would wait far longer."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])

    def end() -> None:
        behind = _missing(store, f"{stage}/begun", range(world))
        who = f"{_named(behind)} did not begin" if behind else f"{_named(_missing(store, stage, range(world)))} hang"
        text = f"{what} in {seconds:g} s: {who}; this rank was {doing()}"
        print(f"parallel-rl: error (rank {rank}): {text}", file=sys.stderr, flush=True)
        os._exit(1)

    tick("forming the world")
    store.set(f"gate/{stage}/begun/{rank}", "")
    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
    store.set(f"gate/{stage}/{rank}", "")


def _missing(store: dist.Store, stage: str, ranks: Iterable[int]) -> list[int]:
    return [rank for rank in ranks if not store.check([f"gate/{stage}/{rank}"])]


def _exchange(pipeline: dist.ProcessGroup, device: torch.device) -> str:
    """Send each rank's number to its pipeline neighbours and back, as activations and gradients go; return what went wrong."""
    ranks, place, rank = dist.get_process_group_ranks(pipeline), dist.get_rank(pipeline), dist.get_rank()
    wrong = []
    for turn in (0, 1):  # pairs that share no rank at a time, so that a broken one holds up no other
        there = place + (1 if (place + turn) % 2 == 0 else -1)
        if not 0 <= there < len(ranks):
            continue
        peer = ranks[there]
        tick(f"exchanging with rank {peer}, its neighbour in the pipeline")
        sent = torch.full((_MESSAGE,), float(rank), device=device)
        received = torch.full_like(sent, -1.0)
        ways = [dist.P2POp(dist.isend, sent, peer, pipeline), dist.P2POp(dist.irecv, received, peer, pipeline)]
        try:
            for work in dist.batch_isend_irecv(ways):
                work.wait()
            if not bool((received == peer).all()):
                wrong.append(f"rank {rank} did not get from its pipeline neighbour rank {peer} what that sent")
        except RuntimeError as error:
            wrong.append(f"rank {rank} cannot exchange with its pipeline neighbour rank {peer}: {describe(error)}")
    return "; ".join(wrong)


def _sum(values: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    total = values.clone()
    if group is not None:
        dist.all_reduce(total, group=group)
    return total


def _named(ranks: Sequence[int]) -> str:
    """Ranks, with their nodes where torchrun's numbering and Slurm tell them."""
    text = f"rank {', '.join(map(str, ranks))}"
    size = os.environ.get("LOCAL_WORLD_SIZE")
    hosts = os.environ.get("PARALLEL_RL_HOSTS", "").split()
    if size is None or not hosts:
        return text
    nodes = sorted({rank // int(size) for rank in ranks})
    return f"{text} (on {', '.join(hosts[node] for node in nodes if node < len(hosts))})"
