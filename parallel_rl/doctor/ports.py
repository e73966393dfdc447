"""Check the addresses of a run: the rendezvous, and the servers of its config."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from urllib.parse import urlsplit

from parallel_rl.doctor.findings import Finding

_SECONDS = 3.0
_DEFAULT = "29500"  # torchrun's


def ask_ports(urls: Sequence[str], environment: Mapping[str, str] = os.environ) -> Iterator[Finding]:
    """Check that the rendezvous answers in a job, or is free before one, and that servers answer.

    >>> [finding.severity for finding in ask_ports(["http://127.0.0.1:9"], {"MASTER_PORT": "0"})]
    ['error', 'warning']
    """
    host, port = environment.get("MASTER_ADDR", "127.0.0.1"), environment.get("MASTER_PORT", _DEFAULT)
    if not (port.isdecimal() and 0 < int(port) < 65536):
        yield Finding("MASTER_PORT", "error", f"{port} is not a port", "give a number from 1 to 65535")
    elif "RANK" in environment:
        fault = _refused(host, int(port))
        advice = "torchrun's store listens there: look at rank 0's host, its name on this one and its firewall"
        yield Finding(
            "rendezvous", "error" if fault else "ok", f"{host}:{port} {fault or 'answers'}", advice if fault else ""
        )
    else:
        yield _free(host, port, "MASTER_PORT" in environment)
    for url in urls:
        parts = urlsplit(url)
        fault = _refused(parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80))
        advice = "start it before the run, or correct the address in the config: the run would wait for it"
        yield Finding("server", "warning" if fault else "ok", f"{url} {fault or 'answers'}", advice if fault else "")


def _refused(host: str, port: int) -> str:
    try:
        with socket.create_connection((host, port), timeout=_SECONDS):
            return ""
    except OSError as error:
        return f"cannot be reached: {error.strerror or error}"


def _free(host: str, port: str, is_set: bool) -> Finding:
    """Check that a rendezvous could listen here, if the host is this one."""
    try:
        address = socket.gethostbyname(host)
    except OSError as error:
        return Finding(
            "MASTER_ADDR", "error", f"{host} has no address: {error.strerror or error}", "a name that all resolve"
        )
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address, int(port)))
        except OSError as error:
            if error.errno == errno.EADDRNOTAVAIL:  # another host's address
                return Finding(
                    "MASTER_PORT", "note", f"{host} is another host: whether {port} is free there shows in the job"
                )
            name = "MASTER_PORT" if is_set else "torchrun's port"
            return Finding(
                name, "error" if is_set else "note", f"{port} is taken: {error.strerror}",
                "export another MASTER_PORT, or torchrun --master-port / --standalone",
            )  # fmt: skip
    return Finding("MASTER_PORT" if is_set else "torchrun's port", "ok", f"{port} is free")
