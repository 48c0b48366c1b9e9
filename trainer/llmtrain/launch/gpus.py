"""Check that a machine has a GPU as large as stated for each rank, and set what CUDA reads from the environment."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.metadata import version
from pathlib import Path
from tempfile import gettempdir

from llmtrain_data import units

from llmtrain.cluster.description import Accelerator, Cluster, Host, Node
from llmtrain.cluster.memory import machine_memory, stated_memory, usable_memory
from llmtrain.comm.environment import Launched
from llmtrain.comm.threads import started_by_agent
from llmtrain.errors import BadInputError

_P2P_WARNING = "TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING"
_ABORTS = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
ALLOCATOR, _OLD_ALLOCATOR = "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"
_SEGMENTS = "expandable_segments:True"
_MONITORS = ("TORCH_NCCL_ENABLE_MONITORING", "TORCH_NCCL_DUMP_ON_TIMEOUT")
# Collectives that the flight recorder keeps: some steps of a tensor-parallel model. By default, it keeps 2,000.
_RECORDED = 20_000
# Seconds that the driver's tool has to answer. It takes some where no process keeps the driver loaded.
ANSWER = 20
# A card whose memory is stated by its name, such as 80GB, has up to 3% less for programs, and so has one by its driver.
_USABLE = 0.97


def check_gpus(gpus: int, launch: Launched | None, world: int) -> None:
    """Raise BadInputError if this machine would run more ranks than it has GPUs.

    launch: how this rank was launched, None if all `world` ranks start here. If a launcher gives each rank its own
    GPU, the rank sees only that one.
    """
    # Not every launcher gives the number of local ranks, but all give the local rank.
    here = world if launch is None else launch.local_rank + 1
    if gpus and here > gpus and (launch is None or gpus > 1):
        raise BadInputError(
            f"there are to be {here} ranks or more on a machine with {gpus} GPUs; start at most one for each GPU, or "
            "hide the GPUs (CUDA_VISIBLE_DEVICES=) to train on its processors"
        )


def idle_gpus(gpus: int, launch: Launched) -> str | None:
    """Return a sentence if a launcher has started fewer ranks on this machine than it has GPUs, else None: also where
    --nproc asked for as many."""
    if launch.ranks_per_node >= gpus or launch.by == "llmtrain":
        return None
    return (
        f"{launch.by} has started {launch.ranks_per_node} of the {gpus} ranks that this machine's GPUs could take, so "
        "the other GPUs are idle; start one for each (srun --ntasks-per-node, torchrun --nproc_per_node)"
    )


def unseen_gpus(environment: Mapping[str, str]) -> str | None:
    """Return an error if Slurm has given this process GPUs, or if this machine has some outside of Slurm, none of which
    torch sees; else None. Call it where torch sees none."""
    if environment.get("CUDA_VISIBLE_DEVICES", "0") in ("", "-1"):
        return None
    if (environment.get("SLURM_STEP_GPUS") or environment.get("SLURM_GPUS_ON_NODE") or "0") != "0":
        who = "Slurm has given this job GPUs"
    elif "SLURM_JOB_ID" not in environment and has_nvidia_gpus():
        who = "this machine has GPUs"
    else:
        return None
    return (
        f"{who}, and torch {version('torch')} finds none; see what llmtrain doctor says there, or train on processors "
        "with --force"
    )


def has_nvidia_gpus() -> bool:
    """Return whether NVIDIA's driver gives GPUs to this machine, or to this container."""
    return any(Path("/dev").glob("nvidia[0-9]*"))


