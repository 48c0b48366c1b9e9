"""How this process was launched, from environment variables. Imports no torch."""

import os
import re
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from zlib import crc32

from llmtrain.cluster.control_groups import usable_cores
from llmtrain.errors import BadInputError

# Set for ranks that `llmtrain run --nproc` started: the pid of the process that started them.
LAUNCHER_PID = "LLMTRAIN_LAUNCHER_PID"
# The number of the signal that told that process to stop, for ranks that it starts later.
STOP_SIGNAL = "LLMTRAIN_STOP_SIGNAL"

# Ports at which ranks meet. They are below those that Linux assigns by itself, from 32768.
FIRST_PORT, PORTS = 20000, 12000
# Between the ports of two steps of a Slurm job: none of 20 steps then has the port of one of the next 570 jobs.
_STEP_PORTS = 571


@dataclass(frozen=True)
class Launched:
    """How a rank was launched.

    by: name of the launcher. local_rank: among the ranks of its machine, 0 if the launcher does not say.
    ranks_per_node: ranks on each machine (on the first, if they differ under Slurm); the world if the launcher does not
    say. variables: to set so that torch finds the other ranks; empty where the launcher has set them.
    """

    by: str
    rank: int
    local_rank: int
    world: int
    ranks_per_node: int
    variables: Mapping[str, str]

    @property
    def is_first(self) -> bool:
        """Whether this rank reports to the user how the run starts."""
        return self.rank == 0


def launched(environment: Mapping[str, str], wanted: int | None = None) -> Launched | None:
    """Return how torchrun, srun, mpirun or llmtrain launched this process; None without a launcher.

    wanted: ranks that --nproc asks for. Raises BadInputError if the variables contradict each other or `wanted`.
    """
    launch = _found(environment)
    if launch is not None and wanted not in (None, launch.world):
        raise BadInputError(
            f"--nproc is {wanted}, but {launch.by} has started {launch.world} ranks already; leave it out, or start "
            f"the run without {launch.by}"
        )
    return launch


def idle_nodes(environment: Mapping[str, str]) -> str | None:
    """Return a sentence if a Slurm job has nodes on which a run without a launcher starts no ranks, else None."""
    nodes = environment.get("SLURM_JOB_NUM_NODES", "1")
    if not nodes.isdecimal() or int(nodes) < 2:
        return None
    return (
        f"this job has {nodes} nodes, and the run's ranks are all on this machine; start a rank for each task with "
        "srun llmtrain run"
    )


def heed_launcher() -> None:
    """Raise the signal that this rank's launcher received before it had started this rank."""
    if number := os.environ.get(STOP_SIGNAL):
        signal.raise_signal(int(number))


def _found(environment: Mapping[str, str]) -> Launched | None:
    if "RANK" in environment and "WORLD_SIZE" in environment:
        if LAUNCHER_PID not in environment and _leaves_out(environment):
            given = _of_step(environment)
            missing = {name: value for name, value in given.items() if name not in environment}
            return _launched("srun", {**environment, **missing}, given.get("LOCAL_WORLD_SIZE"), missing)
        by = "llmtrain" if LAUNCHER_PID in environment else "torchrun"
        return _launched(by, environment, environment.get("LOCAL_WORLD_SIZE"), {})
    # mpirun first: inside a Slurm job it starts its processes through srun, and ranks inherit srun's variables.
    if _OPEN_MPI.start(environment):
        return _from_mpi(environment, _OPEN_MPI)
    # srun --mpi=pmi2 gives its tasks such variables too.
    if _HYDRA.start(environment) and environment["PMI_SIZE"] != environment.get("SLURM_STEP_NUM_TASKS"):
        return _from_mpi(environment, _PALS if _PALS.local_rank in environment else _HYDRA)
    if int(environment.get("SLURM_STEP_NUM_TASKS", "1")) > 1 and not _is_shell(environment):
        return _from_slurm(environment)
    return None


def _is_shell(environment: Mapping[str, str]) -> bool:
    """Return whether this process is of a shell that `srun --pty` has started, and no task of a step: in a shell with
    several tasks, the others have ended."""
    return "SLURM_PTY_PORT" in environment and (os.isatty(0) or _has_terminal(environment.get("SLURM_TASK_PID", "")))


def _has_terminal(pid: str) -> bool:
    """Return whether a process has a terminal: the input of the caller may come from elsewhere."""
    try:
        return pid.isdecimal() and os.readlink(f"/proc/{pid}/fd/0").startswith("/dev/pts/")
    except OSError:
        return False


def _leaves_out(environment: Mapping[str, str]) -> bool:
    """Return whether a script or a container's hook has set RANK under srun, and has left out LOCAL_WORLD_SIZE."""
    is_task = environment.get("SLURM_STEP_NUM_TASKS") == environment["WORLD_SIZE"]
    return is_task and "LOCAL_WORLD_SIZE" not in environment


def _check_order(environment: Mapping[str, str]) -> None:
    """Raise BadInputError where Slurm has dealt out tasks to nodes one by one: neighbouring ranks, which communicate
    most, would be on different nodes."""
    even = re.fullmatch(r"(\d+)(\(x\d+\))?", environment.get("SLURM_STEP_TASKS_PER_NODE", ""))
    node, rank = environment.get("SLURM_NODEID"), environment["SLURM_PROCID"]
    if even and node is not None and int(rank) // int(even[1]) != int(node):
        raise BadInputError(
            f"srun has put rank {rank} on node {node}, though each node has {even[1]} ranks; start the run with srun "
            "--distribution=block, or unset SLURM_DISTRIBUTION"
        )


