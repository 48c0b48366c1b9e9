"""The metrics file: valid JSON at any moment, and a curve that resumes where it stopped."""

import json
import math
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest
from llmtrain.errors import RunFailedError
from llmtrain.telemetry import metrics
from llmtrain.telemetry.metrics import MetricsFile, drop_after, read_metrics

from tests.tiny import small_files


def rows_of(path: Path) -> list[tuple[str | None, int]]:
    return [(row.get("event"), row["step"]) for row in read_metrics(path)]


def opened(path: Path, step: int, warn: Callable[[str], None]) -> MetricsFile:
    file = MetricsFile(path, warn)
    file.rewind(step)
    return file


def write_run(path: Path, first: int, last: int, end: bool = True) -> None:
    file = opened(path, first, pytest.fail)
    for step in range(first + 1, last + 1):
        file.write({"step": step, "loss": 1 / step})
        if step % 2 == 0:
            file.write({"event": "eval", "step": step, "split": "validation", "loss": 2 / step})
    if end:
        file.write({"event": "end", "step": last})
    file.close()


def test_rows_come_back(tmp_path: Path) -> None:
    write_run(tmp_path / "m", 0, 3)
    assert rows_of(tmp_path / "m") == [(None, 1), (None, 2), ("eval", 2), (None, 3), ("end", 3)]
    assert read_metrics(tmp_path / "m")[0]["loss"] == 1.0
    assert read_metrics(tmp_path / "absent") == []


def test_what_is_not_finite_is_null(tmp_path: Path) -> None:
    file = opened(tmp_path / "m", 0, pytest.fail)
    file.write({"step": 1, "loss": math.nan, "memory_bytes": {"rss": math.inf}, "list": [-math.inf, 1.5]})
    text = (tmp_path / "m").read_text()
    row = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert row == {"step": 1, "loss": None, "memory_bytes": {"rss": None}, "list": [None, 1.5]}


def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path: Path) -> None:
    write_run(tmp_path / "whole", 0, 8)
    write_run(tmp_path / "cut", 0, 7, end=False)
    write_run(tmp_path / "cut", 4, 8)
    assert (tmp_path / "cut").read_bytes() == (tmp_path / "whole").read_bytes()


def test_any_cut_of_the_file_leaves_a_sound_one(tmp_path: Path) -> None:
    path = tmp_path / "m"
    write_run(path, 0, 6)
    whole = path.read_bytes()
    lines = whole.splitlines(keepends=True)
    for length in range(len(whole) + 1):
        path.write_bytes(whole[:length])
        kept, end = drop_after(path, 4)
        written = [line for line in lines[:6] if whole.index(line) + len(line) <= length]
        assert path.read_bytes() == b"".join(written)
        assert len(kept) == len(written)
        assert end == ({"event": "end", "step": 6} if length == len(whole) else None)
    assert [file.name for file in tmp_path.iterdir()] == ["m"]


def test_step_0_starts_anew(tmp_path: Path) -> None:
    (tmp_path / "m").write_text('{"event": "eval", "step": 0, "loss": 9.0}\n{"step": 1}\n')
    opened(tmp_path / "m", 0, pytest.fail).close()
    assert (tmp_path / "m").read_bytes() == b""


def test_lines_that_are_no_rows_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "m").write_bytes(b'{"step": 1}\n[1]\n\xff\xfe\n{"step": 2\n{"step": 3}\n{"step": 4}')
    assert rows_of(tmp_path / "m") == [(None, 1), (None, 3)]


