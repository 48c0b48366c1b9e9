"""`metrics.jsonl`: one JSON object per logged step, per evaluation and for the end of the run.

A logged step has no `event`; the others have `"event": "eval"` or `"end"`. JSON has no NaN and no infinity, so a number
that is not finite is written as null. A line is one append, so a killed process leaves at most its last line torn.
"""

import os
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, Required

from llmtrain_data.bounds import Count, Number
from llmtrain_data.output import json_text
from llmtrain_data.untrusted import regular
from pydantic import ConfigDict, TypeAdapter, ValidationError
from typing_extensions import TypedDict

from llmtrain.errors import RunFailedError

Row = dict[str, Any]

# Bytes of the longest row, the end of a run on thousands of nodes; a reader keeps no more of a longer line.
_LONGEST = 2**23
_CHUNK = 2**20


class _Row(TypedDict, total=False):
    """What is relied on in a row, where it is there. Nested numbers, and what other versions add, may be anything."""

    __pydantic_config__ = ConfigDict(extra="allow", strict=True)  # type: ignore[misc]

    step: Required[Count]
    event: str
    split: str
    outcome: str
    reason: str
    tokens: Count
    skipped_steps: Count
    loss: Number | None
    perplexity: Number | None
    elapsed_s: Number | None
    step_time_s: Number | None


def read_metrics(path: Path) -> list[Row]:
    """Return the rows of a metrics file in order; lines that are no rows are left out.

    A file that does not exist has no rows. Raises OSError for one that cannot be read.
    """
    return [row for line in _lines(path) if (row := _parse(line)) is not None]


def last_rows(path: Path, size: int = 2**16) -> tuple[list[Row], str | None]:
    """Return the rows that lie whole in the last `size` bytes of a metrics file, in order, and what is wrong there.

    Of more bytes where these hold no logged step: the end of a run on many nodes alone may be longer. A file that does
    not exist has no rows. Raises OSError for one that cannot be read.
    """
    length = path.stat().st_size if path.exists() else 0
    # What begins before the bytes that are read is cut, and the last line may be torn.
    lines = list(_lines(path, max(0, length - size)))[length > size :]
    whole = [line for line in lines if line.endswith(b"\n")]
    rows = [row for line in whole if (row := _parse(line)) is not None]
    if length > size and size < 2 * _LONGEST and all("event" in row for row in rows):
        return last_rows(path, 2 * size)
    if length > size and not whole:
        return [], f"{path.name} has no line in its last {size} bytes"
    lost = len(whole) - len(rows)
    return rows, f"{lost} of the last {len(whole)} lines of {path.name} are no rows" if lost else None


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
    lines = [(line, row) for line in _lines(path) if (row := _parse(line)) is not None and _stays(row, step)]
    kept = b"".join(line for line, _ in lines)
    if path.exists() and len(kept) != path.stat().st_size:
        aside = path.with_name(path.name + ".partial")
        with aside.open("wb") as file:
            file.write(kept)
            file.flush()
            os.fsync(file.fileno())
        aside.replace(path)
    return [row for _, row in lines]


def _stays(row: Row, step: int) -> bool:
    return step > 0 and row.get("event") != "end" and bool(row["step"] <= step)


def _lines(path: Path, start: int = 0) -> Iterator[bytes]:
    """Yield the lines from a byte of a file on, an empty one for each that is longer than any row.

    None of a file that does not exist. Raises OSError for what is no regular file.
    """
    with suppress(FileNotFoundError), open(path, "rb", opener=regular) as file:
        file.seek(start)
        line, too_long = b"", False
        while piece := file.read(_CHUNK):
            *whole, line = (line + piece).split(b"\n")
            for each in whole:
                yield b"\n" if too_long or len(each) > _LONGEST else each + b"\n"
                too_long = False
            if too_long or len(line) > _LONGEST:
                line, too_long = b"", True
        if line:
            yield line


@cache
def _adapter() -> TypeAdapter[_Row]:
    return TypeAdapter(_Row)


def _parse(line: bytes) -> Row | None:
    if not line.endswith(b"\n"):
        return None
    try:
        return dict(_adapter().validate_json(line))
    except ValidationError:
        return None
