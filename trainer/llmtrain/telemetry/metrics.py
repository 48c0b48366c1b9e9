"""`metrics.jsonl`: one JSON object per logged step, per evaluation and for the end of the run.

A logged step has no `event`; the others have `"event": "eval"` or `"end"`. JSON has no NaN and no infinity, so a number
that is not finite is written as null. A line is one append, so a killed process leaves at most its last line torn.
"""

import json
import os
from pathlib import Path
from typing import Any

from llmtrain_data.output import json_text

from llmtrain.errors import RunFailedError

Row = dict[str, Any]


def read_metrics(path: Path) -> list[Row]:
    """Return the rows of a metrics file in order; lines that are not whole JSON objects are left out.

    A file that does not exist has no rows.
    """
    return [row for line in _lines(path) if (row := _parse(line)) is not None]


def last_rows(path: Path, size: int = 2**16) -> list[Row]:
    """Return the rows that lie whole in the last `size` bytes of a metrics file, in order; none if there is no file.

    Of more bytes where these hold no logged step: the end of a run on many nodes alone may be longer.
    """
    try:
        with path.open("rb") as file:
            start = max(0, path.stat().st_size - size)
            file.seek(start)
            lines = file.read().splitlines(keepends=True)
    except FileNotFoundError:
        return []
    rows = [row for line in lines if (row := _parse(line)) is not None]
    if start and all("event" in row for row in rows):
        return last_rows(path, 2 * size)
    return rows


class MetricsFile:
    """Appends rows to a metrics file. Raises RunFailedError when the disk does not take a line."""

    def __init__(self, path: Path, resumed_step: int) -> None:
        """Open `path` to go on after `resumed_step` (0: start anew), having dropped what lies beyond it."""
        self._path = path
        try:
            self.rows_kept = drop_after(path, resumed_step)
            # Unbuffered, so that each row is a single write.
            self._file = path.open("ab", buffering=0)
        except OSError as error:
            raise self._failure(error) from None

    def write(self, row: Row) -> None:
        """Append one row."""
        line = json_text(row).encode() + b"\n"
        try:
            written = self._file.write(line)
        except OSError as error:
            raise self._failure(error) from None
        if written != len(line):
            raise self._failure(OSError("the line was only written in part; the disk is probably full"))

    def close(self) -> None:
        """Close the file; closing twice is harmless."""
        self._file.close()

    def _failure(self, error: OSError) -> RunFailedError:
        return RunFailedError(
            f"{self._path} cannot be written ({error.strerror or error}); make room or correct the folder's "
            "permissions, then run the same command again to continue"
        )


def drop_after(path: Path, step: int) -> list[Row]:
    """Drop what a run resumed at `step` will write again: later rows, the end, a torn line. Returns the rest.

    Step 0 drops everything. The file is replaced atomically, and rows that stay keep their very bytes.
    """
    lines = _lines(path)
    rows = [(line, row) for line in lines if (row := _parse(line)) is not None and _stays(row, step)]
    kept = b"".join(line for line, _ in rows)
    if kept != b"".join(lines):
        aside = path.with_name(path.name + ".partial")
        with aside.open("wb") as file:
            file.write(kept)
            file.flush()
            os.fsync(file.fileno())
        aside.replace(path)
    return [row for _, row in rows]


def _stays(row: Row, step: int) -> bool:
    at = row.get("step")
    return step > 0 and row.get("event") != "end" and isinstance(at, int) and at <= step


def _lines(path: Path) -> list[bytes]:
    try:
        return path.read_bytes().splitlines(keepends=True)
    except FileNotFoundError:
        return []


def _parse(line: bytes) -> Row | None:
    if not line.endswith(b"\n"):
        return None
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) else None
