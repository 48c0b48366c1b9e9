"""Readers of text, JSONL and Parquet files: chunks of documents, some 1 MB at a time, which workers parse.

Chunks are small so that they stay in a core's cache from the parser to the ids.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
import numpy as np

from llmtrain_data.errors import DataError
from llmtrain_data.left_out import LeftOut
from llmtrain_data.streams import (
    CHUNK,
    LONGEST,
    NEWLINE,
    Piece,
    blocks,
    count_lines,
    line_end,
    not_text,
    separated,
    too_long,
)
from llmtrain_data.untrusted import reason

if TYPE_CHECKING:
    from llmtrain_data.corpus import CorpusOptions

WHOLE_FILE = 16 << 20
"""A text file of a folder up to this many bytes is one document."""

PIECE = 64
"""Bytes that a piece of text takes beside its content; without them, empty documents would gather without end."""

NAMED = 10
"""Fields or columns that an error names."""


class Chunk(Protocol):
    """Some documents, or parts of them, in the order of the corpus; can be pickled.

    done: how much of the corpus this chunk takes, in its unit. ends: bool for each text, whether a document ends
    with it; None if each does.
    """

    @property
    def done(self) -> int:
        """How much of the corpus this is."""

    @property
    def ends(self) -> np.ndarray | None:
        """Whether a document ends with each text."""

    def texts(self) -> list[str]:
        """Parse; records without text give an empty one. Raises DataError."""

    def encodable(self) -> list[str] | list[bytes]:
        """Parse to what costs an encoder least: the texts, or their UTF-8 where it is at hand. Raises DataError."""


@dataclass(frozen=True)
class TextChunk:
    """Texts as bytes. What is not UTF-8 in them becomes U+FFFD."""

    pieces: list[bytes]
    ends: np.ndarray | None
    done: int

    def texts(self) -> list[str]:
        """Return the texts."""
        return [piece.decode("utf-8", "replace") for piece in self.pieces]

    def encodable(self) -> list[bytes]:
        """Return the texts as UTF-8."""
        return [piece if _is_utf8(piece) else piece.decode("utf-8", "replace").encode() for piece in self.pieces]


@dataclass(frozen=True)
class LinesChunk:
    """Lines of JSON objects with the text in field `key`. start: bytes of the file, decompressed, that come before."""

    block: bytes
    key: str
    path: Path
    start: int
    done: int
    ends: None = None

    def texts(self) -> list[str]:
        """Return the texts. Raises DataError naming the line that is wrong."""
        texts = _parse_lines(self.block, self.key)
        if texts is None:
            texts = _parse_slowly(self.block, self.key, self.path, self.start)
        if self.start == 0 and texts and not any(text is not None for text in texts):
            raise DataError(
                f"{self.path} has no text in field {self.key!r}{_fields(self.block)}; name the field with --text-key"
            )
        return [text or "" for text in texts]

    encodable = texts


@dataclass(frozen=True)
class ColumnChunk:
    """Rows of an Arrow column. where: what to call it in an error."""

    column: Any
    where: str
    done: int
    ends: None = None

    def texts(self) -> list[str]:
        """Return the texts. Raises DataError if the column holds none."""
        import pyarrow as pa

        column = self.column
        try:
            if pa.types.is_dictionary(column.type):
                column = column.dictionary_decode()
            if pa.types.is_string(column.type) or pa.types.is_large_string(column.type):
                # As bytes, which need not be UTF-8.
                column = column.view(pa.binary() if pa.types.is_string(column.type) else pa.large_binary())
        except pa.ArrowException as error:
            raise DataError(f"{self.where} cannot be read: {reason(error)}") from error
        kinds = (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view, pa.types.is_null)
        if pa.types.is_binary(column.type) or pa.types.is_large_binary(column.type):
            return [(text or b"").decode("utf-8", "replace") for text in column.to_pylist()]
        if not any(test(column.type) for test in kinds):
            raise DataError(f"{self.where} holds {column.type}; expected text")
        return [text or "" for text in column.to_pylist()]

    encodable = texts


def read_files(
    files: list[Path], kind: Callable[[Path], str], options: "CorpusOptions", whole_files: bool, left_out: LeftOut
) -> Iterator[Chunk]:
    """Read files one after another. whole_files: a small text file is one document. left_out: told of files that are
    not read."""
    texts = _TextChunks()
    for path in files:
        try:
            if kind(path) == "text":
                pieces = read_text(path, options.separator, whole_files, left_out)
                yield from texts.add(pieces)
            else:
                yield from texts.flush()
                reader = {"jsonl": read_jsonl, "parquet": read_parquet}[kind(path)]
                yield from reader(path, options.text_key)
        except Exception as error:
            # Arrow is imported by what needs it, so its errors are known by where they are from.
            damaged = isinstance(error, OSError | EOFError | UnicodeDecodeError)
            if not damaged and type(error).__module__ != "pyarrow.lib":
                raise
            raise DataError(f"{path} cannot be read: {reason(error)}") from error
    yield from texts.flush()


def read_text(path: Path, separator: str | None, whole: bool, left_out: LeftOut) -> Iterator[Piece]:
    """Read a text file.

    With a separator, documents are what lies between. Without, the file is one text: in a folder one
    document (whole), alone cut at line ends into some thousand pieces of 4 to 64 KB, so that it can be
    split into training and validation, of which only the last one ends a document. Binary files give
    nothing in a folder; alone, they raise DataError.
    """
    size = path.stat().st_size
    if (problem := not_text(path)) is not None:
        if whole:
            left_out.add(path, "binary")
            return
        raise DataError(
            f"{path} is no text: {problem}; expected UTF-8, or JSON lines or Parquet named .jsonl or .parquet"
        )
    if separator is not None:
        yield from separated(path, separator.encode())
        return
    piece = WHOLE_FILE if whole else min(max(size // 1000, 4 << 10), 64 << 10)
    for block, done, last in blocks(path, max(piece, CHUNK), whole_lines=False):
        start = 0
        while start < len(block):
            end = line_end(block, start, piece)
            finished = end == len(block)
            yield Piece(block[start:end], last and finished, 0 if not finished else done)
            start = end


def read_jsonl(path: Path, key: str) -> Iterator[Chunk]:
    """Read a file of JSON objects, one a line; the text is the string in field `key`."""
    start = 0
    for block, done, _ in blocks(path, CHUNK, whole_lines=True):
        yield LinesChunk(block, key, path, start, done)
        start += len(block)


def read_parquet(path: Path, key: str) -> Iterator[Chunk]:
    """Read the string column `key` of a Parquet file."""
    import pyarrow as pa
    import pyarrow.parquet

    with pyarrow.parquet.ParquetFile(path) as file:
        names = file.schema_arrow.names
        if key not in names:
            raise DataError(f"{path} has no column {key!r}, only {few(names)}; name one with --text-key")
        if pa.types.is_nested(kind := file.schema_arrow.field(key).type):
            raise DataError(f"{path}: column {key!r} holds {kind}; expected text")
        # The size of all columns together: asking a damaged file for that of one would abort the process.
        groups = [file.metadata.row_group(i) for i in range(file.metadata.num_row_groups)]
        content = sum(group.total_byte_size for group in groups)
        rows = max(file.metadata.num_rows, 1)
        step = min(max(int(CHUNK * rows / max(content, 1)), 1), 1 << 16)
        bytes_per_row = path.stat().st_size / rows
        for number, group in enumerate(groups):
            if group.total_byte_size > LONGEST * max(group.num_rows, 1):
                raise too_long(f"{path}: a row of row group {number}")
        for batch in file.iter_batches(batch_size=step, columns=[key]):
            yield ColumnChunk(batch.column(0), f"{path}: column {key!r}", int(len(batch) * bytes_per_row))


class _TextChunks:
    """Gathers pieces of text into chunks."""

    def __init__(self) -> None:
        self._pieces: list[Piece] = []
        self._size = 0

    def add(self, pieces: Iterator[Piece]) -> Iterator[Chunk]:
        for piece in pieces:
            self._pieces.append(piece)
            self._size += len(piece.content) + PIECE
            if self._size >= CHUNK:
                yield from self.flush()

    def flush(self) -> Iterator[Chunk]:
        pieces, self._pieces, self._size = self._pieces, [], 0
        if pieces:
            ends = np.array([piece.ends for piece in pieces])
            contents = [piece.content for piece in pieces]
            yield TextChunk(contents, None if ends.all() else ends, sum(piece.done for piece in pieces))


def _is_utf8(text: bytes) -> bool:
    """Return whether text is valid as it is."""
    if text.isascii():
        return True
    try:
        text.decode()
    except UnicodeDecodeError:
        return False
    return True


def _parse_lines(block: bytes, key: str) -> Sequence[str | None] | None:
    """Parse with msgspec, without keeping the other fields; None if it finds something wrong."""
    try:
        return [line.text for line in _decoder(key).decode_lines(block)]
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None


@cache
def _decoder(key: str) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(msgspec.defstruct("Record", [("text", str | None, None)], rename={"text": key}))


def _parse_slowly(block: bytes, key: str, path: Path, start: int) -> Sequence[str | None]:
    """Parse line by line: takes what is not quite JSON (lone surrogates), and names the line that is wrong."""
    texts: list[str | None] = []
    for number, raw in enumerate(block.split(b"\n"), 1):
        if not raw.strip():
            continue
        try:
            record = json.loads(raw.decode("utf-8", "replace"))
        except (ValueError, RecursionError) as error:
            where = f"{path} line {count_lines(path, start) + number}"
            raise DataError(f"{where} is not JSON ({reason(error)}); expected one object a line") from error
        text = record.get(key) if isinstance(record, dict) else record
        if not isinstance(record, dict) or not isinstance(text, str | None):
            raise DataError(
                f"{path} line {count_lines(path, start) + number} has {_a(text)}; "
                f"expected an object with a string in field {key!r}"
            )
        texts.append(None if text is None else text.encode("utf-8", "replace").decode())
    return texts


def _fields(block: bytes) -> str:
    """Return what to add to an error about a missing field: the fields of the first record."""
    try:
        return f", only {few(list(json.loads(block.split(NEWLINE, 1)[0])))}"
    except (ValueError, TypeError, RecursionError):
        return ""


def few(names: Sequence[str]) -> str:
    """Return the first few names of fields or columns, cut short, as an error lists them."""
    shown = ", ".join(name if len(name) <= 40 else f"{name[:37]}..." for name in names[:NAMED])
    return shown if len(names) <= NAMED else f"{shown} and {len(names) - NAMED} more"


def _a(value: object) -> str:
    """Return a JSON value as an error shows it: one that may be long by its type alone."""
    kind = type(value).__name__
    return kind if isinstance(value, dict | list | str) else f"{kind} '{value}'"
