"""Streams of bytes: files, decompressed, in blocks, lines and documents of bounded length."""

import io
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from llmtrain_data.errors import DataError
from llmtrain_data.untrusted import regular

CHUNK = 1 << 20
"""Bytes of text read at once."""

LONGEST = 128 << 20
"""Bytes of the longest line of JSON, text between separators or value of a column that is read.

Each is held several times over on its way to ids, and a small compressed file may hold one of any length. Text without
separators is read in parts, so a file of it may be longer.
"""

PROBE = 8192
"""Bytes of a file's beginning by which text is told from binary."""

BROKEN_SHARE = 0.1
"""Share of the probed characters that are not UTF-8 from which on a file is not text. Less is taken for slips."""

NEWLINE = b"\n"


@dataclass(frozen=True)
class TextPiece:
    """A text as bytes, whether a document ends with it, and how many bytes of the file it takes."""

    content: bytes
    ends: bool
    done: int


def line_end(block: bytes, start: int, length: int) -> int:
    """Return where a piece of up to `length` bytes ends: after a line, else between two characters."""
    end = start + length
    if end >= len(block):
        return len(block)
    line = block.rfind(b"\n", start, end)
    if line >= start:
        return line + 1
    # A character has at most three bytes after its first one; a longer run of them is no text, and is cut anywhere.
    for before in range(end, max(end - 4, start), -1):
        if not _continues(block[before]):
            return before
    return end


def _continues(byte: int) -> bool:
    """Return whether a byte is one of a UTF-8 character after its first."""
    return byte & 0xC0 == 0x80


def blocks(path: Path, size: int, whole_lines: bool) -> Iterator[tuple[bytes, int, bool]]:
    """Read blocks that end with a line: (block, bytes of the file it took, whether it is the last).

    whole_lines: whether a line of any length stays whole; else one that goes on for CHUNK bytes is cut between
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
    """Read up to a line's end. before: bytes that come before `block`. Raises DataError for a line too long."""
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
    """Read up to a line's end, or the end of a character."""
    rest = stream.readline(CHUNK)
    for _ in range(3):
        if rest.endswith(b"\n") or not (following := stream.peek(1)) or not _continues(following[0]):
            break
        rest += stream.read(1)
    return rest


def separated(path: Path, separator: bytes) -> Iterator[TextPiece]:
    """Read the documents between separators. Raises DataError for one that is too long."""
    with open(path, "rb", opener=regular) as file:
        stream, position, rest, lines = decompressed(file, path), 0, bytearray(), 0
        while block := stream.read(CHUNK):
            # What was there before has no separator, but may end within one.
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
    """Return the error for a document of more than LONGEST bytes. what: the document, with its file."""
    return DataError(f"{what} has more than {LONGEST >> 20} MiB; cut it into documents that are shorter")


def not_text(path: Path) -> str | None:
    """Return why the beginning of a file, decompressed, is no UTF-8 text; None if it is."""
    with open(path, "rb", opener=regular) as file:
        beginning = decompressed(file, path).read(PROBE)
    if (zero := beginning.find(b"\0")) >= 0:
        return f"byte {zero} is zero"
    # The last character may be cut short.
    characters = beginning.decode("utf-8", "replace")
    broken = characters.count("\N{REPLACEMENT CHARACTER}")
    if broken > 1 and broken > BROKEN_SHARE * len(characters):
        return f"{broken} of its first {len(characters)} characters are not UTF-8"
    return None


def decompressed(file: io.BufferedReader, path: Path) -> io.BufferedReader:
    """Return the stream of a file's content: decompressed if the name says that it is compressed, else the file."""
    from llmtrain_data.corpus_options import COMPRESSION

    kind = COMPRESSION.get(path.suffix)
    if kind is None:
        return file
    import pyarrow as pa

    # Arrow's reader fails on a stream that was cut short, which zstandard's own takes for its end.
    return io.BufferedReader(pa.CompressedInputStream(file, kind), CHUNK)


def count_lines(path: Path, size: int) -> int:
    """Return how many lines the first `size` bytes of a file hold; counted for an error alone, as it takes time."""
    with open(path, "rb", opener=regular) as file:
        stream, lines = decompressed(file, path), 0
        while block := stream.read(min(size, CHUNK)):
            lines, size = lines + block.count(b"\n"), size - len(block)
        return lines
