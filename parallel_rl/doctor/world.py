"""The ranks of a job under torchrun or srun: hosts, clocks, and the speed of communication in each group."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist

from parallel_rl.doctor import Finding, Severity
from parallel_rl.groups import job_backend, take_device

_SMALL, _LARGE = 50, 5  # calls that are timed
_BYTES = 1 << 24


class Sizes(NamedTuple):
    """Sizes of a layout; the rest of the world is data parallel."""

    tensor: int = 1
    context: int = 1
    pipeline: int = 1

    def groups(self, world: int) -> dict[str, list[list[int]]]:
        """List the ranks of each group in Megatron's order: tensor, context, data, pipeline.

        >>> Sizes(tensor=2).groups(4)
        {'tensor': [[0, 1], [2, 3]], 'data': [[0, 2], [1, 3]]}

        Raises:
            ValueError: a size below 1, or a world that they do not divide.
        """
        rest, remainder = divmod(world, self.tensor * self.context * self.pipeline) if min(self) > 0 else (0, 1)
        if remainder or not rest:
            text = " × ".join(f"{name} {size}" for name, size in self._asdict().items())
            raise ValueError(f"{world} ranks cannot be laid out as {text}: sizes of at least 1 must divide them")
        ranks = torch.arange(world).view(self.pipeline, rest, self.context, self.tensor)
        names = ("pipeline", "data", "context", "tensor")
        groups = {name: ranks.movedim(at, -1).flatten(0, -2).tolist() for at, name in enumerate(names)}
        return {name: groups[name] for name in reversed(names) if len(groups[name][0]) > 1}


def ask_groups(sizes: Sizes, hosts: Sequence[str], device: torch.device, timeout: float) -> Iterator[Finding]:
    """Time groups of a kind together, as a step uses them; yield the slowest rank's numbers."""
    for name, lists in sizes.groups(dist.get_world_size()).items():
        mine = None
        for ranks in lists:
            group = dist.new_group(ranks, timeout=timedelta(seconds=timeout))
            mine = group if dist.get_rank() in ranks else mine
        assert mine is not None
        way = _pass_on if name == "pipeline" else dist.all_reduce
        yield _speed(name, mine, way, device, max(len({hosts[rank] for rank in ranks}) for ranks in lists))


def ask_world_speed(device: torch.device) -> Finding:
    assert dist.group.WORLD is not None
    return _speed("world", dist.group.WORLD, dist.all_reduce, device, 0)


