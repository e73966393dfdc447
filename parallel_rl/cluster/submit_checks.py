"""Checks of a job before it is queued: settings that fail on the nodes, or prevent saving and requeueing."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

_SIGNAL = re.compile(r"(?:([RB]+):)?(\w+)(?:@(\d+))?")
_USR1 = ("USR1", "SIGUSR1", "10")
_DEFAULT_NOTICE = 60  # seconds: sbatch's, and Slurm's precision
_LOOPBACK = re.compile(r"localhost.*|127\..*|::1|ip6-.*")
_LOCAL = ("/tmp", "/var/tmp", "/dev/shm", "/run")  # nosec B108 # folders to warn of
_NETWORK = re.compile(r"nfs.*|lustre|gpfs|beegfs|ceph|fuse\..*|cifs|smb.*|9p|virtiofs|panfs|wekafs|afs|pvfs2|orangefs")


def notice_of(signal: str) -> int:
    """Return the seconds before the time limit at which Slurm sends the signal of --signal.

    >>> notice_of("B:USR1@300"), notice_of("B:USR1")
    (300, 60)
    """
    match = _SIGNAL.fullmatch(signal)
    return int(match[3]) if match is not None and match[3] else _DEFAULT_NOTICE


def check_requeue(words: Sequence[str], site: Mapping[str, str]) -> None:
    """Refuse a job that may not be requeued, by --no-requeue or SBATCH_NO_REQUEUE, with a ValueError."""
    last = [
        word for word in words if word == "--requeue" or (word.startswith("--no-r") and "--no-requeue".startswith(word))
    ]
    if last[-1:] == ["--requeue"] or not (last or "SBATCH_NO_REQUEUE" in site):
        return
    raise ValueError(
        f"{'--sbatch --no-requeue' if last else 'SBATCH_NO_REQUEUE'} is incompatible with this job: at its time limit the run "
        "would save, and end with steps left. Leave it out; MAX_RESTARTS=0 keeps the job from starting again"
    )


def check_signal(signal: str, limit: int | None) -> None:
    """Refuse a --signal such as "B:USR1@600" that does not let the run save and be requeued.

    ValueError: a signal other than USR1, sent to the ranks, or a notice as long as the limit.
    """
    match = _SIGNAL.fullmatch(signal.upper())
    if match is None:
        raise ValueError(f"--signal {signal} is not valid; write --signal B:USR1@SECONDS")
    notice = notice_of(signal)
    cure = f"write --signal B:USR1@{notice}"
    if match[2] not in _USR1:
        raise ValueError(
            f"--signal {signal} sends {match[2]}: the batch script would save nothing before the time limit and would not be "
            f"queued again; {cure}"
        )
    if "B" not in (match[1] or ""):
        raise ValueError(
            f"--signal {signal} has no B:, so Slurm would signal the ranks instead of the batch script: the signal would "
            f"kill the check before the start, or be lost during imports; {cure}"
        )
    if limit is not None and notice + _DEFAULT_NOTICE > limit:
        raise ValueError(
            f"--signal {signal} with a time limit of {limit} s: the signal would stop the run right after each start. Write "
            f"--signal B:USR1@{limit // 4}, or give a longer --time"
        )


def check_output(output: str | None, name: str) -> None:
    """Refuse a log folder that is missing or has a pattern (%j): the job would fail without a log."""
    if output is None:
        return
    folder = os.path.dirname(output).replace("%x", name)
    fails = "Slurm makes no folders, and the job would end at once without any log (JobLaunchFailure, 0:53)"
    if "%" in folder.replace("%u", "").replace("%%", ""):
        raise ValueError(
            f"--output {output}: its folder depends on the job; {fails}. Write the pattern in the file's name"
        )
    folder = folder.replace("%u", os.environ.get("USER", "%u")).replace("%%", "%")
    if folder and not os.path.isdir(folder):
        raise ValueError(f"--output {output}: the folder {folder} does not exist; {fails}. Make it: mkdir -p {folder}")


def check_site(nodes: int, servers: bool, site: Mapping[str, str]) -> tuple[str, ...]:
    """Return warnings of settings that may fail on the nodes; ValueError for one that certainly does."""
    return (*check_rendezvous(nodes, site), *filter(None, (check_python(site), check_container(site, servers))))


def check_python(site: Mapping[str, str]) -> str | None:
    """Return a warning if the job's Python is missing; ValueError if PYTHON names no program."""
    if site.get("CONTAINER_IMAGE"):
        return None  # it is the image's
    python = site.get("PYTHON")
    if python and shutil.which(python, path=site.get("PATH")) is None:
        raise ValueError(
            f"PYTHON = {python} ({_origin('PYTHON', site)}) is not a program on this host: the job would fail at its first "
            "command. Name the python of an environment that all nodes see"
        )
    default = Path.cwd() / ".venv/bin/python"
    if python or os.access(default, os.X_OK):
        return None
    return (
        f"{default} does not exist, so the job would fail at its first command: run make install, or set "
        "PYTHON=/path/to/python"
    )


