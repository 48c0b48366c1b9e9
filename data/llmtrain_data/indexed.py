"""Megatron's indexed format: `PREFIX.bin` holds the tokens, `PREFIX.idx` the positions of sequences and documents.

Layout of the index, little-endian: the magic number, version (u64), dtype code (u8), number of sequences n (u64),
length of the document index d (u64), then int32[n] sequence lengths in tokens, int64[n] byte offsets into the `.bin`,
int64[d] first sequence of each document followed by n, and, in multimodal sets, int8[n] modes.
Source: Megatron-LM, megatron/core/datasets/indexed_dataset.py.
"""

import fcntl
import io
import os
import signal
import struct
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from llmtrain_data.checksums import BlockVerifier, ChecksumsWriter, Encoding, checksums_path, read_checksums
from llmtrain_data.errors import DataError
from llmtrain_data.files import File
from llmtrain_data.prefix import prefix_advice
from llmtrain_data.sync import sync_folder

MAGIC = b"MMIDIDX\x00\x00"
HEADER = struct.Struct("<9sQBQQ")
VERSION = 1
TOKEN_DTYPES: dict[int, type[np.number[Any]]] = {
    1: np.uint8,
    2: np.int8,
    3: np.int16,
    4: np.int32,
    5: np.int64,
    6: np.float64,
    7: np.float32,
    8: np.uint16,
}
UINT16_VOCAB = 65500
"""Vocabularies below this size are stored as uint16, others as int32, as in Megatron."""

CHECKED_AT_ONCE = 1 << 20

FLUSHED_AT_ONCE = 32 << 20
"""Bytes of tokens between two fsyncs in the background, so that the final fsync is short."""


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """Return the dtype that Megatron uses for ids of a vocabulary of `vocab_size`."""
    return np.dtype(np.uint16 if vocab_size < UINT16_VOCAB else np.int32)


def bin_path(prefix: str | Path) -> Path:
    """Return the path of a prepared set's tokens."""
    return Path(f"{prefix}.bin")


def idx_path(prefix: str | Path) -> Path:
    """Return the path of a prepared set's index."""
    return Path(f"{prefix}.idx")


def check_present(prefix: str | Path) -> None:
    """Raise DataError if a file of a prepared set is missing."""
    missing = [str(path) for path in (bin_path(prefix), idx_path(prefix)) if not path.exists()]
    if missing:
        raise DataError(f"{' and '.join(missing)} not found; {prefix_advice(Path(prefix))}")


