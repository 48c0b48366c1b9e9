"""C++ kernels for the CPU. The machine's compiler builds them on first use; ctypes calls them from a cached library.

A source is the `cpu.cpp` in an operation's folder: `extern "C"` functions over pointers and sizes. It includes no torch
headers, so it compiles in about a second, and one build serves every torch version. If the build fails, callers use
torch operations.
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
# -ffast-math is missing on purpose: in a shared library it makes the whole process flush denormals to zero.
FLAGS = ("-std=c++17", "-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math", "-fopenmp", "-fPIC", "-Wall")
OPENMP_RUNTIMES = ("libgomp", "libiomp5", "libomp")
BUILD_SECONDS = 300


class NativeError(Exception):
    """A source could not be built or loaded. The message is one sentence that says why."""


def native_functions(source: str, **signatures: str) -> SimpleNamespace | None:
    """Return the functions of `{source}/cpu.cpp`, or None if it cannot be built (`native_reason` says why).

    signatures: the parameters of each function, one letter each: p pointer (`tensor.data_ptr()`), l int64_t, f float,
    d double. All functions return void. ctypes releases the GIL during a call. Kernels use OpenMP with
    `torch.get_num_threads()` threads.
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
    """Whether a native kernel can process `x`: fp32 or bf16, on a CPU, and not traced by torch.compile."""
    return x.device.type == "cpu" and x.dtype in (torch.float32, torch.bfloat16) and not torch.compiler.is_compiling()


def native_reason(sources: tuple[str, ...] = ()) -> str | None:
    """Return why the sources (default: all) do not run here, or None if they do. Builds them if needed."""
    for source in sources or sorted(path.parent.name for path in SOURCES.glob("*/cpu.cpp")):
        library = _library(source)
        if isinstance(library, str):
            return library
    return None


def native_available(*sources: str) -> bool:
    """Whether the sources (default: all) run here."""
    return native_reason(sources) is None


def _argument_types() -> dict[str, type]:
    return {"p": ctypes.c_void_p, "l": ctypes.c_int64, "f": ctypes.c_float, "d": ctypes.c_double}


@functools.cache
def _library(source: str) -> ctypes.CDLL | str:
    """Return the loaded library, or the reason why it is missing."""
    try:
        _share_openmp()
        path = _built(source)
        try:
            return ctypes.CDLL(str(path))
        except OSError:
            # A full disk or a power loss can leave a broken file in the cache. Build it again, once.
            path.unlink(missing_ok=True)
            return ctypes.CDLL(str(_built(source)))
    except (NativeError, OSError) as error:
        return f"{source}/cpu.cpp: {error}"


def _share_openmp() -> None:
    """Export the symbols of torch's OpenMP runtime to our libraries, which link to none. A second runtime would have a
    thread pool of its own and ignore `torch.set_num_threads`."""
    with suppress(OSError), open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as maps:
        paths = {line.split(maxsplit=5)[5].strip() for line in maps if line.count(" ") > 4 and "/" in line}
        runtimes = [path for path in sorted(paths) if os.path.basename(path).startswith(OPENMP_RUNTIMES)]
        own = [path for path in runtimes if path.startswith(str(Path(torch.__file__).parents[1]))]
        if runtimes:
            ctypes.CDLL((own or runtimes)[0], mode=ctypes.RTLD_GLOBAL)
            return
    raise NativeError("torch has loaded no OpenMP runtime that could be shared")


def _built(source: str) -> Path:
    """Return the path of the library in the cache; build the library if it is not there.

    Ranks that start together wait for the first one's build. The operating system releases the lock when its holder
    ends, and a rename publishes only complete libraries. So a killed build does not block later ones.
    """
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++") or shutil.which("clang++")
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
            with suppress(OSError):  # without locks in the file system, several ranks build, and the last rename wins
                fcntl.flock(lock, fcntl.LOCK_EX)
            if not path.exists():
                _build(compiler, SOURCES / source / "cpu.cpp", path)
    return path


def _build(compiler: str, source: Path, path: Path) -> None:
    with tempfile.TemporaryDirectory(prefix=f"{path.stem}-", dir=path.parent) as aside:
        unlinked, linked = f"{aside}/unlinked.o", f"{aside}/linked.so"
        _run(compiler, *FLAGS, f"-I{SOURCES}", "-c", str(source), "-o", unlinked)
        # Without -fopenmp, so that the library does not link to an OpenMP runtime.
        _run(compiler, "-shared", unlinked, "-o", linked)
        os.replace(linked, path)


def _run(*command: str) -> bytes:
    try:
        return subprocess.run(command, capture_output=True, check=True, timeout=BUILD_SECONDS).stdout
    except subprocess.CalledProcessError as error:
        lines = error.stderr.decode(errors="replace").splitlines() or [f"exit code {error.returncode}"]
        message = next((line for line in lines if "error" in line), lines[0])
        raise NativeError(f"{command[0]} failed: {message}") from None
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NativeError(f"{command[0]} failed: {error}") from None


def _cpu() -> bytes:
    """Return the CPU's model and features, which `-march=native` depends on. Several CPU types may share one cache."""
    with suppress(OSError), open("/proc/cpuinfo", "rb") as info:
        return b"".join(sorted({line for line in info if line.startswith((b"flags", b"Features", b"model name"))}))
    return b""
