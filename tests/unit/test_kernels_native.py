"""Building and loading C++ kernels."""

import mmap
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from llmtrain_kernels import native

COUNT_THREADS = """
#include <cstdint>
extern "C" void count(int64_t* threads, int64_t n, double scale) {
    int64_t total = 0;
    #pragma omp parallel reduction(+ : total)
    total += n;
    *threads = static_cast<int64_t>(total * scale);
}
"""


@pytest.fixture(autouse=True)
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with one source file, and an empty cache."""
    monkeypatch.setattr(native, "SOURCES", tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "counting").mkdir()
    (tmp_path / "counting" / "cpu.cpp").write_text(COUNT_THREADS)
    native._library.cache_clear()
    yield tmp_path
    native._library.cache_clear()


def count_threads() -> int:
    functions = native.native_functions("counting", count="pld")
    assert functions is not None, native.native_reason()
    threads = torch.zeros(1, dtype=torch.int64)
    functions.count(threads.data_ptr(), 3, 2.0)
    return int(threads) // 6


def libraries(folder: Path) -> list[Path]:
    return sorted((folder / "cache/llmtrain/kernels").glob("*.so"))


def test_threads_are_torchs() -> None:
    before = torch.get_num_threads()
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            assert count_threads() == threads
    finally:
        torch.set_num_threads(before)
    mapped = Path("/proc/self/maps").read_text().splitlines()
    # Wheels such as that of sentencepiece have one of their own, of another name.
    assert len({line.split()[-1] for line in mapped if "/libgomp.so" in line}) == 1


def test_a_file_in_memory_whose_name_is_no_utf8(folders: Path) -> None:
    file = folders / os.fsdecode(b"caf\xe9")
    file.write_bytes(b"x")
    with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ):
        assert count_threads() > 0


def test_builds_once_and_anew_for_another_source(folders: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    count_threads()
    (first,) = libraries(folders)
    native._library.cache_clear()
    with monkeypatch.context() as patch:
        patch.setattr(native, "_build", lambda *_: pytest.fail("built again"))
        count_threads()
    native._library.cache_clear()
    (folders / "counting" / "cpu.cpp").write_text(COUNT_THREADS + "// changed\n")
    count_threads()
    assert len(libraries(folders)) == 2
    assert first in libraries(folders)


def test_a_broken_library_is_built_again(folders: Path) -> None:
    count_threads()
    (library,) = libraries(folders)
    native._library.cache_clear()
    library.unlink()
    library.write_bytes(b"")
    assert count_threads() >= 1


def test_a_killed_build_blocks_nothing(folders: Path) -> None:
    """The build is killed while it holds the lock and has written half of its output."""
    program = (
        "import os, signal; from pathlib import Path; from llmtrain_kernels import native;"
        f"native.SOURCES = Path({str(folders)!r});"
        "native._build = lambda compiler, source, path: (path.with_suffix('.part').write_text('half'),"
        " os.kill(os.getpid(), signal.SIGKILL));"
        "native._built('counting')"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == -9
    assert count_threads() >= 1


@pytest.mark.parametrize("compiler", ["/nowhere/c++", "false", None])
def test_without_a_compiler_there_is_a_reason(compiler: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    if compiler:
        monkeypatch.setenv("CXX", compiler)
    else:
        monkeypatch.delenv("CXX", raising=False)
        monkeypatch.setenv("PATH", "")
    assert native.native_functions("counting", count="pld") is None
    assert not native.native_available("counting")
    assert (
        "C++ compiler" in str(native.native_reason()) if compiler is None else compiler in str(native.native_reason())
    )


def test_a_source_that_does_not_compile_is_a_reason(folders: Path) -> None:
    (folders / "counting" / "cpu.cpp").write_text("not C++")
    assert "error" in str(native.native_reason(("counting",)))
