"""Plan, submit and record the job of `parallel-rl submit`: an `sbatch` command with the site's settings."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

from parallel_rl.cluster import submit_checks

# In a checkout a link to /slurm, in a wheel a copy of it.
_FILES = Path(__file__).parents[1] / "slurm"
_SCRIPT = "train.sbatch"
_BESIDE = "with_server.sbatch"
_RECORDED = (_SCRIPT, _BESIDE, "cause.sh", "env.sh", "job.sh", "server.sh", "site.conf", "torchrun.py")
# sbatch options that also apply to server nodes
_SHARED = ("account", "partition", "qos", "reservation", "constraint", "cpus-per-task", "gpus-per-node", "time")
# what env.sh (${NAME:-...}), sbatch and the ranks' libraries take from the shell
_SETTING = re.compile(r"\$\{([A-Z_]+):?[-+]")
_LIBRARIES = ("SBATCH_", "NCCL_", "GLOO_", "TORCH_NCCL_")
_GRES = re.compile(r"^--gres=(?:.*,)?gpu(?::[A-Za-z]\w*)?(?::(\d+))?(?:,|$)")
# options that `submit` reads, by each of their names in sbatch
_READ = ("nodes", "N", "time", "t", "gpus-per-node", "signal", "output", "o", "job-name", "J", "array", "a")
_SHORT = 40 * 60  # seconds: below, the script's ten minutes would be more than a quarter of the limit
_TIME = re.compile(r"(?:(\d+)-(\d+)(?::(\d+))?(?::(\d+))?|(\d+)(?::(\d+))?(?::(\d+))?)")


@dataclass(frozen=True)
class Resources:
    """Resources of a job; None leaves a value to the site or the script.

    Attributes:
        nodes, servers: whole nodes for training and, one each, for servers.
        gpus_per_node: 0 on nodes without. ranks_per_node: None: one a GPU.
        time: the limit, as sbatch takes it ("8:00:00").
        options, words: sbatch's, by their long names, and literal, such as "--mail-type=END".
        server_command: starts a server, in a shell, at $HOST and $PORT.
    """

    nodes: int
    gpus_per_node: int | None = None
    ranks_per_node: int | None = None
    time: str | None = None
    options: Mapping[str, str] = field(default_factory=dict)
    words: Sequence[str] = ()
    servers: int = 0
    server_command: str | None = None

    def __post_init__(self) -> None:
        for name, least in (("nodes", 1), ("gpus_per_node", 0), ("ranks_per_node", 1), ("servers", 0)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"--{name.replace('_', '-')} {value} must be at least {least}")
        for name, text in {"time": self.time, **self.options}.items():
            if text is not None and not text.strip():
                raise ValueError(f"--{name} has no value; leave it out, or give one")
        cpus = self.options.get("cpus-per-task")
        if cpus is not None and not re.fullmatch("[1-9][0-9]*", cpus):
            raise ValueError(f"--cpus-per-task {cpus} is not valid; a number of cores, at least 1, is needed")
        if self.servers and "array" in self.options:
            raise ValueError(
                "--array is incompatible with --server-nodes: Slurm has no arrays of jobs with two kinds of nodes"
            )
        names = {
            word[2:].partition("=")[0] if word[:2] == "--" else word[1:2] for word in self.words if word[:1] == "-"
        }
        if self.words and not self.words[0].startswith("-"):
            raise ValueError(
                f"--sbatch {shlex.join(self.words)} must begin with an option of sbatch, such as --gres=gpu:8"
            )
        for name in (*_READ, *self.options):
            if name in names:
                raise ValueError(f"--sbatch has {name}, which `submit` reads itself; give it once, outside of --sbatch")

    @property
    def gpus(self) -> int | None:
        """Return the GPUs of a node, from --gpus-per-node or from --gres=gpu[:TYPE]:N among `words`."""
        matches = [match for word in self.words if (match := _GRES.search(word))]
        if self.gpus_per_node is None and matches:
            return int(matches[-1][1] or 1)
        return self.gpus_per_node


@dataclass(frozen=True)
class Job:
    """A job to submit.

    Attributes:
        command: sbatch and its arguments. environment: settings for the job.
        world: its number of ranks.
        logs, log_dir: the job's logs, and the folder of the ranks' logs.
        warnings: likely failures on its nodes.
    """

    command: tuple[str, ...]
    environment: Mapping[str, str]
    world: int
    logs: str
    log_dir: str
    warnings: tuple[str, ...]

    def __str__(self) -> str:
        """Render the command as a user would type it."""
        settings = [f"{name}={shlex.quote(value)}" for name, value in sorted(self.environment.items())]
        return " ".join([*settings, shlex.join(self.command)])


def plan(resources: Resources, arguments: Sequence[str]) -> Job:
    """Plan the job that trains with `arguments` of `parallel-rl train`, from the present folder.

    ValueError: unreadable or overriding site settings, an invalid time limit, no GPUs or ranks, more ranks than GPUs, and what
    `submit_checks` refuses.
    """
    here = Path("slurm")
    files = here if (here / _SCRIPT).is_file() and (here / _SCRIPT).samefile(_FILES / _SCRIPT) else _FILES
    settings = _settings()
    if files != here or "JOB_FILES" in settings:
        settings["JOB_FILES"] = str(files)
    if resources.ranks_per_node is not None:
        settings["NPROC_PER_NODE"] = str(resources.ranks_per_node)
    if resources.server_command is not None:
        settings["SERVER_COMMAND"] = resources.server_command
    path = Path(os.environ.get("SITE_CONF") or files / "site.conf")
    site = _site(path, settings)
    if (export := site.get("SBATCH_EXPORT", "ALL")).split(",")[0] != "ALL":
        raise ValueError(
            f"SBATCH_EXPORT = {export} keeps the settings from the job; unset it, or let it begin with ALL"
        )
    options = {"nodes": resources.nodes, "gpus-per-node": resources.gpus, "time": resources.time}
    flags = {**{name: str(value) for name, value in options.items() if value is not None}, **resources.options}
    limit = seconds(resources.time or site.get("SBATCH_TIMELIMIT") or "24:00:00")
    if limit is not None and limit < _SHORT and "signal" not in flags and "SBATCH_SIGNAL" not in site:
        flags["signal"] = f"B:USR1@{limit // 4}"
    elif signal := flags.get("signal") or site.get("SBATCH_SIGNAL"):
        submit_checks.check_signal(signal, limit)
    if signal := flags.get("signal") or site.get("SBATCH_SIGNAL"):
        settings["NOTICE_SECONDS"] = str(submit_checks.notice_of(signal))
    options_of_sbatch = (*(f"--{name}={value}" for name, value in flags.items()), *resources.words)
    if bool(resources.servers) != bool(site.get("SERVER_COMMAND")):
        raise ValueError(
            f"--server-nodes {resources.servers}, and SERVER_COMMAND is {site.get('SERVER_COMMAND') or ''!r}: servers need "
            "both, --server-nodes M and --server-command"
        )
    beside = [f"--{name}={value}" for name, value in flags.items() if name in _SHARED] if resources.servers else []
    beside = [":", f"--nodes={resources.servers}", *beside] if resources.servers else []
    script = _BESIDE if resources.servers else _SCRIPT
    command = ("sbatch", *options_of_sbatch, *beside, str(files / script), *arguments)
    environment = settings | {name: value for name, value in site.items() if name.startswith("SBATCH_")}
    world = resources.nodes * _ranks(resources, site, path)
    submit_checks.check_requeue(resources.words, site)
    submit_checks.check_output(flags.get("output") or site.get("SBATCH_OUTPUT"), _name(flags, site))
    warnings = submit_checks.check_site(resources.nodes, bool(resources.servers), site)
    return Job(command, environment, world, _logs(flags, site), site.get("LOG_DIR") or "runs/slurm", warnings)


def submit(job: Job, folder: Path, texts: Mapping[str, str]) -> str:
    """Submit the job, and return sbatch's answer with the places of record and logs.

    Writes the record (command, script, config, and `texts` by file name) first, in a new folder below the run's `folder`.
    ValueError without sbatch, or if it refuses; the record is then removed.
    """
    when = folder / "submitted" / f"{datetime.now():%Y%m%d-%H%M%S}"
    record = Path(f"{when}-of-{os.getpid()}")
    created = [path for path in record.parents if not path.exists()]
    record.mkdir(parents=True)
    try:
        (record / "command.sh").write_text(f"cd {shlex.quote(os.getcwd())}\n{job}\n", encoding="utf-8")
        for name, text in texts.items():
            (record / name).write_text(text, encoding="utf-8")
        for name in _RECORDED:
            (record / name).write_bytes((_FILES / name).read_bytes())
        answer = _sbatch(job)
    except Exception:
        shutil.rmtree(record)
        with contextlib.suppress(OSError):  # another's is beside it
            for path in created:
                path.rmdir()
        raise
    number = "".join(re.findall(r"\d+", answer)[:1])
    record = record.rename(f"{when}-{number}")
    return f"{answer}; {job.logs.replace('%j', number)}; its command and what it runs are in {record}"


def seconds(time: str) -> int | None:
    """Read a limit (M, M:S, H:M:S, D-H, D-H:M, D-H:M:S) in seconds, in whole minutes; None: no limit.

    >>> seconds("8:00:00"), seconds("1-12"), seconds("unlimited")
    (28800, 129600, None)
    """
    if time.lower() in ("unlimited", "infinite"):
        return None
    match = _TIME.fullmatch(time)
    if match is None:
        raise ValueError(f"--time {time} is not valid; minutes, M:S, H:M:S, D-H, D-H:M or D-H:M:S is needed")
    days, hours, minutes, rest, *short = (int(part or 0) for part in match.groups())
    if match[1] is None:
        hours, minutes, rest = short if match[7] is not None else (0, *short[:2])
    return ((days * 24 + hours) * 60 + minutes + -(-rest // 60)) * 60 or None  # to sbatch, 0 is none


def _sbatch(job: Job) -> str:
    try:
        done = subprocess.run(job.command, env={**os.environ, **job.environment}, capture_output=True, text=True)  # nosec B603 # no shell
    except FileNotFoundError:
        raise ValueError(
            "sbatch is not on PATH: submit from a login node of a Slurm cluster, or add --dry-run"
        ) from None
    if done.returncode:
        raise ValueError(f"sbatch refuses: {done.stderr.strip()}{_on_offer()}")
    return done.stdout.strip()


def _on_offer() -> str:
    """List the cluster's partitions, if sinfo runs."""
    with contextlib.suppress(OSError):
        done = subprocess.run(  # nosec B603 B607 # fixed words; PATH has sinfo
            ["sinfo", "-h", "-o", "  %P %D nodes, each %c CPUs, %G, at most %l"], capture_output=True, text=True
        )
        if done.returncode == 0 and done.stdout.strip():
            return f"\navailable partitions:\n{done.stdout.rstrip()}"
    return ""


