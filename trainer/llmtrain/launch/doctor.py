"""`llmtrain doctor`: check the machine and its packages, and advise what to install."""

import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from llmtrain_data import units

from llmtrain.cluster.control_groups import cpu_quota
from llmtrain.cluster.memory import machine_memory
from llmtrain.launch.gpus import ALLOCATOR, gpu_variables, has_nvidia_gpus, other_variables, triton_problem

State = Literal["ok", "absent", "wrong", "broken"]
GIB = 2**30


@dataclass(frozen=True)
class Finding:
    """The result of one check.

    state: ok; absent (optional and not there); wrong (there but unusable or set wrongly, such as a GPU beside a CPU
    build of torch); broken (training fails). advice: what to do, empty if nothing.
    """

    name: str
    state: State
    detail: str
    advice: str = ""


def examine() -> list[Finding]:
    """Run all checks; imports torch."""
    findings = [_python(), *_torch(), *_machine(), _compiler(), *_kernels(), *_required(), *_flash(), _apex()]
    return [*findings, *_optional(), *_launchers()]


def can_train(findings: list[Finding]) -> bool:
    """Return whether training can run: no check is `broken`."""
    return all(finding.state != "broken" for finding in findings)


def _python() -> Finding:
    return Finding("python", "ok", f"{platform.python_version()} at {sys.executable}")


def _torch() -> Iterator[Finding]:
    try:
        import torch
        import torch.distributed as dist
    except (ImportError, OSError) as error:
        yield Finding("torch", "broken", f"cannot be imported: {error}", "pip install 'torch>=2.11'")
        return
    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else f"ROCm {torch.version.hip}"
    built_for_gpu = bool(torch.version.cuda or torch.version.hip)
    yield Finding("torch", "ok", f"{torch.__version__} ({build if built_for_gpu else 'CPU only'})")
    yield (devices := _devices(built_for_gpu))
    if devices.state == "ok":
        yield _gpu_environment()
    if dist.is_available() and dist.is_gloo_available():
        yield Finding("gloo", "ok", "collectives between CPU ranks")
    else:
        yield Finding("gloo", "broken", "this torch has no gloo", "install torch from pytorch.org or PyPI")
    if dist.is_available() and dist.is_nccl_available():
        from llmtrain.comm.device import gpu_count, nccl_version

        yield Finding("nccl", "ok", nccl_version() if gpu_count() else "no GPU to use it")
    else:
        yield Finding("nccl", "absent", "this torch has none", "only needed for several GPUs")


def _devices(built_for_gpu: bool) -> Finding:
    from llmtrain.comm.device import gpus

    try:
        cards = gpus()
    except RuntimeError as error:
        reason = str(error).partition("\n")[0]
        advice = "update the driver, or start nvidia-fabricmanager on a machine with NVSwitch; nvidia-smi shows more"
        return Finding("gpu", "broken", f"CUDA cannot start: {reason}", advice)
    if cards:
        return Finding("gpu", "ok", ", ".join(f"{card.name} ({units.size(card.memory)})" for card in cards))
    driver = next((tool for tool in ("nvidia-smi", "rocm-smi") if shutil.which(tool)), None)
    if driver and not built_for_gpu:
        advice = "install the torch build for your GPU from pytorch.org"
        return Finding("gpu", "wrong", f"{driver} is here, but torch is a CPU build", advice)
    if driver:
        return Finding("gpu", "wrong", f"{driver} is here, but torch finds no GPU", f"see what `{driver}` says")
    # A container sees what the driver has, also where it is given none of it.
    if has_nvidia_gpus() or any(Path("/proc/driver/nvidia/gpus").glob("*")):
        advice = "start the container with --gpus all, or see what nvidia-smi says outside of it"
        return Finding("gpu", "wrong", "NVIDIA's driver has GPUs, but torch finds none", advice)
    return Finding("gpu", "absent", "training runs on the CPU")


def _gpu_environment() -> Finding:
    name, wanted = "gpu environment", gpu_variables(2)
    if other := other_variables(os.environ):
        # The old name of ALLOCATOR is no variable of a run.
        names = dict.fromkeys(key if key in wanted else ALLOCATOR for key in other)
        advice = f"unset {' and '.join(other)}: runs set {', '.join(f'{key}={wanted[key]}' for key in names)}"
        return Finding(name, "wrong", ", ".join(f"{key}={value}" for key, value in other.items()), advice)
    return Finding(name, "ok", f"runs of several ranks set {', '.join(f'{key}={wanted[key]}' for key in wanted)}")