def gpu_variables(world: int, deterministic: bool = False) -> dict[str, str]:
    """Return the environment variables that ranks on GPUs need, as CUDA reads them when it starts.

    CUDA_DEVICE_MAX_CONNECTIONS: hardware queues, at most 32. Streams that share one wait for each other, and a rank has
    a stream for each lane, each communicator and each direction of its copies. GPU_MAX_HW_QUEUES: the same of HIP,
    which has 4 by default; more than a rank has streams cost time (pytorch/torchtitan, pull request 4032).
    PYTORCH_ALLOC_CONF: with segments that grow, memory that sizes of other steps have split can be used again; torch
    has none for AMD. Of several ranks: TORCH_NCCL_SHOW_EAGER_INIT_...: messages of a pipeline have a communicator each,
    so torch need not warn that they wait for each other. TORCH_NCCL_ASYNC_ERROR_HANDLING: torch must not abort a rank
    that has lost another one, before the watchdog names that one and ends the run. TORCH_NCCL_ENABLE_MONITORING,
    TORCH_NCCL_DUMP_ON_TIMEOUT: nor one that has waited long, such as in a job that was suspended. TORCH_FR_BUFFER_SIZE:
    collectives that the flight recorder keeps. CUBLAS_WORKSPACE_CONFIG: with workspaces of fixed sizes, products on
    several streams have the same bits in every run (cuBLAS documentation, "Results reproducibility"). Two are left as
    they are. CUDA_MODULE_LOADING=EAGER would load every kernel of torch at the start; the first sends of a pipeline are
    held instead, see `messages_nccl`. NCCL_LAUNCH_ORDER_IMPLICIT would start kernels of all communicators in the order
    of the host's calls; the ranks' calls have one order on each communicator, and streams have the others.
    """
    # PyTorch must not be loaded before it is known that there are GPUs.
    from llmtrain.comm.device import built_for_amd

    nvidia = {"CUDA_DEVICE_MAX_CONNECTIONS": "32", ALLOCATOR: _SEGMENTS}
    found = {"GPU_MAX_HW_QUEUES": "16"} if built_for_amd() else nvidia
    if world > 1:
        found |= dict.fromkeys((_P2P_WARNING, _ABORTS, *_MONITORS), "0") | {"TORCH_FR_BUFFER_SIZE": str(_RECORDED)}
    return found | ({"CUBLAS_WORKSPACE_CONFIG": ":4096:8"} if deterministic else {})


def set_gpu_variables(world: int, deterministic: bool = False) -> None:
    """Set the variables that the user has not set. Call it before CUDA starts.

    TRITON_CACHE_DIR: compiled kernels, on a disk of this machine, as torch.compile has its own there; by default they
    are in the home folder, where file systems of networks fail if many ranks write at the same time.
    """
    os.environ.setdefault("TRITON_CACHE_DIR", f"{gettempdir()}/triton_{os.getuid()}")
    if started_by_agent(os.environ) and os.environ.get(_ABORTS) == "1":
        # torch's agent sets this where the user has not.
        del os.environ[_ABORTS]
    for name, value in gpu_variables(world, deterministic).items():
        os.environ.setdefault(name, value)


def least_capability() -> tuple[int, int] | None:
    """Return the least compute capability of this machine's GPUs by NVIDIA's driver, None without it. Does not start
    CUDA, which would take memory of a GPU."""
    found = re.findall(r"^(\d+)\.(\d+)$", _asked("compute_cap"), re.MULTILINE)
    return min(((int(major), int(minor)) for major, minor in found), default=None)


def triton_problem() -> str | None:
    """Return why Triton cannot load its kernels here, None if it can: it compiles a part of its own at its first
    start."""
    if not any(map(shutil.which, filter(None, (os.environ.get("CC"), "gcc", "clang")))):
        return "Triton's kernels need a C compiler, and this machine has none; apt install gcc, or set CC"
    # As Triton does: Debian's own scheme names a folder without headers.
    own = sysconfig.get_path("include", "posix_prefix")
    others = [
        folder for name in ("CPATH", "C_INCLUDE_PATH") for folder in os.environ.get(name, "").split(":") if folder
    ]
    if any(Path(folder, "Python.h").exists() for folder in (own, *others)):
        return None
    return (
        f"Triton's kernels need Python.h, and {own} has none; apt install python3-dev, take a Python that has it, or "
        "name its folder in CPATH"
    )


def gpu_memory_problem(cluster: Cluster | None) -> str | None:
    """Return an error if every GPU of this machine is smaller than the cluster file states, by NVIDIA's driver; else
    None. Does not start CUDA."""
    stated = stated_memory(cluster)
    if stated is None:
        return None
    found = re.findall(r"^(\d+) MiB$", _asked("memory.total"), re.MULTILINE)
    largest = max((int(mebibytes) * 2**20 for mebibytes in found), default=stated.size)
    if largest >= _USABLE * stated.size:
        return None
    return (
        f"cluster.accelerator.memory is {stated.text}, but this machine's GPU has {units.size(largest)}; set "
        f"cluster.accelerator.memory={_gibibytes(_USABLE * largest)} (--force takes it as it is)"
    )