def _settings() -> dict[str, str]:
    """Collect the environment's settings that the job reads; another shell lacks them."""
    names = set(_SETTING.findall((_FILES / "env.sh").read_text(encoding="utf-8"))) | {"SITE_CONF", "JOB_FILES"}
    names = {name for name in names if not name.startswith("SLURM_")}
    return {name: value for name, value in os.environ.items() if name in names or name.startswith(_LIBRARIES)}


def _logs(flags: Mapping[str, str], site: Mapping[str, str]) -> str:
    batch = flags.get("output") or site.get("SBATCH_OUTPUT") or f"slurm-{_name(flags, site)}-%j.out"
    return f"its log is {batch}, the ranks' logs are in {site.get('LOG_DIR') or 'runs/slurm'}/%j"


def _name(flags: Mapping[str, str], site: Mapping[str, str]) -> str:
    return flags.get("job-name") or site.get("SBATCH_JOB_NAME") or "parallel-rl"


def _ranks(resources: Resources, site: Mapping[str, str], path: Path) -> int:
    wanted, held, gpus = resources.ranks_per_node, site.get("NPROC_PER_NODE"), _gpus(resources, site)
    if wanted is not None and held != str(wanted):
        raise ValueError(
            f"--ranks-per-node {wanted} contradicts NPROC_PER_NODE = {held} in {path}, which the job uses; remove one of them"
        )
    ranks = _number("NPROC_PER_NODE", held) if held else gpus
    if ranks < 1:
        raise ValueError("0 ranks per node: it has no GPUs, or NPROC_PER_NODE = 0; add --ranks-per-node N")
    if 0 < gpus < ranks:
        raise ValueError(
            f"{ranks} ranks per node exceed its {gpus} GPUs, one per rank; change --ranks-per-node or --gpus-per-node"
        )
    return ranks