class IndexedData:
    """A memory-mapped prepared set.

    token_count: number of tokens. index_bytes: size of the `.idx`. lengths: int32 `[sequences]`, tokens of each
    sequence. pointers: int64 `[sequences]`, byte offset of each sequence. document_index: int64 `[documents + 1]`,
    first sequence of each document, then the number of sequences. checksums: None if the set has none.
    """

    def __init__(self, prefix: str | Path, verified: bool = True) -> None:
        """Open `PREFIX.bin` and `PREFIX.idx`. verified: also open `PREFIX.checksums` if it exists, and verify reads.

        Raises DataError if a file is missing, truncated or of another format, or if the files do not match.
        """
        self.prefix = str(prefix)
        self._bin, self._idx = bin_path(prefix), idx_path(prefix)
        check_present(prefix)
        self._index = File(self._idx).content
        self.index_bytes = len(self._index)
        self.checksums = read_checksums(prefix) if verified else None
        self._check_index_digest()
        self.dtype, sequences, documents = self._read_header(self._index)
        at = HEADER.size
        self.lengths = np.frombuffer(self._index, np.int32, sequences, at)
        self.pointers = np.frombuffer(self._index, np.int64, sequences, at + 4 * sequences)
        self.document_index = np.frombuffer(self._index, np.int64, documents, at + 12 * sequences)
        self._check_index()
        self._file = File(self._bin)
        self._check_content()
        self._verifier = BlockVerifier(self._file, self.checksums) if self.checksums else None
        self._tokens = np.frombuffer(self._file.content, self.dtype)
        self.token_count = len(self._tokens)

    @property
    def documents(self) -> int:
        """Number of documents."""
        return max(len(self.document_index) - 1, 0)

    @property
    def begin(self) -> int | None:
        """The id that begins each document; None if none is recorded."""
        encoding = self.checksums.encoding if self.checksums else None
        return encoding.begin if encoding else None

    def read(self, first: int, last: int) -> np.ndarray:
        """Return the tokens `[first, last)` as a view of the file, in its dtype.

        Raises DataError if a block that contains them does not match its checksum.
        """
        if self._verifier is not None:
            self._verifier.verify(first * self.dtype.itemsize, last * self.dtype.itemsize)
        return self._tokens[first:last]

    def notice_changes(self) -> None:
        """Verify blocks again if the file has changed. Raises DataError if it was truncated."""
        if self._verifier is not None:
            self._verifier.notice_changes()
        else:
            self._file.changed()

    def document(self, number: int) -> np.ndarray:
        """Return the tokens of document `number`, 0 to `documents - 1`, as a view of the file."""
        return self.read(self.token_offset(number), self.token_offset(number + 1))

    def token_offset(self, document: int) -> int:
        """Return the position of the first token of `document`; `token_count` for `document == documents`."""
        sequence = int(self.document_index[document])
        if sequence == len(self.pointers):
            return self.token_count
        return int(self.pointers[sequence]) // self.dtype.itemsize

    def document_of(self, token: int) -> int:
        """Return the number of the document that holds the token at position `token`."""
        sequence = np.searchsorted(self.pointers, token * self.dtype.itemsize, "right") - 1
        return int(np.searchsorted(self.document_index, sequence, "right")) - 1

    def index_digest(self) -> int:
        """Return the XXH3-64 digest of the `.idx`."""
        return xxhash.xxh3_64_intdigest(self._index)

    def _check_index_digest(self) -> None:
        known = self.checksums
        if known and (self.index_bytes, self.index_digest()) != (known.idx_bytes, known.idx):
            raise DataError(
                f"{self._idx} does not match {known.path}; it was damaged or changed after preparation, so prepare the "
                f"data again, or, if it is correct, run `llmtrain data checksum {self.prefix} --overwrite`"
            )

    def _read_header(self, index: memoryview) -> tuple[np.dtype[Any], int, int]:
        if len(index) < HEADER.size or index[: len(MAGIC)] != MAGIC:
            raise DataError(f"{self._idx} is not a Megatron index; prepare the data set again")
        _, version, code, sequences, documents = HEADER.unpack(index[: HEADER.size])
        if version != VERSION or code not in TOKEN_DTYPES:
            raise DataError(f"{self._idx} has version {version} and dtype code {code}; expected 1 and one of 1 to 8")
        expected = HEADER.size + 12 * sequences + 8 * documents
        if len(index) not in (expected, expected + sequences):
            raise DataError(
                f"{self._idx} has {len(index)} bytes, but its {sequences} sequences and document index take "
                f"{expected}; it is damaged or truncated, so prepare the data set again"
            )
        return np.dtype(TOKEN_DTYPES[code]), sequences, documents

    def _check_index(self) -> None:
        """Raise DataError unless sequences are contiguous: consecutive documents must be one slice of the `.bin`."""
        n, last = len(self.lengths), len(self.document_index) - 1
        good = last >= 0 and self.document_index[0] == 0 and self.document_index[last] == n
        # Compare instead of subtracting: differences of untrusted numbers may overflow.
        good = good and bool(np.all(self.document_index[:-1] <= self.document_index[1:]))
        good = good and (n == 0 or self.pointers[0] == 0)
        for start in range(0, n, CHECKED_AT_ONCE):
            pointers = self.pointers[start : start + CHECKED_AT_ONCE + 1]
            lengths = self.lengths[start : start + len(pointers) - 1].astype(np.int64)
            good = good and bool(np.array_equal(np.diff(pointers), lengths * self.dtype.itemsize))
            good = good and (len(lengths) == 0 or int(lengths.min()) >= 0)
        if not good or (n and self.lengths[-1] < 0):
            raise DataError(f"{self._idx} is inconsistent; it is damaged, so prepare the data set again")

    def _check_content(self) -> None:
        expected, size = 0, len(self._file.content)
        if len(self.lengths):
            expected = int(self.pointers[-1]) + int(self.lengths[-1]) * self.dtype.itemsize
        if size != expected:
            raise DataError(
                f"{self._bin} has {size} bytes, but {self._idx} describes {expected}; one of them is damaged, "
                "truncated or from another set, so prepare the data set again"
            )
        if self.checksums and size != self.checksums.bin_bytes:
            raise DataError(
                f"{self.checksums.path} describes a .bin of {self.checksums.bin_bytes} bytes, but {self._bin} has "
                f"{size}; rewrite it with `llmtrain data checksum {self.prefix} --overwrite`, or prepare the data again"
            )


