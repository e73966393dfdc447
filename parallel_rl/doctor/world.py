"""The ranks of a job under torchrun or srun: hosts, clocks, and how fast their collectives are."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from parallel_rl.doctor.findings import Finding, Severity
from parallel_rl.doctor.links import Sizes, ask_groups, ask_world_speed
from parallel_rl.groups import job_backend, take_device

MOST_SKEW = 1.0  # seconds between clocks, beyond which logs and time limits mislead
_TIMEOUT = 120.0  # seconds of a collective


def ask_world(sizes: Sizes, of_host: Sequence[Finding] = ()) -> Iterator[Finding]:
    """Join the job's ranks and probe them, and each group of a layout; every rank yields what all found.

    Args:
        sizes: of the layout.
        of_host: what this rank has found on its host.

    Raises:
        ValueError: sizes that do not divide the world; no job: neither torchrun nor srun with torch's variables started this
            process; `job_backend` refuses this machine.
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
    each = {host: hosts.count(host) for host in dict.fromkeys(hosts)}
    text = ", ".join(f"{host} ({count} ranks)" for host, count in each.items())
    if len(set(each.values())) > 1:
        return Finding(
            "hosts", "warning", text, "nodes have different numbers of ranks: tensor ranks may be split over nodes"
        )
    return Finding("hosts", "ok", text)


def _elsewhere(hosts: Sequence[str], of_host: Sequence[Finding]) -> Iterator[Finding]:
    """Tell what was found on other hosts and not on that of rank 0, whose findings alone are shown."""
    every: list[Sequence[Finding]] = [()] * len(hosts)
    dist.all_gather_object(every, of_host)
    where: dict[Finding, list[str]] = {}
    for host, found in zip(hosts, every, strict=True):
        for each in found:
            where.setdefault(each, []).append(host)
    for each, there in where.items():
        if each not in every[0]:
            text = f"{each.text} on {', '.join(dict.fromkeys(there))}, and not on {hosts[0]}"
            severity: Severity = "error" if each.severity == "error" else "warning"
            yield Finding(
                each.subject, severity, text, each.advice or "hosts of one job need the same stack and settings"
            )


def _clocks(device: torch.device) -> Finding:
    """Clocks right after a barrier: what remains is their difference and the barrier's own."""
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