def _tasks_per_node(environment: Mapping[str, str]) -> str | None:
    """Return the tasks of a job step on its first node. Slurm gives those of each node, as in `4(x2),3`."""
    found = re.match(r"\d+", environment.get("SLURM_STEP_TASKS_PER_NODE", ""))
    return found and found[0]


@dataclass(frozen=True)
class _MpiNames:
    """Variables in which an MPI gives a process its rank. run: names the run alike on all machines; none in some."""

    rank: str
    world: str
    local_rank: str
    local_world: str
    run: str = ""

    def start(self, environment: Mapping[str, str]) -> bool:
        """Return whether this MPI has started several processes."""
        return self.rank in environment and int(environment.get(self.world, "1")) > 1


_OPEN_MPI = _MpiNames(
    "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE",
    "PMIX_NAMESPACE",
)  # fmt: skip
# MPICH and Intel MPI.
_HYDRA = _MpiNames("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
# Cray's mpiexec.
_PALS = _MpiNames("PMI_RANK", "PMI_SIZE", "PMI_LOCAL_RANK", "PMI_LOCAL_SIZE")


def _from_mpi(environment: Mapping[str, str], names: _MpiNames) -> Launched:
    rank, world = environment[names.rank], environment[names.world]
    if names.local_rank not in environment:
        # Its machine's first GPU would be that of all ranks.
        raise BadInputError(
            f"{names.rank} is set and {names.local_rank} is not: what started this rank does not say which one of its "
            "machine it is; set RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT"
        )
    here = environment.get(names.local_world, world)
    if here != world and "MASTER_ADDR" not in environment:
        raise BadInputError(
            "mpirun started ranks on several machines, and nothing says where they meet; set MASTER_ADDR to the first "
            "machine's name, as in mpirun -x MASTER_ADDR=node1 (Open MPI) or mpirun -genv MASTER_ADDR node1 (MPICH)"
        )
    # Each run has an mpirun of its own, which gives its ranks a name. Without the name its pid serves on one machine:
    # mpirun is the ranks' parent, unless a script starts them.
    name = environment.get(names.run, str(os.getppid()) if here == world else None)
    # Runs that share a machine need different ports.
    port = "29500" if name is None else str(FIRST_PORT + crc32(name.encode()) % PORTS)
    variables = {
        "RANK": rank,
        "WORLD_SIZE": world,
        "LOCAL_RANK": environment[names.local_rank],
        "LOCAL_WORLD_SIZE": here,
        "MASTER_ADDR": environment.get("MASTER_ADDR", "localhost"),
        "MASTER_PORT": environment.get("MASTER_PORT", port),
    }
    return _launched("mpirun", variables, here, variables)


def _from_slurm(environment: Mapping[str, str]) -> Launched:
    variables = _of_step(environment) | {"RANK": environment["SLURM_PROCID"]}
    variables |= {"WORLD_SIZE": environment["SLURM_STEP_NUM_TASKS"]}
    _check_order(environment)
    return _launched("srun", variables, variables.get("LOCAL_WORLD_SIZE"), variables)


def _of_step(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that a job step gives, besides the rank and the world."""
    # Jobs and steps that share a node need different ports, and have different ids.
    run = int(environment.get("SLURM_JOB_ID", "0")) + _STEP_PORTS * int(environment.get("SLURM_STEP_ID", "0"))
    per_node = _tasks_per_node(environment)
    return {
        "LOCAL_RANK": environment.get("SLURM_LOCALID", "0"),
        "MASTER_ADDR": environment.get("MASTER_ADDR", first_host(environment.get("SLURM_STEP_NODELIST", ""))),
        "MASTER_PORT": environment.get("MASTER_PORT", str(FIRST_PORT + run % PORTS)),
        **({"LOCAL_WORLD_SIZE": per_node} if per_node else {}),
    }


def _launched(by: str, numbers: Mapping[str, str], per_node: str | None, variables: Mapping[str, str]) -> Launched:
    rank, local_rank, world = numbers["RANK"], numbers.get("LOCAL_RANK", "0"), numbers["WORLD_SIZE"]
    if not (rank.isdecimal() and world.isdecimal() and int(rank) < int(world)):
        raise BadInputError(
            f"the environment has rank {rank!r} of {world!r}; expected a number below another. Start the run through "
            "torchrun, srun or llmtrain run --nproc N, or unset RANK and WORLD_SIZE"
        )
    if not local_rank.isdecimal():
        raise BadInputError(f"the environment's LOCAL_RANK is {local_rank!r}; expected a number, or unset it")
    return Launched(by, int(rank), int(local_rank), int(world), int(per_node or world), variables)


def first_host(nodelist: str) -> str:
    """Return the first host of a Slurm node list such as `gpu[003-007,12],login1`."""
    match = re.match(r"([^\[,]+)(?:\[(\d+)[^\]]*\])?([^,\[]*)", nodelist)
    return "localhost" if match is None else match[1] + (match[2] or "") + match[3]


def threads_per_rank(local_ranks: int) -> int:
    """Return how many of the cores that this process may use at once each of `local_ranks` may use."""
    return max(1, usable_cores() // local_ranks)