class IndexedWriter:
    """Writes a prepared set one batch of documents at a time, in constant memory.

    It writes to `.partial` files first. `commit` fsyncs and renames them, the index last. So a set with an index is
    complete.
    """

    def __init__(self, prefix: str | Path, dtype: np.dtype[Any], encoding: Encoding | None = None) -> None:
        """Begin the set. Its folder must exist. Overwrites the partial files of a killed writer.

        encoding: how the tokens were made, recorded beside the checksums.

        Raises DataError while another process writes the same prefix.
        """
        self.dtype = np.dtype(dtype)
        self._encoding = encoding
        self._code = next(code for code, kind in TOKEN_DTYPES.items() if np.dtype(kind) == self.dtype)
        # In the order of renaming.
        self._final = [bin_path(prefix), checksums_path(prefix), idx_path(prefix)]
        self._partial = partial_paths(prefix)
        # Open this file first: it is the lock for the others. It is never renamed, so the lock also covers the renames.
        self._lengths = io.BufferedRandom(open_locked(self._partial[3]))
        self._tokens = io.FileIO(self._partial[0], "w")
        self._checksums = ChecksumsWriter(self._partial[1])
        self._flusher = ThreadPoolExecutor(1)
        self._flush: Future[None] | None = None
        self._unflushed = 0
        self.documents = 0
        self.token_count = 0

    def add(self, tokens: np.ndarray, lengths: np.ndarray) -> None:
        """Append documents. tokens: their concatenated tokens. lengths: number of tokens of each."""
        view = np.ascontiguousarray(tokens, self.dtype).data.cast("B")
        self._checksums.add(view)
        while len(view):
            view = view[self._tokens.write(view) :]
        self._lengths.write(np.ascontiguousarray(lengths, "<i4").tobytes())
        self.documents += len(lengths)
        self.token_count += len(tokens)
        self._unflushed += len(tokens) * self.dtype.itemsize
        if self._unflushed >= FLUSHED_AT_ONCE:
            self._flushed()
            self._flush, self._unflushed = self._flusher.submit(os.fsync, self._tokens.fileno()), 0

    def commit(self) -> None:
        """Finish the set: fsync all files, then rename the tokens, the checksums and the index, in this order."""
        self._write_index()
        self._checksums.finish(self._partial[2], self._encoding)
        self._flushed()
        os.fsync(self._tokens.fileno())
        self._tokens.close()
        with _uninterrupted():
            # An old index must never appear with new tokens.
            self._final[2].unlink(missing_ok=True)
            for partial, final in zip(self._partial, self._final, strict=False):
                os.replace(partial, final)
                sync_folder(final.parent)
            self.discard()

    def discard(self) -> None:
        """Remove the partial files."""
        self._flusher.shutdown()
        # Remove them before releasing the lock: afterwards, files with these names belong to another writer.
        for path in self._partial:
            path.unlink(missing_ok=True)
        self._partial = []
        for file in (self._tokens, self._checksums, self._lengths):
            # close() flushes, which fails on a full disk.
            with suppress(OSError):
                file.close()

    def _flushed(self) -> None:
        """Wait for the background fsync. Raises its OSError: the kernel reports a failed write to one fsync only."""
        if self._flush is not None:
            self._flush.result()

    def _write_index(self) -> None:
        """Write the index in blocks, from the lengths on disk."""
        n, block = self.documents, CHECKED_AT_ONCE
        with open(self._partial[2], "wb") as index:
            index.write(HEADER.pack(MAGIC, VERSION, self._code, n, n + 1))
            for lengths in self._length_blocks(block):
                index.write(lengths.tobytes())
            offset = 0
            for lengths in self._length_blocks(block):
                ends = offset + np.cumsum(lengths, dtype="<i8") * self.dtype.itemsize
                index.write(np.concatenate([[offset], ends[:-1]]).astype("<i8").tobytes())
                offset = int(ends[-1])
            for start in range(0, n + 1, block):
                index.write(np.arange(start, min(start + block, n + 1), dtype="<i8").tobytes())
            index.flush()
            os.fsync(index.fileno())

    def _length_blocks(self, block: int) -> Iterator[np.ndarray]:
        self._lengths.seek(0)
        while raw := self._lengths.read(4 * block):
            yield np.frombuffer(raw, "<i4")


def partial_paths(prefix: str | Path) -> list[Path]:
    """Return the partial files of a preparation of `prefix`: tokens, checksums, index, lengths.

    A process that writes any of them must hold the lock of the last one (`open_locked`).
    """
    return [Path(f"{prefix}{suffix}.partial") for suffix in (".bin", ".checksums", ".idx", ".lengths")]


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Ignore SIGINT and SIGTERM: between the renames, neither the old nor the new set is complete."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def open_locked(path: Path) -> io.FileIO:
    """Open a file for reading and writing, truncate it, and lock it until it is closed.

    Raises DataError while another process holds the lock.
    """
    file = io.FileIO(path, "a+")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # The previous holder may have removed the file after it was opened here.
        free = os.fstat(file.fileno()).st_nlink > 0
    except BlockingIOError:
        free = False
    except OSError:
        free = True  # a file system without locks
    if not free:
        file.close()
        raise DataError(f"another process is writing {path}; wait for it, or give another --output")
    file.truncate(0)
    return file
