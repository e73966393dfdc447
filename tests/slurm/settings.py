"""The files of a private cluster: slurm.conf and what belongs to it. Its timeouts are for a busy machine."""

from __future__ import annotations

import contextlib
import random
import secrets
import socket
import subprocess
from collections.abc import Sequence
from pathlib import Path

_BLOCKS, _PORTS, _JOBS = 128, 32, 90

_CONFIG = """\
ClusterName=private
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
CryptoType=crypto/munge
AuthInfo=socket={folder}/munge.sock,cred_expire=10
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
ReturnToService=1
SlurmdTimeout=20
SlurmctldTimeout=60
MessageTimeout=60
TCPTimeout=10
BatchStartTimeout=120
FirstJobId={first}
JobRequeue=1
KillWait=60
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


class Block:
    """Ports and job ids that no other private cluster of this machine has while this one lives; jobs take ports from their ids.

    All of them lie below the ports that Linux gives to outgoing connections.
    """

    def __init__(self, ports: int) -> None:
        assert ports <= _PORTS
        for number in random.SystemRandom().sample(range(_BLOCKS), _BLOCKS):
            self._held = socket.socket(socket.AF_UNIX)
            try:
                self._held.bind(f"\0private-slurm-{number}")  # of the kernel, which frees it whatever ends the process
                self.port, self.first_job = 10_000 + _PORTS * number, 1 + _JOBS * number
                _bind(range(self.port, self.port + ports))
            except OSError:
                self._held.close()
                continue
            return
        raise RuntimeError(f"no {ports} free ports in a row")

    def close(self) -> None:
        self._held.close()


def write(folder: Path, block: Block, nodes: Sequence[str], *, gpus: int, cpus: int, memory: int, grace: int) -> None:
    """slurm.conf, gres.conf, cgroup.conf, munge's key and the nodes' /etc/hosts, in an empty folder."""
    values = {
        "host": socket.gethostname(),
        "port": block.port,
        "first": block.first_job,
        "user": subprocess.run(["id", "-un"], capture_output=True, text=True, check=True).stdout.strip(),
        "folder": folder,
    }
    lines = [_CONFIG.format(**values)]
    sizes = f"CPUs={cpus} RealMemory={memory} Gres=gpu:h100:{gpus} State=UNKNOWN"
    for index, node in enumerate(nodes, 1):
        where = f"NodeHostname={node} NodeAddr=127.0.0.{10 + index} Port={block.port + index}"
        lines.append(f"NodeName={node} {where} {sizes}\n")
    lines.append(f"PartitionName=main Nodes=ALL Default=YES MaxTime=1-0 PriorityTier=1 GraceTime={grace}\n")
    lines.append("PartitionName=urgent Nodes=ALL MaxTime=1-0 PriorityTier=2 PreemptMode=OFF\n")
    (folder / "slurm.conf").write_text("".join(lines))
    (folder / "gres.conf").write_text(f"Name=gpu Type=h100 File=/dev/tty[0-{gpus - 1}]\n")
    (folder / "cgroup.conf").write_text("")
    (folder / "state").mkdir()
    hosts = [Path("/etc/hosts").read_text(), *(f"127.0.0.{10 + index} {node}\n" for index, node in enumerate(nodes, 1))]
    (folder / "hosts").write_text("".join(hosts))
    key = folder / "munge.key"
    key.touch(mode=0o600)
    key.write_bytes(secrets.token_bytes(1024))


def _bind(ports: Sequence[int]) -> None:
    """Whether each can be had: OSError where it cannot."""
    with contextlib.ExitStack() as stack:
        for port in ports:
            one = stack.enter_context(socket.socket())
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the daemons do: nobody waits for TIME_WAIT
            one.bind(("0.0.0.0", port))