def _speed(
    name: str, group: dist.ProcessGroup, way: Callable[..., object], device: torch.device, hosts: int
) -> Finding:
    ranks = dist.get_world_size(group)
    small, large = torch.zeros(1, device=device), torch.zeros(_BYTES // 4, device=device)
    for tensor in (small, large):
        way(tensor, group=group)  # the first one makes connections
    both = torch.tensor([_timed(way, small, group, _SMALL), _timed(way, large, group, _LARGE)], device=device)
    dist.all_reduce(both, dist.ReduceOp.MAX)
    latency, seconds = both.tolist()
    kind = "neighbours' messages" if name == "pipeline" else "all-reduce"
    moved = _BYTES if name == "pipeline" else 2 * (ranks - 1) / ranks * _BYTES
    text = f"{kind} over {ranks} ranks: {1e6 * latency:.0f} µs for 4 bytes, {moved / seconds / 1e9:.2f} GB/s a rank for 16 MiB"
    if name == "tensor" and hosts > 1:
        return Finding(
            f"{name} group", "warning", f"{text}; it spans {hosts} hosts",
            "a layer waits for it several times: tensor ranks belong on one host",
        )  # fmt: skip
    return Finding(name if name == "world" else f"{name} group", "ok", text)


def _pass_on(tensor: torch.Tensor, *, group: dist.ProcessGroup) -> None:
    """Send to the next rank of the group, and receive from the previous one."""
    ranks, place = dist.get_process_group_ranks(group), dist.get_rank(group)
    after, before = ranks[(place + 1) % len(ranks)], ranks[place - 1]
    received = torch.empty_like(tensor)
    ways = [dist.P2POp(dist.isend, tensor, after, group), dist.P2POp(dist.irecv, received, before, group)]
    for work in dist.batch_isend_irecv(ways):
        work.wait()


def _timed(way: Callable[..., object], tensor: torch.Tensor, group: dist.ProcessGroup, calls: int) -> float:
    _wait(tensor)
    dist.barrier()
    start = time.perf_counter()
    for _ in range(calls):
        way(tensor, group=group)
    _wait(tensor)
    return (time.perf_counter() - start) / calls


def _wait(tensor: torch.Tensor) -> None:
    if tensor.is_cuda:
        torch.cuda.synchronize(tensor.device)


MOST_SKEW = 1.0  # seconds between clocks, beyond which logs and time limits mislead
_TIMEOUT = 120.0  # seconds of a collective


def ask_world(sizes: Sizes, of_host: Sequence[Finding] = ()) -> Iterator[Finding]:
    """Join the job's ranks and probe them and each group of a layout; yield findings of all ranks.

    Raises:
        ValueError: sizes that do not divide the world; no torchrun or srun job; `job_backend` refuses this machine.
    """
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        raise ValueError("RANK and WORLD_SIZE are not set: start it by torchrun or srun, or leave --world out")
    sizes.groups(int(os.environ["WORLD_SIZE"]))  # before any rank waits for another
    backend, device = job_backend(), take_device()
    dist.init_process_group(backend, timeout=timedelta(seconds=_TIMEOUT))
    try:
        hosts: list[str] = [""] * dist.get_world_size()
        dist.all_gather_object(hosts, socket.gethostname())
        yield _hosts(hosts)
        yield from _elsewhere(hosts, of_host)
        yield _clocks(device)
        yield ask_world_speed(device)
        yield from ask_groups(sizes, hosts, device, _TIMEOUT)
    finally:
        dist.destroy_process_group()


def _hosts(hosts: list[str]) -> Finding:
    counts = {host: hosts.count(host) for host in dict.fromkeys(hosts)}
    text = ", ".join(f"{host} ({count} ranks)" for host, count in counts.items())
    if len(set(counts.values())) > 1:
        return Finding(
            "hosts", "warning", text, "nodes have different numbers of ranks: tensor ranks may be split over nodes"
        )
    return Finding("hosts", "ok", text)


def _elsewhere(hosts: Sequence[str], of_host: Sequence[Finding]) -> Iterator[Finding]:
    """Report findings of other hosts that rank 0's host lacks; only rank 0's are printed."""
    every: list[Sequence[Finding]] = [()] * len(hosts)
    dist.all_gather_object(every, of_host)
    where: dict[Finding, list[str]] = {}
    for host, findings in zip(hosts, every, strict=True):
        for finding in findings:
            where.setdefault(finding, []).append(host)
    for finding, finding_hosts in where.items():
        if finding not in every[0]:
            text = f"{finding.text} on {', '.join(dict.fromkeys(finding_hosts))}, and not on {hosts[0]}"
            severity: Severity = "error" if finding.severity == "error" else "warning"
            yield Finding(
                finding.subject, severity, text, finding.advice or "hosts of one job need the same stack and settings"
            )


def _clocks(device: torch.device) -> Finding:
    """Compare clocks right after a barrier; the difference includes the barrier's own."""
    dist.barrier()
    mine = torch.tensor([time.time()], dtype=torch.float64, device=device)
    every = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(every, mine)
    apart = float(torch.stack(every).max() - torch.stack(every).min())
    advice = "logs of nodes cannot be read side by side; start chrony or ntpd"
    return Finding(
        "clocks",
        "warning" if apart > MOST_SKEW else "ok",
        f"{1e3 * apart:.1f} ms apart",
        advice if apart > MOST_SKEW else "",
    )