def _gpus(resources: Resources, site: Mapping[str, str]) -> int:
    if resources.gpus is not None:
        return resources.gpus
    match = re.search(r"^#SBATCH --gpus-per-node=(\S+)$", (_FILES / _SCRIPT).read_text(encoding="utf-8"), re.MULTILINE)
    assert match is not None
    text = site.get("SBATCH_GPUS_PER_NODE") or match[1]
    return _number("SBATCH_GPUS_PER_NODE", text.rpartition(":")[2], text)  # "h100:8" names a type


def _number(name: str, digits: str, text: str | None = None) -> int:
    if not digits.isdecimal():
        raise ValueError(
            f"{name} = {text or digits!r} is not valid; a number is needed{', or TYPE:NUMBER' if text else ''}"
        )
    return int(digits)


def _site(path: Path, settings: Mapping[str, str]) -> dict[str, str]:
    environment = {**os.environ, **settings}
    if not path.exists():
        if os.environ.get("SITE_CONF"):
            raise ValueError(f"SITE_CONF = {path} does not exist; correct the path, or unset it")
        return environment
    # as env.sh sources it, `module load` included; an unset name is allowed
    shell = """set -a; trap 'echo "line $LINENO: status $?" >&2; exit 1' ERR; source "$1" >&2; exec env -0"""
    words = ["bash", "-c", shell, "bash", str(path.absolute())]
    done = subprocess.run(words, env=environment, capture_output=True, text=True)  # nosec B603 # the path is an argument
    if done.returncode:
        raise ValueError(f"{path} cannot be read by bash: {done.stderr.strip()}")
    return dict(item.split("=", 1) for item in done.stdout.split("\0") if "=" in item)
