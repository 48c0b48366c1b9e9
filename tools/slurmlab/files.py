"""The files of a Slurm on one machine: its configuration, the host names of its nodes, and the start script."""

import os
from dataclasses import dataclass
from pathlib import Path

CONFIG = """\
ClusterName=slurmlab
SlurmctldHost=slurmlab(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
# A requeued job waits until its credential expires: a short time makes tests fast.
AuthInfo=socket={folder}/munge.socket,cred_expire=5
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_interval=2,bf_interval=2,batch_sched_delay=0
ReturnToService=2
JobRequeue=1
KillWait={kill_wait}
MinJobAge=3600
# Nodes may be configured with more CPUs than the machine has.
SlurmdParameters=config_overrides
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
PropagateResourceLimits=NONE
"""

# The first process of the lab's process and mount namespaces. When it ends, the kernel kills all others.
START = """\
mount --bind {folder}/hosts /etc/hosts
munged --foreground --force --socket {folder}/munge.socket --key-file {folder}/munge.key \
  --pid-file {folder}/munged.pid --log-file {folder}/munged.log --seed-file {folder}/munged.seed &
until [ -S {folder}/munge.socket ]; do sleep 0.05; done
daemon() {{ unshare --uts sh -c 'hostname "$0" && exec "$@"' "$@" & }}
daemon slurmlab slurmctld -D -f {folder}/slurm.conf
for node in {nodes}; do daemon "$node" slurmd -D -N "$node" -f {folder}/slurm.conf; done
wait
"""


@dataclass(frozen=True)
class Spec:
    """A Slurm with `nodes` nodes of `cpus` configured CPUs each. kill_wait: seconds from SIGTERM to SIGKILL."""

    nodes: int = 2
    cpus: int = 8
    kill_wait: int = 30

    @property
    def names(self) -> list[str]:
        """The host names of the nodes."""
        return [f"n{number + 1}" for number in range(self.nodes)]


def write(spec: Spec, folder: Path, ports: list[int]) -> None:
    """Write all files into an empty folder. ports: one for the controller, then one for each node."""
    lines = [CONFIG.format(folder=folder, port=ports[0], kill_wait=spec.kill_wait)]
    hosts = [Path("/etc/hosts").read_text(encoding="utf-8"), "127.0.0.1 slurmlab\n"]
    (folder / "state").mkdir()
    for number, (name, port) in enumerate(zip(spec.names, ports[1:], strict=True)):
        address = f"127.0.{1 + number // 250}.{number % 250 + 1}"
        lines.append(f"NodeName={name} NodeAddr={address} Port={port} CPUs={spec.cpus} RealMemory=1\n")
        hosts.append(f"{address} {name}\n")
        (folder / f"spool-{name}").mkdir()
    lines.append("PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP\n")
    (folder / "slurm.conf").write_text("".join(lines), encoding="utf-8")
    (folder / "hosts").write_text("".join(hosts), encoding="utf-8")
    (folder / "start.sh").write_text(START.format(folder=folder, nodes=" ".join(spec.names)), encoding="utf-8")
    key = os.open(folder / "munge.key", os.O_WRONLY | os.O_CREAT, 0o400)
    os.write(key, os.urandom(1024))
    os.close(key)
