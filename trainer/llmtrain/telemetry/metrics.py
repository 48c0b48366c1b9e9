"""`metrics.jsonl`: one JSON object per logged step, per evaluation and for the end of the run.

A logged step has no `event`; the others have `"event": "eval"` or `"end"`. JSON has no NaN and no infinity, so the file
holds null for such a number. Each line is one append, so a killed process leaves at most its last line incomplete.
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

# Bytes of the longest row, the end of a run on thousands of nodes; readers skip longer lines.
_LONGEST = 2**23
_CHUNK = 2**20


class _Row(TypedDict, total=False):
    """The keys of a row that readers rely on if present. Nested numbers and keys of other versions are not checked."""

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
    """Return the rows of a metrics file in order, without lines that are not rows.

    A missing file has no rows. Raises OSError if the file cannot be read.
    """
    return [row for line in _lines(path) if (row := _parse(line)) is not None]


def last_rows(path: Path, size: int = 2**16) -> tuple[list[Row], str | None]:
    """Return the complete rows in the last `size` bytes of a metrics file, in order, and a sentence on any damage.

    Reads more bytes if these hold no logged step: the end's row of a run on many nodes may be longer. A missing file
    has no rows. Raises OSError if the file cannot be read.
    """
    length = path.stat().st_size if path.exists() else 0
    # The first line may be cut, and the last line incomplete.
    lines = list(_lines(path, max(0, length - size)))[length > size :]
    complete = [line for line in lines if line.endswith(b"\n")]
    rows = [row for line in complete if (row := _parse(line)) is not None]
    if length > size and size < 2 * _LONGEST and all("event" in row for row in rows):
        return last_rows(path, 2 * size)
    if length > size and not complete:
        return [], f"{path.name} has no line in its last {size} bytes"
    lost = len(complete) - len(rows)
    return rows, f"{lost} of the last {len(complete)} lines of {path.name} are no rows" if lost else None


class MetricsFile:
    """Appends rows to a metrics file. Raises RunFailedError if a line cannot be written."""

    def __init__(self, path: Path, resumed_step: int) -> None:
        """Open `path` to resume after `resumed_step` (0: start from the beginning), and drop later rows."""
        self._path = path
        try:
            self.rows_kept = drop_after(path, resumed_step)
            # Without a buffer, each row is a single write.
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
            raise self._failure(OSError("only a part of the line was written; the disk is probably full"))

    def close(self) -> None:
        """Close the file; closing twice is harmless."""
        self._file.close()

    def _failure(self, error: OSError) -> RunFailedError:
        return RunFailedError(
            f"{self._path} cannot be written ({error.strerror or error}); make room or correct the folder's "
            "permissions, then run the same command again to continue"
        )


def drop_after(path: Path, step: int) -> list[Row]:
    """Drop the lines that a run resumed at `step` writes again: later rows, the end, an incomplete line. Returns the
    other rows.

    Step 0 drops everything. Replaces the file atomically; the bytes of the other rows do not change.
    """
    lines = [(line, row) for line in _lines(path) if (row := _parse(line)) is not None and _is_kept(row, step)]
    kept = b"".join(line for line, _ in lines)
    if path.exists() and len(kept) != path.stat().st_size:
        aside = path.with_name(path.name + ".partial")
        with aside.open("wb") as file:
            file.write(kept)
            file.flush()
            os.fsync(file.fileno())
        aside.replace(path)
    return [row for _, row in lines]


def _is_kept(row: Row, step: int) -> bool:
    return step > 0 and row.get("event") != "end" and bool(row["step"] <= step)


def _lines(path: Path, start: int = 0) -> Iterator[bytes]:
    """Yield the lines of a file from byte `start` on, and an empty line for each that is longer than any row.

    Yields nothing for a missing file. Raises OSError for anything but a regular file.
    """
    with suppress(FileNotFoundError), open(path, "rb", opener=regular) as file:
        file.seek(start)
        line, too_long = b"", False
        while chunk := file.read(_CHUNK):
            *complete, line = (line + chunk).split(b"\n")
            for each in complete:
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
