"""Decompressed byte streams of files: blocks, lines and documents of bounded length."""

import io
from array import array
from codecs import BOM_UTF8
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from llmtrain_data.errors import DataError
from llmtrain_data.untrusted import regular

CHUNK = 1 << 20
"""Bytes per read."""

LONGEST = 128 << 20
"""Most bytes of a JSON line, a text between separators or a column's value.

Encoding holds several copies of a document, and a small compressed file may hold a very long one. Text without
separators has no limit, because it is read in pieces.
"""

PROBE = 8192
"""Bytes at the beginning of a file that decide whether it is text or binary."""

LARGE = 64 << 10
"""From this many bytes on, importing Arrow to validate UTF-8 is worth its time."""

BROKEN_SHARE = 0.1
"""A file is binary if more than this share of the probed characters are invalid UTF-8."""

NEWLINE = b"\n"


@dataclass(frozen=True)
class TextPiece:
    """A text as bytes. ends: whether it ends a document. done: bytes that it takes on disk."""

    content: bytes
    ends: bool
    done: int


def line_end(block: bytes, start: int, length: int) -> int:
    """Return the end of a piece of up to `length` bytes: after a line if there is one, else after a character."""
    end = start + length
    if end >= len(block):
        return len(block)
    line = block.rfind(b"\n", start, end)
    if line >= start:
        return line + 1
    # A character has at most three continuation bytes. A longer run is not text; cut it anywhere.
    for before in range(end, max(end - 4, start), -1):
        if not _continues(block[before]):
            return before
    return end


def _continues(byte: int) -> bool:
    """Return whether a byte is a UTF-8 continuation byte."""
    return byte & 0xC0 == 0x80


def blocks(path: Path, size: int, whole_lines: bool) -> Iterator[tuple[bytes, int, bool]]:
    """Read blocks that end with a line. Yields (block, bytes that it takes on disk, whether it is the last).

    whole_lines: never cut a line. Otherwise, a line that continues for CHUNK bytes after a block is cut between
    characters.
    """
    with open(path, "rb", opener=regular) as file:
        stream, position, before = decompressed(file, path), 0, 0
        while block := stream.read(size):
            if not block.endswith(b"\n"):
                block += _rest_of_line(stream, path, before, block) if whole_lines else _rest_of_text(stream)
            now = file.tell()
            yield block, now - position, not stream.peek(1)
            position, before = now, before + len(block)


def _rest_of_line(stream: io.BufferedReader, path: Path, before: int, block: bytes) -> bytes:
    """Read to the end of the line. before: bytes before `block`. Raises DataError for a line of more than LONGEST."""
    begun = len(block) - block.rfind(b"\n") - 1
    parts: list[bytes] = []
    while part := stream.readline(CHUNK):
        parts.append(part)
        begun += len(part)
        if begun > LONGEST:
            raise too_long(f"{path} line {count_lines(path, before) + block.count(NEWLINE) + 1}")
        if part.endswith(b"\n"):
            break
    return b"".join(parts)


def _rest_of_text(stream: io.BufferedReader) -> bytes:
    """Read to the end of the line, at most CHUNK bytes; then to the end of the character."""
    rest = stream.readline(CHUNK)
    for _ in range(3):
        if rest.endswith(b"\n") or not (following := stream.peek(1)) or not _continues(following[0]):
            break
        rest += stream.read(1)
    return rest


def separated(path: Path, separator: bytes) -> Iterator[TextPiece]:
    """Read the documents between separators. Raises DataError for a document of more than LONGEST bytes."""
    with open(path, "rb", opener=regular) as file:
        stream, position, rest, lines = decompressed(file, path), 0, bytearray(), 0
        while block := stream.read(CHUNK):
            # `rest` contains no separator, but may end with a part of one.
            searched = max(len(rest) - len(separator) + 1, 0)
            rest += block
            found, begin, now = rest.find(separator, searched), 0, file.tell()
            while found >= 0:
                yield TextPiece(bytes(rest[begin:found]), True, now - position)
                begin, position = found + len(separator), now
                found = rest.find(separator, begin)
            lines += rest.count(NEWLINE, 0, begin)
            del rest[:begin]
            if len(rest) > LONGEST:
                raise too_long(f"{path}: the document at line {lines + 1}, up to {separator!r},")
        yield TextPiece(bytes(rest), True, file.tell() - position)


def too_long(what: str) -> DataError:
    """Return the error for a document of more than LONGEST bytes. what: names the document and its file."""
    return DataError(f"{what} has more than {LONGEST >> 20} MiB; split it into shorter documents")


def not_text(path: Path) -> str | None:
    """Return why the beginning of a decompressed file is not UTF-8 text, None if it is."""
    with open(path, "rb", opener=regular) as file:
        beginning = decompressed(file, path).read(PROBE)
    if (zero := beginning.find(b"\0")) >= 0:
        return f"byte {zero} is zero"
    # The probe may cut the last character, so one broken character is allowed.
    characters = beginning.decode("utf-8", "replace")
    broken = characters.count("\N{REPLACEMENT CHARACTER}")
    if broken > 1 and broken > BROKEN_SHARE * len(characters):
        return f"{broken} of its first {len(characters)} characters are not UTF-8"
    return None


def is_utf8(content: bytes) -> bool:
    """Return whether bytes are valid UTF-8."""
    if content.isascii():
        return True
    if len(content) >= LARGE:
        return _is_large_utf8(content)
    try:
        content.decode()
    except UnicodeDecodeError:
        return False
    return True


def _is_large_utf8(content: bytes) -> bool:
    """Let Arrow validate: it takes a half to a sixth of the time of `decode`, and lets other threads run."""
    import pyarrow as pa

    ends = pa.py_buffer(array("q", (0, len(content))))
    try:
        pa.Array.from_buffers(pa.large_string(), 1, [None, ends, pa.py_buffer(content)]).validate(full=True)
    except pa.ArrowInvalid:
        return False
    return True


def decompressed(file: io.BufferedReader, path: Path) -> io.BufferedReader:
    """Return the stream of a file's content, decompressed if the file's suffix is in COMPRESSION.

    A UTF-8 byte order mark at its start is skipped.
    """
    from llmtrain_data.corpus_options import COMPRESSION

    stream, kind = file, COMPRESSION.get(path.suffix.lower())
    if kind is not None:
        import pyarrow as pa

        # Arrow's reader raises on a truncated stream. The reader of the zstandard package does not.
        stream = io.BufferedReader(pa.CompressedInputStream(file, kind), CHUNK)
    if stream.peek(len(BOM_UTF8)).startswith(BOM_UTF8):
        stream.read(len(BOM_UTF8))
    return stream


def count_lines(path: Path, size: int) -> int:
    """Return how many lines the first `size` bytes of a file hold. It is slow; only errors need it."""
    with open(path, "rb", opener=regular) as file:
        stream, lines = decompressed(file, path), 0
        while block := stream.read(min(size, CHUNK)):
            lines, size = lines + block.count(b"\n"), size - len(block)
        return lines