def _machine() -> Iterator[Finding]:
    import psutil

    usable, quota = len(os.sched_getaffinity(0)), cpu_quota().cores
    by_quota = f", by quota {quota:.3g}" if quota < usable else ""
    yield Finding("cores", "ok", f"{usable} usable of {os.cpu_count()}{by_quota}")
    yield Finding(
        "memory", "ok", f"{units.size(machine_memory())}, {units.size(psutil.virtual_memory().available)} free"
    )
    free = shutil.disk_usage(".").free
    if free >= GIB:
        yield Finding("disk", "ok", f"{units.size(free)} free here")
    else:
        yield Finding("disk", "broken", f"{units.size(free)} free here", "checkpoints need more: free some space")


def _compiler() -> Finding:
    for name in filter(None, (os.environ.get("CXX"), "c++", "g++", "clang++")):
        if path := shutil.which(name):
            answer = subprocess.run([path, "--version"], capture_output=True, text=True, check=False)
            return Finding("c++", "ok", answer.stdout.partition("\n")[0] or path)
    return Finding("c++", "absent", "no C++ compiler", "train.compile and the CPU kernels need one: apt install g++")


def _kernels() -> Iterator[Finding]:
    try:
        from llmtrain_kernels.native import native_reason
    except (ImportError, OSError):
        return  # `_torch` reports a missing torch.
    if reason := native_reason():
        advice = "torch's own operations take their place, more slowly; offload from GPUs and to files needs them"
        yield Finding("CPU kernels", "absent", reason, advice)
    else:
        yield Finding("CPU kernels", "ok", "C++, built for this processor")


def _required() -> Iterator[Finding]:
    for name in ("transformers", "datasets", "tokenizers", "gigatoken", "safetensors", "wandb"):
        found = installed_version(name)
        if found:
            yield Finding(name, "ok", found)
        else:
            yield Finding(name, "broken", "not installed", f"pip install {name}")


def _flash() -> Iterator[Finding]:
    for name in ("flash-attn", "triton"):
        found = installed_version(name)
        advice = (
            "pip install flash-attn --no-build-isolation" if name == "flash-attn" else "comes with torch's GPU builds"
        )
        if found and name == "triton" and (problem := triton_problem()):
            yield Finding(name, "wrong", f"{found}, but {problem.partition('; ')[0]}", problem.partition("; ")[2])
        else:
            yield Finding(name, "ok", found) if found else Finding(name, "absent", "GPU kernels; not installed", advice)


def _apex() -> Finding:
    advice = "the Dockerfile's image has it; else build it from https://github.com/NVIDIA/apex with --cuda_ext"
    spec = find_spec("apex")
    if spec is None:
        return Finding("apex", "absent", "NVIDIA's fused optimizers; not installed", f"not on PyPI: {advice}")
    found = installed_version("apex") or "unknown version"
    folders = [Path(folder) for folder in spec.submodule_search_locations or ()]
    if not any((folder / "optimizers").is_dir() for folder in folders):
        detail = f"{found} is another project, PyPI's apex, and not NVIDIA's"
        return Finding("apex", "wrong", detail, f"pip uninstall apex; {advice}")
    if find_spec("amp_C") is None:
        return Finding("apex", "wrong", f"{found} was built without its CUDA extensions", advice)
    return Finding("apex", "ok", f"{found}, NVIDIA's with CUDA extensions")


def _optional() -> Iterator[Finding]:
    found = installed_version("mpi4py")
    if found:
        yield Finding("mpi4py", "ok", found)
    else:
        yield Finding("mpi4py", "absent", "not installed", "pip install mpi4py, with an MPI library")


def _launchers() -> Iterator[Finding]:
    for name, tool, package in (("slurm", "srun", "slurm-client"), ("mpi", "mpirun", "openmpi-bin")):
        if path := shutil.which(tool):
            yield Finding(name, "ok", path)
        else:
            yield Finding(name, "absent", f"no {tool}", f"only needed on a cluster: apt install {package}")


def installed_version(package: str) -> str | None:
    """Return the version of an installed package without importing it."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None
