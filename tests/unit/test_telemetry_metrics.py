"""The metrics file: valid JSON at any moment, and a curve that resumes where it stopped."""

import json
import math
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from llmtrain.errors import RunFailedError
from llmtrain.telemetry.metrics import MetricsFile, drop_after, read_metrics


def rows_of(path: Path) -> list[tuple[str | None, int]]:
    return [(row.get("event"), row["step"]) for row in read_metrics(path)]


def write_run(path: Path, first: int, last: int, end: bool = True) -> None:
    file = MetricsFile(path, first)
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
    file = MetricsFile(tmp_path / "m", 0)
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
        kept = drop_after(path, 4)
        written = [line for line in lines[:6] if whole.index(line) + len(line) <= length]
        assert path.read_bytes() == b"".join(written)
        assert len(kept) == len(written)
    assert [file.name for file in tmp_path.iterdir()] == ["m"]


def test_step_0_starts_anew(tmp_path: Path) -> None:
    (tmp_path / "m").write_text('{"event": "eval", "step": 0, "loss": 9.0}\n{"step": 1}\n')
    MetricsFile(tmp_path / "m", 0).close()
    assert (tmp_path / "m").read_bytes() == b""


def test_lines_that_are_no_rows_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "m").write_bytes(b'{"step": 1}\n[1]\n\xff\xfe\n{"step": 2\n{"step": 3}\n{"step": 4}')
    assert rows_of(tmp_path / "m") == [(None, 1), (None, 3)]


def test_rows_written_before_a_kill_are_there(tmp_path: Path) -> None:
    program = (
        "import os, signal, sys\nfrom pathlib import Path\nfrom llmtrain.telemetry.metrics import MetricsFile\n"
        "file = MetricsFile(Path(sys.argv[1]), 0)\n"
        "for step in range(1, 4): file.write({'step': step, 'text': 'x' * 100_000})\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path / "m")])
    assert done.returncode == -signal.SIGKILL
    assert rows_of(tmp_path / "m") == [(None, 1), (None, 2), (None, 3)]


@contextmanager
def small_files() -> Iterator[None]:
    """Limit files to 64 bytes, as on a full disk."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64, limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_full_disk_stops_the_run_with_a_sentence(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path / "m", 0)
    file.write({"step": 1, "text": "x" * 20})
    # Limit only the write, because pytest's own output may go to a file too.
    with small_files(), pytest.raises(RunFailedError, match=r"m cannot be written .*make room"):
        file.write({"step": 2, "text": "x" * 80})
    assert rows_of(tmp_path / "m") == [(None, 1)]
