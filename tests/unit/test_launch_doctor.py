"""The doctor distinguishes NVIDIA's apex from PyPI's package of that name, and working parts from broken ones."""

import math
import os
import tempfile
from pathlib import Path

import pytest
import torch
from llmtrain.cluster.control_groups import Quota
from llmtrain.launch import doctor, gpus
from llmtrain.launch.doctor import Finding, can_train
from llmtrain.launch.gpus import set_gpu_variables
from llmtrain.start import run as start
from llmtrain_kernels import native


def look_for_apex(folder: Path, files: list[str], monkeypatch: pytest.MonkeyPatch) -> Finding:
    for file in files:
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).touch()
    monkeypatch.syspath_prepend(str(folder))
    return doctor._apex()


def test_no_apex(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "find_spec", lambda name: None)
    found = doctor._apex()
    assert found.state == "absent"
    assert "not on PyPI" in found.advice


def test_the_apex_of_pypi_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = look_for_apex(tmp_path, ["apex/__init__.py", "apex/views.py"], monkeypatch)
    assert found.state == "wrong"
    assert found.advice.startswith("pip uninstall apex")


def test_apex_without_extensions_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = look_for_apex(tmp_path, ["apex/__init__.py", "apex/optimizers/__init__.py"], monkeypatch)
    assert found.state == "wrong"
    assert "without its CUDA extensions" in found.detail


def test_the_real_apex_is_fine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = ["apex/__init__.py", "apex/optimizers/__init__.py", "amp_C.py"]
    assert look_for_apex(tmp_path, files, monkeypatch).state == "ok"


@pytest.mark.parametrize(("quota", "said"), [(math.inf, "8 usable of 16"), (2.5, "8 usable of 16, by quota 2.5")])
def test_a_quota_of_processor_time_is_told(quota: float, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    monkeypatch.setattr(os, "cpu_count", lambda: 16)
    monkeypatch.setattr(doctor, "cpu_quota", lambda: Quota(quota))
    assert next(doctor._machine()).detail == said


def test_only_what_training_needs_stops_it() -> None:
    optional = [Finding("a", "ok", ""), Finding("b", "absent", ""), Finding("c", "wrong", "")]
    assert can_train(optional)
    assert not can_train([*optional, Finding("d", "broken", "")])


@pytest.mark.parametrize(("reason", "state"), [(None, "ok"), ("norm/cpu.cpp: there is no C++ compiler", "absent")])
def test_it_is_told_whether_the_cpu_kernels_build(
    reason: str | None, state: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native, "native_reason", lambda: reason)
    (found,) = doctor._kernels()
    assert found.state == state
    assert (reason or "") in found.detail
    assert ("offload from GPUs" in found.advice) is (reason is not None)


def test_a_gpu_with_few_queues_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    found = doctor._gpu_environment()
    assert found.state == "wrong"
    assert found.detail == "CUDA_DEVICE_MAX_CONNECTIONS=1"
    assert "unset CUDA_DEVICE_MAX_CONNECTIONS: runs set CUDA_DEVICE_MAX_CONNECTIONS=32" in found.advice
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    assert doctor._gpu_environment().state == "ok"


@pytest.mark.parametrize("given", ["max_split_size_mb:128", "max_split_size_mb:128,expandable_segments:True"])
def test_the_old_name_of_the_allocator_s_settings_is_told(given: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch reads it first, and then not the new one, which a run sets."""
    monkeypatch.setattr(os, "environ", {"PYTORCH_CUDA_ALLOC_CONF": given})
    found, remarks = doctor._gpu_environment(), start._remarks(None, 1)
    if given.endswith("True"):
        assert (found.state, remarks) == ("ok", [])
        return
    assert found.detail == f"PYTORCH_CUDA_ALLOC_CONF={given}"
    assert found.advice == "unset PYTORCH_CUDA_ALLOC_CONF: runs set PYTORCH_ALLOC_CONF=expandable_segments:True"
    (remark,) = remarks
    assert remark.startswith(f"PYTORCH_CUDA_ALLOC_CONF is {given}, and torch reads it in place of the")


@pytest.mark.parametrize("world", [1, 2])
def test_ranks_of_gpus_set_what_the_user_has_not(world: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {"CUDA_DEVICE_MAX_CONNECTIONS": "8"})
    set_gpu_variables(world)
    alone = {
        "CUDA_DEVICE_MAX_CONNECTIONS": "8",
        "PYTORCH_ALLOC_CONF": "expandable_segments:True",
        "TRITON_CACHE_DIR": f"{tempfile.gettempdir()}/triton_{os.getuid()}",
    }
    several = {
        "TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING": "0",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
        "TORCH_NCCL_ENABLE_MONITORING": "0",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
        "TORCH_FR_BUFFER_SIZE": "20000",
    }
    assert os.environ == alone | (several if world > 1 else {})


@pytest.mark.parametrize(("by_agent", "given", "found"), [(True, "1", "0"), (True, "3", "3"), (False, "1", "1")])
def test_ranks_of_torchrun_leave_the_end_of_a_run_to_the_watchdog(
    by_agent: bool, given: str, found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # torch's agent gives its ranks a 1 where the user has set nothing.
    started = {"TORCHELASTIC_RUN_ID": "none"} if by_agent else {}
    monkeypatch.setattr(os, "environ", {"TORCH_NCCL_ASYNC_ERROR_HANDLING": given} | started)
    set_gpu_variables(2)
    assert os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == found


def test_an_amd_gpu_has_no_segments_that_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also with a torch that its user has built, whose version says nothing of ROCm."""
    monkeypatch.setattr(torch.version, "hip", "7.1")
    assert "PYTORCH_ALLOC_CONF" not in gpus.gpu_variables(2)
    assert "CUDA_DEVICE_MAX_CONNECTIONS" not in gpus.gpu_variables(2)
    assert gpus.gpu_variables(1) == {"GPU_MAX_HW_QUEUES": "16"}


@pytest.mark.parametrize("deterministic", [False, True])
def test_products_have_fixed_workspaces_where_the_run_is_deterministic(
    deterministic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "environ", {})
    set_gpu_variables(1, deterministic)
    assert os.environ.get("CUBLAS_WORKSPACE_CONFIG") == (":4096:8" if deterministic else None)
    # The user's own value stays.
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":16:8"
    set_gpu_variables(1, deterministic)
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"


def test_a_gpu_that_cuda_cannot_use_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """NVML counts it, and CUDA does not start, as where the fabric manager is missing."""

    def fails() -> None:
        raise RuntimeError("Error 802: system not yet initialized\nmore")

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(torch.cuda, "_lazy_init", fails)
    found = doctor._devices(True)
    assert (found.state, found.detail) == ("broken", "CUDA cannot start: Error 802: system not yet initialized")


def test_gpus_of_the_driver_that_torch_does_not_find_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container that was started without them, which has no nvidia-smi."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(doctor.shutil, "which", lambda name: None)
    monkeypatch.setattr(doctor, "has_nvidia_gpus", lambda: True)
    assert doctor._devices(True).state == "wrong"
    monkeypatch.setattr(doctor, "has_nvidia_gpus", lambda: False)
    assert doctor._devices(True).state == "absent"
