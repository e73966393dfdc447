"""A private Slurm cluster on this machine: munged, slurmctld and several slurmd, all inside one folder.

Debian's Slurm is built with multiple-slurmd support. Each slurmd has a UTS and a mount namespace of its own, so that its
node's name is its host name and resolves, and the machine's /etc/hosts stays as it is; a normal user gets a user namespace
for that. Pretended GPUs are character devices that everybody has.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType

from tests.slurm.guard import Guard, end, inside, space_of
from tests.slurm.settings import Block, write

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "scancel", "unshare")
PACKAGES = "slurmctld slurmd slurm-client munge"
START_SECONDS = 120.0
_BUSY = "Socket timed out|Unable to contact slurm controller|Zero Bytes"
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "OUT_OF_MEMORY", "BOOT_FAIL")


def missing() -> str | None:
    """Why no cluster can be had here, in one sentence; None where it can."""
    path = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])
    absent = [name for name in PROGRAMS if shutil.which(name, path=path) is None]
    if absent:
        return f"{', '.join(absent)} not found: `make test-slurm` installs them (apt-get install {PACKAGES})"
    spaces = subprocess.run([*_namespaces(), "true"], capture_output=True, text=True)
    return f"no namespaces here: {spaces.stderr.strip()}" if spaces.returncode else None


class Cluster:
    """A cluster for the length of a `with` block; everything of it is ended and removed at its end, or at this process's.

    Args:
        nodes: node1, node2, ... gpus, cpus, memory: what each of them claims to have (MB of memory).
        disk: size (MB) of the file system at `folder / "disk"`, which only root can mount; None: it is a plain folder.

    Partitions: `main` (the default) and `urgent`, whose jobs send those of `main` back to the queue after `grace` seconds.
    """

    def __init__(
        self,
        nodes: int = 2,
        *,
        gpus: int = 8,
        cpus: int = 16,
        memory: int = 64_000,
        grace: int = 60,
        disk: int | None = None,
    ) -> None:
        self.nodes = [f"node{number}" for number in range(1, nodes + 1)]
        self.gpus, self.cpus, self.memory, self.grace, self._size = gpus, cpus, memory, grace, disk
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}
        self._spaces: dict[str, int] = {}

    def __enter__(self) -> Cluster:
        self._guard = Guard()
        self.folder, self.disk = self._guard.folder, self._guard.folder / "disk"
        self.env = {
            **{name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "SBATCH_"))},
            "SLURM_CONF": str(self.folder / "slurm.conf"),
            "PATH": os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"]),
            "MUNGE_SOCKET": str(self.folder / "munge.sock"),
        }
        self._block: Block | None = None
        try:
            self._block = Block(len(self.nodes) + 1)
            sizes = {"gpus": self.gpus, "cpus": self.cpus, "memory": self.memory, "grace": self.grace}
            write(self.folder, self._block, self.nodes, **sizes)
            self.disk.mkdir()
            if self._size is not None:  # before the nodes copy what is mounted
                size = f"size={self._size}m"
                subprocess.run(["mount", "-t", "tmpfs", "-o", size, "tmpfs", self.disk], check=True)
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
        """A Slurm command of this cluster, to its end (at most five minutes)."""
        done = subprocess.run(
            command, capture_output=True, text=True, cwd=cwd, env={**self.env, **(env or {})}, timeout=300
        )
        if check and done.returncode:
            raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}: {done.stderr.strip()}")
        return done

    def submit(self, *arguments: str, cwd: Path | None = None, env: Mapping[str, str] | None = None) -> int:
        """`sbatch ARGUMENTS`; the job's id."""
        out = self.run("sbatch", "--parsable", *arguments, cwd=cwd, env=env).stdout
        return int(out.strip().split(";")[0])

    def job(self, number: int | str) -> dict[str, str]:
        """What `scontrol show job` says of a job, or of a task ARRAY_TASK: JobState, Reason, Restarts, ..."""
        return dict(re.findall(r"(\S+?)=(\S*)", self._jobs(number)))

    def state(self, number: int) -> str:
        """Its present state: PENDING, RUNNING, COMPLETED, ..."""
        return self.job(number)["JobState"]

    def count(self, state: str, array: int | None = None) -> int:
        """How many jobs, or tasks of an array, are in a state."""
        return self._jobs(*([array] if array else [])).count(f"JobState={state} ")

    def _jobs(self, *number: int | str) -> str:
        """A line a job, or a task of an array; asked again where Slurm was too busy, for no line is no answer."""
        command = ["scontrol", "show", "job", "-o", *map(str, number)]
        done = self.run(*command, check=False)
        while re.search(_BUSY, done.stderr):
            done = self.run(*command, check=False)
        if done.returncode:
            raise RuntimeError(f"no word of job {number}: {done.stderr.strip()}")
        return done.stdout

    def wait(self, number: int, states: Iterable[str] = ENDED, timeout: float = 600.0) -> str:
        """The first of `states` that the job comes into.

        Raises:
            TimeoutError: none of them in `timeout` seconds.
        """
        wanted, found = set(states), ""

        def come() -> bool:
            nonlocal found
            found = self.state(number)
            return found in wanted

        self.until(come, timeout, f"job {number} to be {' or '.join(sorted(wanted))}")
        return found

    def until(self, happened: Callable[[], bool], timeout: float, what: str, every: float = 0.3) -> None:
        """Looks `every` so many seconds until `happened()`.

        Raises:
            TimeoutError: with what Slurm has queued.
        """
        end = time.monotonic() + timeout
        while not happened():
            if time.monotonic() > end:
                queue = self.run("scontrol", "show", "job", "-o", check=False).stdout
                raise TimeoutError(f"waited {timeout:g} s for {what}; jobs:\n{queue}")
            time.sleep(every)

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
        space = self._spaces.pop(node)
        try:
            end(lambda: inside({os.fstat(space).st_ino}))
        finally:
            os.close(space)
        self._daemons.pop(node).wait()

    def kill_slurmd(self, node: str) -> None:
        """SIGKILL to the slurmd of a node alone."""
        daemon = self._daemons.pop(node)
        daemon.kill()
        daemon.wait()

    def start_node(self, node: str) -> None:
        """Starts the slurmd of a node."""
        # slurmd as who we are: it would take root of a user namespace for the machine's
        back = "" if os.getuid() == 0 else f"unshare --user --map-user={os.getuid()} --map-group={os.getgid()} "
        inner = f"mount --bind {self.folder}/hosts /etc/hosts && hostname {node} && exec {back}slurmd -D -N {node}"
        daemon = self._daemon(node, [*_namespaces(), "bash", "-c", inner])
        self._until_up(lambda: space_of(daemon.pid) not in (space_of("self"), None), node)
        self._guard.watch(daemon.pid)
        # held open: the number of one that is gone is given to the next, which may be another cluster's
        self._spaces[node] = os.open(f"/proc/{daemon.pid}/ns/mnt", os.O_RDONLY)

    def _start(self) -> None:
        names = {"socket": "munge.sock", "key-file": "munge.key", "pid-file": "munge.pid", "seed-file": "munge.seed"}
        files = [f"--{name}={self.folder}/{file}" for name, file in {**names, "log-file": "munge.log"}.items()]
        self._daemon("munged", ["munged", "--foreground", "--force", *files])
        self._until_up(lambda: (self.folder / "munge.sock").exists(), "munged")
        self._daemon("slurmctld", ["slurmctld", "-D", "-i"])
        self._until_up(lambda: "is UP" in self.run("scontrol", "ping", check=False).stdout, "slurmctld")
        for node in self.nodes:
            self.start_node(node)
        self._until_up(self.idle, "slurmd")

    def node_states(self) -> dict[str, str]:
        """The state of each node, by its name."""
        text = self.run("scontrol", "show", "node", "-o", check=False).stdout
        return dict(re.findall(r"NodeName=(\S+).*? State=(\S+)", text))

    def idle(self) -> bool:
        """Whether all nodes are there and have nothing to do."""
        return self.node_states() == dict.fromkeys(self.nodes, "IDLE")

    def _until_up(self, happened: Callable[[], bool], name: str) -> None:
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
        try:
            self._guard.close()
        finally:
            for daemon in self._daemons.values():
                daemon.wait()
            for space in self._spaces.values():
                os.close(space)
            self._daemons.clear()
            self._spaces.clear()
            if self._block is not None:
                self._block.close()


def _namespaces() -> list[str]:
    user = [] if os.getuid() == 0 else ["--user", "--map-root-user"]
    return ["unshare", *user, "--uts", "--mount"]
