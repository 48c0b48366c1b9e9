"""`metrics.jsonl`: one JSON object per logged step, per evaluation and for the end of the run.

A logged step has no `event`; the others have `"event": "eval"` or `"end"`. JSON has no NaN and no infinity, so the file
holds null for such a number. Each line is one append, so a killed process leaves at most its last line incomplete.
"""

import os
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache
from io import FileIO
from math import exp, inf
from pathlib import Path
from typing import Any, Required

from llmtrain_data import units
from llmtrain_data.bounds import Count, Number
from llmtrain_data.output import json_text
from llmtrain_data.replace import replace_file
from llmtrain_data.untrusted import regular
from pydantic import ConfigDict, TypeAdapter, ValidationError
from typing_extensions import TypedDict

from llmtrain.errors import RESUMES, RunFailedError

Row = dict[str, Any]

# Bytes of the longest row, the end of a run on thousands of nodes; readers skip longer lines.
_LONGEST = 2**23
_CHUNK = 2**20
# Most bytes of rows that wait until the file can be written: some 30,000 rows.
_MOST_WAITING = 2**26
# Written rows to remember: a network file system may lose what it has taken in the last seconds.
_REMEMBERED = 2_000
_ADVICE = f"make room or correct the folder's permissions; {RESUMES}"


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


def perplexity_of(loss: float) -> float:
    """Return the perplexity of a loss in nats per token; infinite where no float holds it."""
    return exp(loss) if loss < 700 else inf


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
    """Appends rows to a metrics file. Rows that cannot be written wait in memory, and are written before the next row.

    warn: called with a sentence the first time that a row cannot be written.
    """

    def __init__(self, path: Path, warn: Callable[[str], None]) -> None:
        """`rewind` opens the file, before the first row."""
        self._path, self._warn, self._warned = path, warn, False
        self._file: FileIO | None = None
        self._waiting, self._written = deque[bytes](), deque[bytes](maxlen=_REMEMBERED)
        self._failure, self._lost = "", 0

    def rewind(self, step: int) -> tuple[list[Row], Row | None]:
        """Resume after `step` (0: start from the beginning), and drop later rows. Return the rows before it with the
        keys that readers rely on, and the row of the run's last end; None without one. Raises RunFailedError if the
        file cannot be opened."""
        self._release()
        self._written.clear()
        waiting = [(line, row) for line in self._waiting if (row := _parse(line)) is not None and _is_kept(row, step)]
        self._waiting = deque(line for line, _ in waiting)
        try:
            kept, end = drop_after(self._path, step)
            # Without a buffer, each row is a single write.
            self._file = self._path.open("ab", buffering=0)
        except OSError as error:
            raise RunFailedError(f"{self._refused(error)}; {_ADVICE}") from None
        self._end = self._file.tell()
        return [*kept, *(_relied_on(row) for _, row in waiting)], end

    def write(self, row: Row) -> None:
        """Append the rows that wait, and one more."""
        self._waiting.append(json_text(row).encode() + b"\n")
        try:
            self._write_waiting(self._file or self._open_again())
        except OSError as error:
            self._failure = self._refused(error)
            self._release()
            while len(self._waiting) > 1 and sum(map(len, self._waiting)) > _MOST_WAITING:
                self._waiting.popleft()
                self._lost += 1
            if not self._warned:
                self._warned = True
                self._warn(f"{self._failure}; rows wait in memory until it can be")

    def close(self) -> str:
        """Close the file; closing twice is harmless. Returns a sentence about rows that were lost, empty if none were.

        Raises RunFailedError if the last rows could not be written.
        """
        lacks = self._lost + len(self._waiting)
        try:
            if self._file is not None:
                self._file.close()
        except OSError as error:
            raise RunFailedError(f"{self._refused(error)}, and lacks its last rows; {_ADVICE}") from None
        if self._waiting:
            raise RunFailedError(
                f"{self._failure}, and lacks {units.count(lacks, 'row')}, the last included; {_ADVICE}"
            )
        return f"{self._path} lacks {units.count(lacks, 'row')}, which waited for too long" if lacks else ""

    def _write_waiting(self, file: FileIO) -> None:
        while self._waiting:
            rest = memoryview(self._waiting[0])
            while rest:
                # A disk that is nearly full takes a part.
                rest = rest[file.write(rest) :]
            self._written.append(self._waiting.popleft())
            self._end += len(self._written[-1])

    def _open_again(self) -> FileIO:
        """Open the file after a failure, and cut what follows its last whole line. Written rows that it does not hold
        wait again."""
        # A handle of a network file system may never work again.
        self._file = self._path.open("ab+", buffering=0)
        end = min(self._file.tell(), self._end)
        start = max(0, end - _LONGEST)
        end = start + os.pread(self._file.fileno(), end - start, start).rfind(b"\n") + 1
        self._file.truncate(end)
        while self._end > end and self._written:
            self._waiting.appendleft(self._written.pop())
            self._end -= len(self._waiting[0])
        self._end = end
        return self._file

    def _release(self) -> None:
        """Close the file, and cut the part of a line that may be at its end."""
        if self._file is None:
            return
        with suppress(OSError):
            if os.fstat(self._file.fileno()).st_size > self._end:
                self._file.truncate(self._end)
        with suppress(OSError):
            self._file.close()
        self._file = None

    def _refused(self, error: OSError) -> str:
        return f"{self._path} cannot be written ({error.strerror or error})"


def drop_after(path: Path, step: int) -> tuple[list[Row], Row | None]:
    """Drop the lines that a run resumed at `step` writes again: later rows, the end, an incomplete line. Return the
    other rows, with the keys that readers rely on, and the row of the end; None without one.

    Step 0 drops everything. Replaces the file atomically; the bytes of the other rows do not change.
    """
    lines, rows, end = list[bytes](), list[Row](), None
    for line in _lines(path):
        row = _parse(line)
        if row is not None and _is_kept(row, step):
            lines.append(line)
            rows.append(_relied_on(row))
        elif row is not None and step > 0 and row.get("event") == "end":
            end = row
    kept = b"".join(lines)
    if path.exists() and len(kept) != path.stat().st_size:
        replace_file(path, kept)
    return rows, end


def _relied_on(row: Row) -> Row:
    """Return a row without the keys that no reader of kept rows needs: those of a long run take much memory."""
    return {key: row[key] for key in _Row.__annotations__ if key in row}


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
