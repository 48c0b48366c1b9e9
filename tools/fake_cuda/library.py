"""Builds the device that computes nothing, and loads it before torch."""

import ctypes
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

SOURCE = Path(__file__).with_name("device.cpp")


def compiler() -> str | None:
    """Return the C++ compiler; None where there is none."""
    return os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")


def build() -> Path:
    """Return the library, in the user's cache; build it unless one of this source and this torch is there."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "llmtrain" / "fake_cuda"
    key = hashlib.sha256(SOURCE.read_bytes() + f"{version('torch')} {sys.platform}".encode()).hexdigest()
    built = folder / f"device-{key[:16]}.so"
    if not built.exists():
        folder.mkdir(parents=True, exist_ok=True)
        command, torch = compiler(), _torch()
        assert command is not None
        aside = folder / f"device-{os.getpid()}.so"
        paths = [f"-I{torch}/include", f"-I{torch}/include/torch/csrc/api/include", f"-L{torch}/lib"]
        flags = ["-std=c++20", "-O0", "-shared", "-fPIC", "-w"]
        subprocess.run(
            [command, *flags, str(SOURCE), *paths, "-ltorch_cpu", "-lc10", "-o", str(aside)], check=True, timeout=300
        )
        os.replace(aside, built)
    return built


def load(library: Path) -> None:
    """Load torch's libraries and then the device. torch is not imported yet."""
    assert "torch" not in sys.modules
    folder = _torch() / "lib"
    for path in [*folder.glob("libgomp*"), folder / "libc10.so", folder / "libtorch_cpu.so", library]:
        ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)


def _torch() -> Path:
    found = importlib.util.find_spec("torch")
    assert found is not None
    assert found.origin is not None
    return Path(found.origin).parent
