"""A private Slurm cluster on this machine: munged, slurmctld and several slurmd, all inside one folder.

Debian's Slurm is built with multiple-slurmd support. Each slurmd has a UTS and a mount namespace of its own, so that its
node's name is its host name and resolves, and the machine's /etc/hosts stays as it is; a normal user gets a user namespace
for that. Pretended GPUs are character devices that everybody has.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "scancel", "unshare")
PACKAGES = "slurmctld slurmd slurm-client munge"
START_SECONDS = 30.0
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "OUT_OF_MEMORY", "BOOT_FAIL")

_CONFIG = """\
ClusterName=private
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
CryptoType=crypto/munge
AuthInfo=socket={folder}/munge.sock,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
GresTypes=gpu
ReturnToService=2
SlurmdTimeout=10
SlurmctldTimeout=30
FirstJobId={first}
JobRequeue=1
KillWait=10
MinJobAge=3600
EnforcePartLimits=ALL
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SchedulerParameters=sched_interval=5,sched_min_interval=0,bf_interval=5
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
JobCompType=jobcomp/filetxt
JobCompLoc={folder}/jobcomp.log
"""


def missing() -> str | None:
    """Why no cluster can be had here, in one sentence; None where it can."""
    path = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])
    absent = [name for name in PROGRAMS if shutil.which(name, path=path) is None]
    if absent:
        return f"{', '.join(absent)} not found: `make test-slurm` installs them (apt-get install {PACKAGES})"
    spaces = subprocess.run([*_namespaces(), "true"], capture_output=True, text=True)
    return f"no namespaces here: {spaces.stderr.strip()}" if spaces.returncode else None


class Cluster:
    """A cluster for the length of a `with` block; everything of it is ended and removed at its end.

    Args:
        nodes: node1, node2, ... gpus, cpus, memory: what each of them claims to have (MB of memory).

    Partitions: `main` (the default) and `urgent`, whose jobs send those of `main` back to the queue after `grace` seconds.
    """

    def __init__(self, nodes: int = 2, *, gpus: int = 8, cpus: int = 16, memory: int = 64_000, grace: int = 20) -> None:
        self.nodes = [f"node{number}" for number in range(1, nodes + 1)]
        self.gpus, self.cpus, self.memory, self.grace = gpus, cpus, memory, grace
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}
        self._spaces: dict[str, int] = {}

    def __enter__(self) -> Cluster:
        self.folder = Path(tempfile.mkdtemp(prefix="slurm-"))  # short: a socket's path ends at 108 characters
        self.env = {
            **{name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "SBATCH_"))},
            "SLURM_CONF": str(self.folder / "slurm.conf"),
            "PATH": os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"]),
            "MUNGE_SOCKET": str(self.folder / "munge.sock"),
        }
        try:
            self._write()
            self._start()
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()

    def run(
        self, *command: str, check: bool = True, cwd: Path | None = None, env: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """A Slurm command of this cluster, to its end (at most a minute)."""
        done = subprocess.run(
            command, capture_output=True, text=True, cwd=cwd, env={**self.env, **(env or {})}, timeout=60
        )
        if check and done.returncode:
            raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}: {done.stderr.strip()}")
        return done

    def submit(self, *arguments: str, cwd: Path | None = None, env: Mapping[str, str] | None = None) -> int:
        """`sbatch ARGUMENTS`; the job's id."""
        out = self.run("sbatch", "--parsable", *arguments, cwd=cwd, env=env).stdout
        return int(out.strip().split(";")[0])

    def job(self, number: int) -> dict[str, str]:
        """What `scontrol show job` says of a job: JobState, Reason, Restarts, ..."""
        text = self.run("scontrol", "show", "job", "-o", str(number)).stdout
        return dict(re.findall(r"(\S+?)=(\S*)", text))

    def state(self, number: int) -> str:
        """Its present state: PENDING, RUNNING, COMPLETED, ..."""
        return self.job(number)["JobState"]

    def count(self, state: str, array: int | None = None) -> int:
        """How many jobs, or tasks of an array, are in a state."""
        text = self.run("scontrol", "show", "job", "-o", *([str(array)] if array else []), check=False).stdout
        return text.count(f"JobState={state} ")

    def wait(self, number: int, states: Iterable[str] = ENDED, timeout: float = 120.0) -> str:
        """The first of `states` that the job comes into.

        Raises:
            TimeoutError: none of them in `timeout` seconds.
        """
        wanted = set(states)
        self.until(lambda: self.state(number) in wanted, timeout, f"job {number} to be {' or '.join(sorted(wanted))}")
        return self.state(number)

    def until(self, happened: Callable[[], bool], timeout: float, what: str) -> None:
        """Looks five times a second until `happened()`.

        Raises:
            TimeoutError: with what Slurm has queued.
        """
        end = time.monotonic() + timeout
        while not happened():
            if time.monotonic() > end:
                queue = self.run("scontrol", "show", "job", "-o", check=False).stdout
                raise TimeoutError(f"waited {timeout:g} s for {what}; jobs:\n{queue}")
            time.sleep(0.2)

    def processes(self, number: int, pattern: str, node: str | None = None) -> list[int]:
        """Ids of a job's processes (on a node) whose command line matches, oldest first."""
        wanted = {f"SLURM_JOB_ID={number}", f"SLURM_CONF={self.folder}/slurm.conf"}
        wanted |= {f"SLURMD_NODENAME={node}"} if node else set()
        found = []
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            with contextlib.suppress(OSError):
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                environment = set((entry / "environ").read_bytes().decode(errors="replace").split("\0"))
                if re.search(pattern, command) and wanted <= environment:
                    started = int((entry / "stat").read_text().rsplit(")", 1)[1].split()[19])
                    found.append((started, int(entry.name)))
        return [pid for _, pid in sorted(found)]

    def kill_node(self, node: str) -> None:
        """SIGKILL to all that runs on a node, slurmd and the jobs' processes, as if the host had lost its power."""
        daemon = self._daemons.pop(node)
        self._end_processes([node])
        daemon.wait()

    def kill_slurmd(self, node: str) -> None:
        """SIGKILL to the slurmd of a node alone."""
        daemon = self._daemons.pop(node)
        daemon.kill()
        daemon.wait()

    def revive(self, node: str) -> None:
        """Starts a node's slurmd where it was killed."""
        if node not in self._daemons:
            self.start_node(node)

    def start_node(self, node: str) -> None:
        """Starts the slurmd of a node."""
        # slurmd as who we are: it would take root of a user namespace for the machine's
        back = "" if os.getuid() == 0 else f"unshare --user --map-user={os.getuid()} --map-group={os.getgid()} "
        inner = f"mount --bind {self.folder}/hosts /etc/hosts && hostname {node} && exec {back}slurmd -D -N {node}"
        daemon = self._daemon(node, [*_namespaces(), "bash", "-c", inner])
        entry, ours = Path(f"/proc/{daemon.pid}"), _space(Path("/proc/self"))
        self.until_up(lambda: _space(entry) not in (ours, None), node)
        # held open: the number of one that is gone is given to the next, which may be another cluster's
        self._spaces[node] = os.open(entry / "ns" / "mnt", os.O_RDONLY)

    def _write(self) -> None:
        port = _free_ports(len(self.nodes) + 1)
        settings = {
            "host": socket.gethostname(),
            "port": port,
            "first": 1
            + secrets.randbelow(19_000),  # jobs take their ports from their ids: those of two clusters do not meet
            "user": subprocess.run(["id", "-un"], capture_output=True, text=True, check=True).stdout.strip(),
            "folder": self.folder,
        }
        lines = [_CONFIG.format(**settings)]
        sizes = f"CPUs={self.cpus} RealMemory={self.memory} Gres=gpu:h100:{self.gpus} State=UNKNOWN"
        for index, node in enumerate(self.nodes, 1):
            where = f"NodeHostname={node} NodeAddr=127.0.0.{10 + index} Port={port + index}"
            lines.append(f"NodeName={node} {where} {sizes}\n")
        lines.append(f"PartitionName=main Nodes=ALL Default=YES MaxTime=1-0 PriorityTier=1 GraceTime={self.grace}\n")
        lines.append("PartitionName=urgent Nodes=ALL MaxTime=1-0 PriorityTier=2 PreemptMode=OFF\n")
        (self.folder / "slurm.conf").write_text("".join(lines))
        (self.folder / "gres.conf").write_text(f"Name=gpu Type=h100 File=/dev/tty[0-{self.gpus - 1}]\n")
        (self.folder / "cgroup.conf").write_text("")
        (self.folder / "state").mkdir()
        hosts = [Path("/etc/hosts").read_text()]
        hosts += [f"127.0.0.{10 + index} {node}\n" for index, node in enumerate(self.nodes, 1)]
        (self.folder / "hosts").write_text("".join(hosts))
        key = self.folder / "munge.key"
        key.touch(mode=0o600)
        key.write_bytes(secrets.token_bytes(1024))

    def _start(self) -> None:
        names = {"socket": "munge.sock", "key-file": "munge.key", "pid-file": "munge.pid", "seed-file": "munge.seed"}
        files = [f"--{name}={self.folder}/{file}" for name, file in {**names, "log-file": "munge.log"}.items()]
        self._daemon("munged", ["munged", "--foreground", "--force", *files])
        self.until_up(lambda: (self.folder / "munge.sock").exists(), "munged")
        self._daemon("slurmctld", ["slurmctld", "-D", "-i"])
        self.until_up(lambda: not self.run("scontrol", "ping", check=False).stdout.count("DOWN"), "slurmctld")
        for node in self.nodes:
            self.start_node(node)
        self.until_up(lambda: all(state == "IDLE" for state in self.node_states().values()), "slurmd")

    def node_states(self) -> dict[str, str]:
        """The state of each node, by its name."""
        text = self.run("scontrol", "show", "node", "-o", check=False).stdout
        return dict(re.findall(r"NodeName=(\S+).*? State=(\S+)", text))

    def until_up(self, happened: Callable[[], bool], name: str) -> None:
        """Waits for a daemon; its log is in the error where it does not come."""
        end = time.monotonic() + START_SECONDS
        while not happened():
            dead = [daemon for daemon, process in self._daemons.items() if process.poll() is not None]
            if dead or time.monotonic() > end:
                logs = "".join(f"--- {path.name}\n{path.read_text()[-2000:]}" for path in self.folder.glob("*.log"))
                raise RuntimeError(f"{name} did not come up ({', '.join(dead) or 'too slow'})\n{logs}")
            time.sleep(0.05)

    def _daemon(self, name: str, command: Sequence[str]) -> subprocess.Popen[bytes]:
        with (self.folder / f"{name}.out.log").open("ab") as out:
            self._daemons[name] = daemon = subprocess.Popen(
                command, env=self.env, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True
            )
        return daemon

    def _stop(self) -> None:
        with contextlib.suppress(Exception):
            self.run("scancel", "--full", "--signal=KILL", f"--user={os.getuid()}", check=False)
        for name in [*self.nodes, "slurmctld", "munged"]:
            daemon = self._daemons.pop(name, None)
            if daemon is not None:
                daemon.send_signal(signal.SIGTERM)
                try:
                    daemon.wait(5)
                except subprocess.TimeoutExpired:
                    daemon.kill()
                    daemon.wait()
        self._end_processes(self.nodes)
        shutil.rmtree(self.folder, ignore_errors=True)

    def _end_processes(self, nodes: Sequence[str]) -> None:
        """Ends all that runs on these nodes. What a node started shares its mount namespace, whatever it calls itself."""
        held = [self._spaces.pop(node) for node in nodes if node in self._spaces]
        try:
            self._end_spaces({os.fstat(space).st_ino for space in held})
        finally:
            for space in held:
                os.close(space)

    @staticmethod
    def _end_spaces(spaces: set[int]) -> None:
        for _ in range(50):
            left = [
                int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit() and _space(entry) in spaces
            ]
            if not left:
                return
            for number in (signal.SIGSTOP, signal.SIGKILL):  # none has time to report another's end
                for pid in left:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, number)
            time.sleep(0.05)


def _space(process: Path) -> int | None:
    """The mount namespace of a process."""
    try:
        return (process / "ns" / "mnt").stat().st_ino
    except OSError:
        return None


def _namespaces() -> list[str]:
    user = [] if os.getuid() == 0 else ["--user", "--map-root-user"]
    return ["unshare", *user, "--uts", "--mount"]


def _free_ports(count: int) -> int:
    """The first of `count` ports in a row that nobody listens on now."""
    for _ in range(100):
        first = 40_000 + secrets.randbelow(20_000)
        with contextlib.ExitStack() as stack:
            try:
                for port in range(first, first + count):
                    stack.enter_context(socket.socket()).bind(("0.0.0.0", port))
            except OSError:
                continue
            return first
    raise RuntimeError(f"no {count} free ports in a row")
