"""Readers of text, JSONL and Parquet files. They yield chunks of about 1 MB, which workers parse.

A chunk is small enough to stay in one core's cache from parsing to encoding.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import msgspec
import numpy as np

from llmtrain_data.errors import DataError
from llmtrain_data.left_out import NOT_TEXT, LeftOut
from llmtrain_data.streams import (
    CHUNK,
    LONGEST,
    NEWLINE,
    TextPiece,
    blocks,
    count_lines,
    decompressed,
    is_utf8,
    line_end,
    not_text,
    separated,
    too_long,
)
from llmtrain_data.untrusted import reason, regular

if TYPE_CHECKING:
    from llmtrain_data.corpus_options import CorpusOptions

WHOLE_FILE = 16 << 20
"""In a folder, a text file of up to this many bytes is one document."""

PIECE = 64
"""Memory overhead of a text piece in bytes. Counting it bounds the number of empty documents in a chunk."""

ROWS = 64
"""Most rows per read of a Parquet file: a small file may repeat a long value in each row."""

NAMED = 10
"""Most fields or columns that an error lists."""


class Chunk(Protocol):
    """Consecutive documents of a corpus, or parts of documents. Chunks can be pickled."""

    @property
    def done(self) -> int:
        """Size of this chunk, in the unit of the corpus."""

    @property
    def ends(self) -> np.ndarray | None:
        """For each text, whether it ends a document; bool `[texts]`. None if all do."""

    @property
    def continues(self) -> bool:
        """Whether the first text continues the document of the chunk before."""

    def texts(self) -> list[str]:
        """Parse. A record without text gives an empty string. Raises DataError."""

    def encodable(self) -> list[str] | list[bytes]:
        """Parse to the form that is faster to encode: strings, or UTF-8 if it is available. Raises DataError."""


@dataclass(frozen=True)
class TextChunk:
    """Texts as bytes. Invalid UTF-8 becomes U+FFFD."""

    pieces: list[bytes]
    ends: np.ndarray | None
    done: int
    continues: bool = False

    def texts(self) -> list[str]:
        """Return the texts."""
        return [piece.decode("utf-8", "replace") for piece in self.pieces]

    def encodable(self) -> list[bytes]:
        """Return the texts as UTF-8."""
        return [piece if is_utf8(piece) else piece.decode("utf-8", "replace").encode() for piece in self.pieces]


@dataclass(frozen=True)
class LinesChunk:
    """Lines of JSON objects with the text in field `key`. start: offset of the block in the decompressed file."""

    block: bytes
    key: str
    path: Path
    start: int
    done: int
    ends: None = None
    continues: ClassVar[bool] = False

    def texts(self) -> list[str]:
        """Return the texts. Raises DataError that names the invalid line."""
        texts = _parse_lines(self.block, self.key)
        if texts is None:
            texts = _parse_slowly(self.block, self.key, self.path, self.start)
        if self.start == 0 and texts and not any(text is not None for text in texts):
            raise DataError(
                f"{self.path} has no text in field {self.key!r}{_fields(self.block)}; choose a field with --text-key"
            )
        return [text or "" for text in texts]

    encodable = texts


@dataclass(frozen=True)
class ColumnChunk:
    """Rows of an Arrow column, as bytes. Invalid UTF-8 becomes U+FFFD."""

    column: Any
    done: int
    ends: None = None
    continues: ClassVar[bool] = False

    def texts(self) -> list[str]:
        """Return the texts."""
        return [(text or b"").decode("utf-8", "replace") for text in self.column.to_pylist()]

    encodable = texts


def read_files(
    files: list[Path], kind: Callable[[Path], str], options: "CorpusOptions", whole_files: bool, left_out: LeftOut
) -> Iterator[Chunk]:
    """Read the files in order. whole_files: a text file of up to WHOLE_FILE bytes is one document. left_out: collects
    skipped files, and those with invalid UTF-8."""
    texts = _TextChunks()
    for path in files:
        try:
            found = kind(path)
            if found == "text":
                pieces = read_text(path, options.separator, whole_files, left_out)
                yield from texts.add(pieces)
            else:
                yield from texts.flush()
                if found == "parquet":
                    yield from read_parquet(path, options.text_key)
                else:
                    yield from read_jsonl(path, options.text_key, left_out)
        except Exception as error:
            # Arrow may not be imported here, so recognize its errors by their module.
            damaged = isinstance(error, OSError | EOFError | UnicodeDecodeError)
            if not damaged and type(error).__module__ != "pyarrow.lib":
                raise
            advice = "check that it is whole and what its name says"
            advice += ", or leave it out with --glob" if whole_files else ""
            first_sentence = reason(error).partition(". ")[0]
            if "requires too much memory" in first_sentence:
                # Arrow takes windows of up to 128 MiB.
                advice = "it was compressed with --long; decompress it with zstd -d --long=31"
            raise DataError(f"{path} cannot be read: {first_sentence}; {advice}") from error
    yield from texts.flush()


def begins_with_record(path: Path, key: str) -> bool:
    """Return whether the first line of a file is a JSON object with a string in field `key`."""
    with open(path, "rb", opener=regular) as file:
        line = decompressed(file, path).readline(LONGEST)
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return False
    return isinstance(record, dict) and isinstance(record.get(key), str)


def read_text(path: Path, separator: str | None, whole: bool, left_out: LeftOut) -> Iterator[TextPiece]:
    """Read a text file.

    With a separator, the file holds one document between each two separators. Without one, the file is one document.
    whole: the file is from a folder: it is one piece, and skipped if it is not UTF-8 text. Otherwise the file is
    cut at line ends into about a thousand pieces of 4 to 64 KB, so that it can be split into training and validation;
    only the last piece ends the document. A file that is not UTF-8 text then raises DataError.
    """
    size = path.stat().st_size
    if (problem := not_text(path)) is not None:
        if whole:
            left_out.add(path, NOT_TEXT)
            return
        raise DataError(
            f"{path} is not text: {problem}; expected UTF-8 (iconv converts other encodings), or JSON lines or "
            "Parquet named .jsonl or .parquet"
        )
    if separator is not None:
        for document in separated(path, separator.encode()):
            if not is_utf8(document.content):
                left_out.replaced(path)
            yield document
        return
    piece = WHOLE_FILE if whole else min(max(size // 1000, 4 << 10), 64 << 10)
    for block, done, last in blocks(path, max(piece, CHUNK), whole_lines=False):
        if not is_utf8(block):
            left_out.replaced(path)
        start = 0
        while start < len(block):
            end = line_end(block, start, piece)
            finished = end == len(block)
            yield TextPiece(block[start:end], last and finished, 0 if not finished else done)
            start = end


def read_jsonl(path: Path, key: str, left_out: LeftOut) -> Iterator[Chunk]:
    """Read a file with one JSON object per line. The text is the string in field `key`. left_out: collects files with
    invalid UTF-8."""
    start = 0
    for block, done, _ in blocks(path, CHUNK, whole_lines=True):
        if not is_utf8(block):
            left_out.replaced(path)
        yield LinesChunk(block, key, path, start, done)
        start += len(block)


def read_parquet(path: Path, key: str) -> Iterator[Chunk]:
    """Read the string column `key` of a Parquet file."""
    import pyarrow as pa
    import pyarrow.parquet

    where = f"{path}: column {key!r}"
    with pyarrow.parquet.ParquetFile(path) as file:
        names = file.schema_arrow.names
        if key not in names:
            raise DataError(f"{path} has no column {key!r}, only {few(names)}; choose one with --text-key")
        kind = file.schema_arrow.field(key).type
        _expect_text(kind, where)
        # The size of all columns: in a damaged file, asking for the size of one column would abort the process.
        groups = [file.metadata.row_group(i) for i in range(file.metadata.num_row_groups)]
        content = sum(group.total_byte_size for group in groups)
        rows = max(file.metadata.num_rows, 1)
        # A dictionary holds a repeated value once, but Arrow copies the dictionary for each batch: read large batches.
        limit = 1 << 16 if (dictionary := pa.types.is_dictionary(kind)) else ROWS
        step = min(max(int(CHUNK * rows / max(content, 1)), 1), limit)
        bytes_per_row = path.stat().st_size / rows
        for number, group in enumerate(groups):
            if group.total_byte_size > LONGEST * max(group.num_rows, 1):
                raise too_long(f"{path}: a row of row group {number}")
        # Arrow's threads read columns in parallel. For one column they only cost time, 0.1 ms per batch.
        batches = file.iter_batches(batch_size=step, columns=[key], use_threads=False)
        columns = (batch.column(0) for batch in batches)
        for column in columns if dictionary else _joined(columns):
            yield from column_chunks(column, where, bytes_per_row)


def _expect_text(kind: Any, where: str) -> None:
    """Raise DataError unless an Arrow type holds text. where: name of the column in the error."""
    import pyarrow as pa

    value = kind.value_type if pa.types.is_dictionary(kind) else kind
    names = ("string", "large_string", "string_view", "binary", "large_binary", "binary_view", "null")
    if not any(getattr(pa.types, f"is_{name}")(value) for name in names):
        raise DataError(f"{where} holds {kind}; expected text")


def _joined(columns: Iterator[Any]) -> Iterator[Any]:
    """Concatenate Arrow columns to columns of up to CHUNK bytes. Larger ones stay unchanged."""
    import pyarrow as pa

    parts: list[Any] = []
    size = 0
    for column in columns:
        if parts and size + column.nbytes > CHUNK:
            yield pa.concat_arrays(parts)
            parts, size = [], 0
        parts.append(column)
        size += column.nbytes
    if parts:
        yield pa.concat_arrays(parts)


def column_chunks(column: Any, where: str, done_per_row: float) -> Iterator[ColumnChunk]:
    """Cut an Arrow column into chunks of about CHUNK bytes.

    where: name of the column in errors. done_per_row: size of a row in the unit of the corpus. Raises DataError for a
    column that does not hold text.
    """
    import pyarrow as pa

    _expect_text(column.type, where)
    try:
        dictionary = pa.types.is_dictionary(column.type)
        values = column.dictionary if dictionary else column
        # View strings as bytes: in a damaged file they may be invalid UTF-8.
        kinds = {pa.string(): pa.binary(), pa.large_string(): pa.large_binary(), pa.string_view(): pa.binary_view()}
        values = values.view(kinds.get(values.type, values.type))
        step = max(len(column) * CHUNK // max(column.nbytes, CHUNK), 1)
        cuts = _dictionary_cuts(values, column.indices) if dictionary else range(step, len(column), step)
        for begin, end in pairwise([0, *cuts, len(column)]):
            # Copy: pickling a slice would pickle the whole column.
            part = values.take(column.indices[begin:end]) if dictionary else pa.concat_arrays([values[begin:end]])
            if part.nbytes > LONGEST and any(len(value or b"") > LONGEST for value in part.to_pylist()):
                raise too_long(f"{where}: a value")
            yield ColumnChunk(part, int((end - begin) * done_per_row))
    except pa.ArrowException as error:
        raise DataError(f"{where} cannot be read: {reason(error)}") from error


def _dictionary_cuts(values: Any, rows: Any) -> list[int]:
    """Return where to cut a dictionary column, so that each part without its first row has at most CHUNK bytes.

    Uses only the lengths, and copies no values: a small file may repeat a long value many times. rows: indices into
    `values`.
    """
    import pyarrow.compute

    lengths = pyarrow.compute.binary_length(values).take(rows).fill_null(0)
    ends = np.cumsum(lengths.to_numpy())
    return (np.flatnonzero(np.diff(ends // CHUNK)) + 1).tolist()


class _TextChunks:
    """Collects text pieces into chunks."""

    def __init__(self) -> None:
        self._pieces: list[TextPiece] = []
        self._size = 0
        self._continues = False

    def add(self, pieces: Iterator[TextPiece]) -> Iterator[Chunk]:
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
            continues, self._continues = self._continues, not pieces[-1].ends
            yield TextChunk(contents, None if ends.all() else ends, sum(piece.done for piece in pieces), continues)


def _parse_lines(block: bytes, key: str) -> Sequence[str | None] | None:
    """Parse with msgspec, and drop the other fields. Return None if a line is invalid."""
    try:
        return [line.text for line in _decoder(key).decode_lines(block)]
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None


@cache
def _decoder(key: str) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(msgspec.defstruct("Record", [("text", str | None, None)], rename={"text": key}))


def _parse_slowly(block: bytes, key: str, path: Path, start: int) -> Sequence[str | None]:
    """Parse line by line. Accepts lone surrogates, and names the invalid line in its error."""
    texts: list[str | None] = []
    for number, raw in enumerate(block.split(b"\n"), 1):
        if not raw.strip():
            continue
        try:
            record = json.loads(raw.decode("utf-8", "replace"))
        except (ValueError, RecursionError) as error:
            where = f"{path} line {count_lines(path, start) + number}"
            # The error counts lines within this one.
            at = isinstance(error, json.JSONDecodeError) and f"{error.msg}, at column {error.colno}"
            raise DataError(f"{where} is not JSON ({at or reason(error)}); expected one object per line") from error
        text = record.get(key) if isinstance(record, dict) else record
        if not isinstance(record, dict) or not isinstance(text, str | None):
            raise DataError(
                f"{path} line {count_lines(path, start) + number} has {_a(text)}; "
                f"expected an object with a string in field {key!r}"
            )
        texts.append(None if text is None else text.encode("utf-8", "replace").decode())
    return texts


def _fields(block: bytes) -> str:
    """Return the fields of the first record, as the end of an error's clause about a missing field."""
    try:
        return f", only {few(list(json.loads(block.split(NEWLINE, 1)[0])))}"
    except (ValueError, TypeError, RecursionError):
        return ""


def few(names: Sequence[str]) -> str:
    """Return the first names of fields or columns for an error, each shortened to 40 characters."""
    shown = ", ".join(name if len(name) <= 40 else f"{name[:37]}..." for name in names[:NAMED])
    return shown if len(names) <= NAMED else f"{shown} and {len(names) - NAMED} more"


def _a(value: object) -> str:
    """Return a JSON value for an error: for a list, a string or an object only its type, as it may be long."""
    kind = type(value).__name__
    return kind if isinstance(value, dict | list | str) else f"{kind} '{value}'"
