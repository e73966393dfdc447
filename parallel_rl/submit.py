"""The job of `parallel-rl submit`: the `sbatch` that one would type, with the site's settings, and its record by the run."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

# In a checkout a link to /slurm, in a wheel a copy of it.
_FILES = Path(__file__).parent / "slurm"
_SCRIPT = "train.sbatch"


@dataclass(frozen=True)
class Resources:
    """What a job asks for; what is None is the site's or the script's.

    Attributes:
        nodes: whole nodes.
        gpus_per_node: 0 on nodes without.
        ranks_per_node: processes on each; one a GPU where it is None.
        time: the limit, as sbatch takes it ("8:00:00").
        options: more of sbatch's, by their long names.
    """

    nodes: int
    gpus_per_node: int | None = None
    ranks_per_node: int | None = None
    time: str | None = None
    options: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, least in (("nodes", 1), ("gpus_per_node", 0), ("ranks_per_node", 1)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"--{name.replace('_', '-')} {value} must be at least {least}")


@dataclass(frozen=True)
class Job:
    """A job to submit: sbatch's arguments, what of its environment is not the caller's own, and how many ranks it has."""

    command: tuple[str, ...]
    environment: Mapping[str, str]
    world: int

    def __str__(self) -> str:
        """As one would type it."""
        given = [f"{name}={shlex.quote(value)}" for name, value in sorted(self.environment.items())]
        return " ".join([*given, shlex.join(self.command)])


def plan(resources: Resources, arguments: Sequence[str]) -> Job:
    """The job that trains with `arguments`, those of `parallel-rl train`, from the present folder.

    Raises:
        ValueError: site settings that cannot be read; nodes without GPUs for which nobody says how many ranks they have.
    """
    here = Path("slurm")
    files = here if (here / _SCRIPT).is_file() and (here / _SCRIPT).samefile(_FILES / _SCRIPT) else _FILES
    site = _site(Path(os.environ.get("SITE_CONF", files / "site.conf")))
    environment = {name: value for name, value in site.items() if name.startswith("SBATCH_")}
    if files != here:
        environment["JOB_FILES"] = str(files)
    ranks = resources.ranks_per_node
    if ranks is not None:
        environment["NPROC_PER_NODE"] = str(ranks)
    else:
        ranks = int(site.get("NPROC_PER_NODE") or os.environ.get("NPROC_PER_NODE") or _gpus(resources, site))
    if ranks < 1:
        raise ValueError("there are no GPUs on a node, hence no ranks; add --ranks-per-node N")
    options = {"nodes": resources.nodes, "gpus-per-node": resources.gpus_per_node, "time": resources.time}
    given = {**{name: str(value) for name, value in options.items() if value is not None}, **resources.options}
    flags = [f"--{name}={value}" for name, value in given.items()]
    return Job(("sbatch", *flags, str(files / _SCRIPT), *arguments), environment, resources.nodes * ranks)


def submit(job: Job, folder: Path, config: str) -> str:
    """Submits the job, and keeps its command, its script's files and its config in a new folder below the run's.

    Args:
        folder: the run's, `run.dir`.
        config: the whole config in YAML, for the record.

    Returns:
        what sbatch said.

    Raises:
        ValueError: there is no sbatch, or it refuses; nothing is written then.
    """
    environment = {**os.environ, **job.environment}
    try:
        done = subprocess.run(job.command, env=environment, capture_output=True, text=True)
    except FileNotFoundError:
        raise ValueError("sbatch is not there: submit from a host of a Slurm cluster, or add --dry-run") from None
    if done.returncode:
        raise ValueError(f"sbatch refuses: {done.stderr.strip()}")
    said = done.stdout.strip()
    number = "".join(re.findall(r"\d+", said)[:1])
    record = folder / "submitted" / f"{datetime.now():%Y%m%d-%H%M%S}-{number}"
    record.mkdir(parents=True)
    (record / "command.sh").write_text(f"cd {shlex.quote(os.getcwd())}\n{job}\n", encoding="utf-8")
    (record / "config.yaml").write_text(config, encoding="utf-8")
    for path in (_FILES / name for name in (_SCRIPT, "env.sh", "site.conf", "torchrun.py")):
        (record / path.name).write_bytes(path.read_bytes())
    return f"{said}; its command, config and script are in {record}"


def _gpus(resources: Resources, site: Mapping[str, str]) -> int:
    """GPUs of a node: as sbatch would have it, from its options, the environment or the script."""
    if resources.gpus_per_node is not None:
        return resources.gpus_per_node
    found = re.search(r"^#SBATCH --gpus-per-node=(\S+)$", (_FILES / _SCRIPT).read_text(encoding="utf-8"), re.MULTILINE)
    assert found is not None
    text = site.get("SBATCH_GPUS_PER_NODE") or found[1]
    count = text.rpartition(":")[2]  # "h100:8" names a type
    if not count.isdigit():
        raise ValueError(f"SBATCH_GPUS_PER_NODE = {text!r} is not valid; a number is needed, or TYPE:NUMBER")
    return int(count)


def _site(path: Path) -> dict[str, str]:
    """What the environment holds once the site's file is sourced, as the job will source it."""
    if not path.is_file():
        return dict(os.environ)
    shell = 'set -aeu; source "$1" >&2; exec env -0'
    done = subprocess.run(["bash", "-c", shell, "bash", str(path.absolute())], capture_output=True, text=True)
    if done.returncode:
        raise ValueError(f"{path} cannot be read by bash: {done.stderr.strip()}")
    return dict(item.split("=", 1) for item in done.stdout.split("\0") if "=" in item)