def check_rendezvous(nodes: int, site: Mapping[str, str]) -> list[str]:
    """Return warnings of an inherited rendezvous; ValueError if several nodes each name themselves."""
    address = site.get("MASTER_ADDR")
    if nodes > 1 and address and _LOOPBACK.fullmatch(address.lower()):
        raise ValueError(
            f"MASTER_ADDR = {address} ({_origin('MASTER_ADDR', site)}): each of {nodes} nodes would wait for the others on "
            "its own loopback address, and the job would fail after GATE_SECONDS. Unset it to use the job's first node"
        )
    return [
        f"{name} = {site[name]} ({_origin(name, site)}): the ranks meet there, and not {instead}; unset it unless you mean it"
        for name, instead in (
            ("MASTER_ADDR", "at the job's first node"),
            ("MASTER_PORT", "at a port of the job's own"),
        )
        if site.get(name)
    ]


def check_shared(name: str, folder: str, nodes: int) -> str | None:
    """Return a warning if the folder of a setting probably differs between nodes."""
    path = os.path.realpath(folder)
    roots = [root for root in (*_LOCAL, os.environ.get("TMPDIR", "")) if root]
    root = next(
        (root for root in roots if path == root or path.startswith(os.path.join(os.path.realpath(root), ""))), None
    )
    if nodes == 1 or root is None or _NETWORK.fullmatch(_file_system(path)):
        return None
    return (
        f"{name} = {folder} is below {root}, which each node usually has for itself: {nodes} nodes would each write a part of "
        "the checkpoints and logs, and no restart could read them. Choose a folder that all nodes see"
    )


def check_container(site: Mapping[str, str], servers: bool) -> str | None:
    """Return a warning if srun lacks the option for the site's container image."""
    names = ("CONTAINER_IMAGE", *(("SERVER_CONTAINER_IMAGE",) if servers else ()))
    name = next((name for name in names if site.get(name)), None)
    if name is None or shutil.which("srun", path=site.get("PATH")) is None:
        return None
    done = subprocess.run(["srun", "--help"], capture_output=True, text=True, env=dict(site))  # nosec B603 B607 # fixed words
    if "--container-image" in done.stdout + done.stderr:
        return None
    return (
        f"{name} = {site[name]}, and srun on this host has no --container-image: without the pyxis plugin the job would fail "
        f"at its first command. Install pyxis, or unset {name} and set PYTHON to an environment's python"
    )


def _origin(name: str, site: Mapping[str, str]) -> str:
    return "of your shell" if os.environ.get(name) == site.get(name) else "of the site's file"


def _file_system(path: str) -> str:
    best, kind = "", ""
    try:
        mounts = Path("/proc/self/mounts").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    for line in mounts.splitlines():
        _, point, fs, *_ = line.split(" ")
        inside = path == point or path.startswith(os.path.join(point, ""))
        if inside and len(point) >= len(best):
            best, kind = point, fs
    return kind
