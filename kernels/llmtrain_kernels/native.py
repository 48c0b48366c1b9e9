"""C++ kernels for the CPU: built by the machine's own compiler on first use, kept in a cache, called through ctypes.

A source is the `cpu.cpp` in an operation's folder: `extern "C"` functions over pointers and sizes. It includes nothing
of torch, so it compiles in about a second and one build serves every torch. Where nothing can be built, callers take
their torch form.
"""

import ctypes
import fcntl
import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import torch
from torch import Tensor

SOURCES = Path(__file__).parent
# Not -ffast-math: linked into a shared library it makes the whole process flush denormals to zero.
FLAGS = ("-std=c++17", "-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math", "-fopenmp", "-fPIC", "-Wall")
OPENMP_RUNTIMES = ("libgomp", "libiomp5", "libomp")
BUILD_SECONDS = 300


class NativeError(Exception):
    """Why a source could not be built or loaded, in one sentence."""


def native_functions(source: str, **signatures: str) -> SimpleNamespace | None:
    """Return the functions of `{source}/cpu.cpp`, or None where it cannot be built (`native_reason` says why).

    signatures: for each function its parameters, one letter each: p pointer (`tensor.data_ptr()`), l int64_t, f float,
    d double. All return void. ctypes releases the GIL during a call. Threads are OpenMP's, as many as
    `torch.get_num_threads()`.
    """
    library = _library(source)
    if isinstance(library, str):
        return None
    functions = SimpleNamespace()
    for name, letters in signatures.items():
        function = getattr(library, name)
        function.argtypes = [_argument_types()[letter] for letter in letters]
        function.restype = None
        setattr(functions, name, function)
    return functions


def takes_native(x: Tensor) -> bool:
    """Whether a kernel may take the place of torch's operations on `x`: fp32 or bf16 on a CPU, and not being traced."""
    return x.device.type == "cpu" and x.dtype in (torch.float32, torch.bfloat16) and not torch.compiler.is_compiling()


def native_reason(sources: tuple[str, ...] = ()) -> str | None:
    """Return why the sources (all, unless named) do not run here, or None if they do. Builds what is not built yet."""
    for source in sources or sorted(path.parent.name for path in SOURCES.glob("*/cpu.cpp")):
        library = _library(source)
        if isinstance(library, str):
            return library
    return None


def native_available(*sources: str) -> bool:
    """Whether the sources (all, unless named) run here."""
    return native_reason(sources) is None


def _argument_types() -> dict[str, type]:
    return {"p": ctypes.c_void_p, "l": ctypes.c_int64, "f": ctypes.c_float, "d": ctypes.c_double}


@functools.cache
def _library(source: str) -> ctypes.CDLL | str:
    """Return the loaded library, or why there is none."""
    try:
        _share_openmp()
        path = _built(source)
        try:
            return ctypes.CDLL(str(path))
        except OSError:
            # A disk that filled up or lost power may keep a broken file under a finished name: once more.
            path.unlink(missing_ok=True)
            return ctypes.CDLL(str(_built(source)))
    except (NativeError, OSError) as error:
        return f"{source}/cpu.cpp: {error}"


def _share_openmp() -> None:
    """Make the OpenMP runtime that torch has loaded visible to our libraries, which name none: a second one in the
    process would have threads of its own beside torch's, and not know of `torch.set_num_threads`."""
    with suppress(OSError), open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as maps:
        paths = {line.split(maxsplit=5)[5].strip() for line in maps if line.count(" ") > 4 and "/" in line}
        runtimes = [path for path in sorted(paths) if os.path.basename(path).startswith(OPENMP_RUNTIMES)]
        own = [path for path in runtimes if path.startswith(str(Path(torch.__file__).parents[1]))]
        if runtimes:
            ctypes.CDLL((own or runtimes)[0], mode=ctypes.RTLD_GLOBAL)
            return
    raise NativeError("torch has loaded no OpenMP runtime that could be shared")


def _built(source: str) -> Path:
    """Return the path of the library, which is built unless the cache has it.

    Ranks that start together wait for the first one's build. The lock is the kernel's, gone with the process that held
    it, and a library appears under its name only when complete, so a killed build leaves nothing in the way.
    """
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        raise NativeError("there is no C++ compiler; install g++ or set CXX")
    code = (SOURCES / source / "cpu.cpp").read_bytes()
    headers = b"".join(path.read_bytes() for path in sorted(SOURCES.glob("*.h")))
    key = hashlib.sha256(b"\0".join([code, headers, " ".join(FLAGS).encode(), _run(compiler, "--version"), _cpu()]))
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "llmtrain" / "kernels"
    path = folder / f"{source}-{key.hexdigest()[:16]}.so"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with open(folder / f"{source}.lock", "w", encoding="utf-8") as lock:
            with suppress(OSError):  # a file system without locks: several ranks build, and the last rename stays
                fcntl.flock(lock, fcntl.LOCK_EX)
            if not path.exists():
                _build(compiler, SOURCES / source / "cpu.cpp", path)
    return path


def _build(compiler: str, source: Path, path: Path) -> None:
    with tempfile.TemporaryDirectory(prefix=f"{path.stem}-", dir=path.parent) as aside:
        unlinked, linked = f"{aside}/unlinked.o", f"{aside}/linked.so"
        _run(compiler, *FLAGS, f"-I{SOURCES}", "-c", str(source), "-o", unlinked)
        # Linked without -fopenmp, so that the library names no OpenMP runtime of its own.
        _run(compiler, "-shared", unlinked, "-o", linked)
        os.replace(linked, path)


def _run(*command: str) -> bytes:
    try:
        return subprocess.run(command, capture_output=True, check=True, timeout=BUILD_SECONDS).stdout
    except subprocess.CalledProcessError as error:
        lines = error.stderr.decode(errors="replace").splitlines() or [f"exit code {error.returncode}"]
        told = next((line for line in lines if "error" in line), lines[0])
        raise NativeError(f"{command[0]} failed: {told}") from None
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NativeError(f"{command[0]} failed: {error}") from None


def _cpu() -> bytes:
    """What `-march=native` depends on: the same cache may serve machines of several kinds."""
    with suppress(OSError), open("/proc/cpuinfo", "rb") as info:
        return b"".join(sorted({line for line in info if line.startswith((b"flags", b"Features", b"model name"))}))
    return b""