def test_rows_written_before_a_kill_are_there(tmp_path: Path) -> None:
    program = (
        "import os, signal, sys\nfrom pathlib import Path\nfrom llmtrain.telemetry.metrics import MetricsFile\n"
        "file = MetricsFile(Path(sys.argv[1]), print)\nfile.rewind(0)\n"
        "for step in range(1, 4): file.write({'step': step, 'text': 'x' * 100_000})\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path / "m")])
    assert done.returncode == -signal.SIGKILL
    assert rows_of(tmp_path / "m") == [(None, 1), (None, 2), (None, 3)]


def full_disk(file: MetricsFile, room: int = 0) -> AbstractContextManager[None]:
    """Leave room for so many more bytes in the metrics file."""
    return small_files(file._path.stat().st_size + room)


@contextmanager
def lost_handle(file: MetricsFile) -> Iterator[None]:
    """Let no write to the open file succeed any more, and the path lead nowhere for a while."""
    full = os.open("/dev/full", os.O_WRONLY)
    os.dup2(full, descriptor_of(file))
    os.close(full)
    with moved_away(file):
        yield


@contextmanager
def moved_away(file: MetricsFile) -> Iterator[None]:
    """Replace the folder of the metrics file by a file."""
    folder = file._path.parent
    away = folder.rename(folder.with_name("away"))
    folder.touch()
    yield
    folder.unlink()
    away.rename(folder)


def descriptor_of(file: MetricsFile) -> int:
    assert file._file is not None
    return file._file.fileno()


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def file(tmp_path: Path, said: list[str]) -> MetricsFile:
    """A file with the rows of steps 1 and 2."""
    (tmp_path / "run").mkdir()
    file = opened(tmp_path / "run" / "m", 0, said.append)
    write_steps(file, 1, 2)
    return file


def write_steps(file: MetricsFile, *steps: int) -> None:
    for step in steps:
        file.write({"step": step, "text": "x" * 20})


def whole(*steps: int) -> bytes:
    return b"".join(json.dumps({"step": step, "text": "x" * 20}).encode() + b"\n" for step in steps)


@pytest.mark.parametrize(
    ("outage", "reason"),
    [
        (full_disk, "File too large"),
        # A part of a row still fits.
        (lambda file: full_disk(file, 25), "File too large"),
        (lost_handle, "No space left on device"),
    ],
    ids=["full", "nearly full", "lost"],
)
def test_rows_wait_until_they_can_be_written(
    outage: Callable[[MetricsFile], AbstractContextManager[None]], reason: str, file: MetricsFile, said: list[str]
) -> None:
    path = file._path
    for first in (3, 6):
        with outage(file):
            write_steps(file, first, first + 1)
            seen = None if path.parent.is_file() else path.read_bytes()
        # Not even while the disk is full is a part of a row in the file.
        assert seen in (None, whole(*range(1, first)))
        write_steps(file, first + 2)
        assert path.read_bytes() == whole(*range(1, first + 3))
    assert file.close() == ""
    assert said == [f"{path} cannot be written ({reason}); rows wait in memory until it can be"]


def test_rows_that_a_file_system_took_and_lost_are_written_again(file: MetricsFile) -> None:
    """As a network file system does that finds the disk full only after the write; a part of row 2 is there."""
    write_steps(file, 3)
    with full_disk(file):
        write_steps(file, 4)
    os.truncate(file._path, len(whole(1)) + 9)
    write_steps(file, 5)
    assert file._path.read_bytes() == whole(1, 2, 3, 4, 5)


def test_the_oldest_rows_are_lost_after_a_long_time(file: MetricsFile, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "_MOST_WAITING", len(whole(1, 1)))
    with full_disk(file):
        write_steps(file, 3, 4, 5, 6)
    write_steps(file, 7)
    assert file.close() == f"{file._path} lacks 2 rows, which waited for too long"
    assert file._path.read_bytes() == whole(1, 2, 5, 6, 7)


def test_last_rows_that_cannot_be_written_are_an_error(file: MetricsFile) -> None:
    with full_disk(file):
        write_steps(file, 3, 4)
        with pytest.raises(
            RunFailedError,
            match=r"m cannot be written \(File too large\), and lacks 2 rows, the last included; make room",
        ):
            file.close()
    assert file._path.read_bytes() == whole(1, 2)


def test_an_error_at_closing_is_one(file: MetricsFile) -> None:
    """A network file system may write only then."""
    os.close(descriptor_of(file))
    with pytest.raises(RunFailedError, match=r"m cannot be written \(Bad file descriptor\), and lacks its last rows; "):
        file.close()


def test_a_rewind_keeps_rows_that_wait(file: MetricsFile) -> None:
    with full_disk(file):
        write_steps(file, 3, 4, 5)
    kept, end = file.rewind(4)
    assert kept == [{"step": step} for step in (1, 2, 3, 4)]
    assert end is None
    write_steps(file, 5)
    assert file._path.read_bytes() == whole(1, 2, 3, 4, 5)