def memory_held_by_others() -> str | None:
    """Return a sentence if other programs hold so much of a GPU's memory, by NVIDIA's driver, that a plan which fills
    the GPU may not fit; else None. Call it before a rank starts."""
    found = re.findall(r"^(\d+) MiB, (\d+) MiB$", _asked("memory.used,memory.total"), re.MULTILINE)
    used_mib = max((int(used) for used, total in found if int(used) > (1 - _USABLE) * int(total)), default=0)
    if not used_mib:
        return None
    return (
        f"other programs hold {units.size(used_mib * 2**20)} of a GPU's memory (nvidia-smi shows which), of which no "
        "plan knows; state what is left as cluster.accelerator.memory"
    )


def cluster_of_gpus(ranks: int) -> Cluster | None:
    """Return a description of this machine with as many ranks, each on a GPU of its own, by NVIDIA's driver: the name
    and the usable memory of its GPUs, and the usable memory of the machine. None without the driver, with too few GPUs,
    and where GPUs differ or are divided (MIG), as the driver does not tell which of them CUDA takes. Does not start
    CUDA."""
    found = re.findall(r"^(\d+) MiB, ([^,]+), (.+)$", _asked("memory.total,mig.mode.current,name"), re.MULTILINE)
    if len(found) < ranks or len(set(found)) != 1 or found[0][1] == "Enabled":
        return None
    mebibytes, _, name = found[0]
    accelerator = Accelerator(name=name, memory=_gibibytes(_USABLE * int(mebibytes) * 2**20))
    host = Host(memory=_gibibytes(usable_memory(machine_memory())))
    return Cluster(accelerator=accelerator, node=Node(ranks=ranks, host=host))


def _gibibytes(size: float) -> str:
    return f"{int(size / 2**30 * 10) / 10}GiB"


def _asked(what: str) -> str:
    """Return what NVIDIA's driver says of each GPU that the user has not hidden, a line for each; nothing without
    it."""
    given = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    if not given:
        return _driver(what, [])
    if given.startswith("GPU-") or os.environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID":
        return _driver(what, [f"--id={given}"])
    # CUDA numbers the fastest GPU first, and the driver numbers them by their place on the bus.
    if len(set(_driver("name", []).splitlines())) < 2:
        return _driver(what, [])
    return _driver(what, [f"--id={found}"] if (found := _uuids(given)) else [])


@cache
def _uuids(given: str) -> str:
    """Return the UUIDs of the GPUs of CUDA_VISIBLE_DEVICES, separated by commas. Another process starts CUDA."""
    code = (
        "import torch\n"
        "found = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))\n"
        "print(','.join(f'GPU-{one.uuid}' for one in found))"
    )
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False).stdout.strip()


def _driver(what: str, options: Sequence[str]) -> str:
    command = ["nvidia-smi", f"--query-gpu={what}", "--format=csv,noheader", *options]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False, timeout=ANSWER).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""


def few_queues(environment: Mapping[str, str]) -> str | None:
    """Return a sentence if the user's number of hardware queues, which stays, is lower than that of a run, else None.
    Scripts of Megatron-LM set 1."""
    name = "CUDA_DEVICE_MAX_CONNECTIONS"
    # AMD's driver does not read it.
    wanted, given = gpu_variables(1).get(name), environment.get(name, "")
    if wanted is None or not given.isdecimal() or int(given) >= int(wanted):
        return None
    return (
        f"{name} is {given}, and a run sets {wanted} where it is not set: streams that share a hardware queue wait for "
        "each other, so less is sent beside the computation; unset it where your job script or image sets it"
    )


def fixed_segments(environment: Mapping[str, str]) -> str | None:
    """Return a sentence if the user's old name of PYTORCH_ALLOC_CONF, which torch reads in its place, has no segments
    that grow, else None."""
    if _OLD_ALLOCATOR not in other_variables(environment):
        return None
    return (
        f"{_OLD_ALLOCATOR} is {environment[_OLD_ALLOCATOR]}, and torch reads it in place of the {ALLOCATOR} that a run "
        f"sets, so fragmentation may run a GPU out of memory; add {_SEGMENTS} to it, or unset it"
    )


def other_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return those variables that the user has set otherwise, also by the old name of PYTORCH_ALLOC_CONF."""
    wanted = gpu_variables(2)
    found = {name: environment[name] for name in wanted if environment.get(name, wanted[name]) != wanted[name]}
    old = environment.get(_OLD_ALLOCATOR, _SEGMENTS)
    return found if ALLOCATOR not in wanted or _SEGMENTS in old else found | {_OLD_ALLOCATOR: old}
