"""`PREFIX.checksums`: checksums that detect damage to a prepared set. Megatron's two files stay unchanged.

Layout, little-endian u64 numbers. Header: the magic number, whose last byte is the version; bytes of the `.bin`; bytes
of the `.idx`; digest of the `.idx`; digest of the block digests followed by the header up to here. After the header:
one digest for each block of CHECKSUM_BLOCK bytes of the `.bin`, whose last block may be shorter. Then, if it is known
how the set was encoded: the tokenizer's identity; the id that begins each document, if there is one; and the digest of
the header's own digest followed by these. So the header's digest does not depend on what is known. Digests are
XXH3-64.
"""

import os
import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import xxhash

from llmtrain_data.errors import DataError
from llmtrain_data.files import File

MAGIC = b"LLTSUMS\x01"
HEADER = struct.Struct("<8sQQQQ")
SEALED = HEADER.size - 8
"""Bytes of the header that the header's digest covers."""

TAIL, TAIL_WITH_BEGIN = struct.Struct("<QQ"), struct.Struct("<QQQ")
"""The tokenizer's identity, the id that begins each document if there is one, and their digest."""

CHECKSUM_BLOCK = 1 << 16
"""Bytes of the `.bin` that one digest covers. The first read of a sample reads whole blocks. This costs little: the
kernel reads ahead by as much anyway, and hashing one block takes some microseconds."""


@dataclass(frozen=True)
class Encoding:
    """How a set was encoded. tokenizer: `tokenizer_identity` of the tokenizer. begin: the id that begins each document,
    None for none."""

    tokenizer: int
    begin: int | None = None


@dataclass(frozen=True, kw_only=True)
class Checksums:
    """The checksums of a set. blocks: uint64 digest of each `.bin` block. digest: digest of this file's content without
    the encoding. encoding: None if it is not known."""

    path: Path
    bin_bytes: int
    idx_bytes: int
    idx: int
    digest: int
    blocks: np.ndarray
    encoding: Encoding | None = None


def checksums_path(prefix: str | Path) -> Path:
    """Return the path of a prepared set's checksums."""
    return Path(f"{prefix}.checksums")


def block_count(size: int) -> int:
    """Return the number of blocks of a `.bin` of `size` bytes."""
    return -(-size // CHECKSUM_BLOCK)


def read_checksums(prefix: str | Path) -> Checksums | None:
    """Return a set's checksums, None if it has none.

    The file may be untrusted, so this maps it, and allocates nothing by the sizes in it. Raises DataError if it is no
    checksums file, truncated or damaged.
    """
    path = checksums_path(prefix)
    if not os.path.lexists(path):
        return None
    content = File(path).content
    if len(content) < HEADER.size or content[: len(MAGIC)] != MAGIC:
        raise DataError(f"{path} is not a checksums file; {_advice(prefix)}")
    _, bin_bytes, idx_bytes, idx, own = HEADER.unpack(content[: HEADER.size])
    expected = HEADER.size + 8 * block_count(bin_bytes)
    if len(content) not in (expected, expected + TAIL.size, expected + TAIL_WITH_BEGIN.size):
        raise DataError(
            f"{path} has {len(content)} bytes, but the checksums of {bin_bytes} bytes take {expected}; it is damaged "
            f"or truncated, so {_advice(prefix)}"
        )
    blocks, tail = content[HEADER.size : expected], content[expected:]
    sealed = xxhash.xxh3_64(blocks)
    sealed.update(content[:SEALED])
    encoding = Encoding(*struct.unpack(f"<{len(tail) // 8}Q", tail)[:-1]) if tail else None
    if sealed.intdigest() != own or (encoding is not None and tail != _tail(own, encoding)):
        raise DataError(f"{path} does not match its own checksum; it is damaged, so {_advice(prefix)}")
    return Checksums(
        path=path,
        bin_bytes=bin_bytes,
        idx_bytes=idx_bytes,
        idx=idx,
        digest=own,
        blocks=np.frombuffer(blocks, "<u8"),
        encoding=encoding,
    )


def _tail(own: int, encoding: Encoding) -> bytes:
    """Return the bytes that record how a set was encoded. own: the header's digest."""
    known = [encoding.tokenizer] if encoding.begin is None else [encoding.tokenizer, encoding.begin]
    layout = TAIL if encoding.begin is None else TAIL_WITH_BEGIN
    return layout.pack(*known, xxhash.xxh3_64_intdigest(layout.pack(own, *known)))


def _advice(prefix: str | Path) -> str:
    return f"prepare the data again, or rewrite it with `llmtrain data checksum {prefix} --overwrite`"


class ChecksumsWriter:
    """Writes the checksums, block by block, from the bytes of a `.bin`."""

    def __init__(self, path: Path) -> None:
        """Create the file at `path`. It is incomplete until `finish`."""
        self._file = open(path, "wb")  # noqa: SIM115
        self._file.write(bytes(HEADER.size))
        self._bytes = 0
        self._block, self._sealed = xxhash.xxh3_64(), xxhash.xxh3_64()

    def add(self, content: memoryview) -> None:
        """Take the next bytes of the `.bin`."""
        while len(content):
            head = content[: CHECKSUM_BLOCK - self._bytes % CHECKSUM_BLOCK]
            self._block.update(head)
            self._bytes += len(head)
            content = content[len(head) :]
            if self._bytes % CHECKSUM_BLOCK == 0:
                self._end_block()

    def finish(self, index: Path, encoding: Encoding | None = None) -> None:
        """Complete the file and fsync it. index: the complete `.idx`. encoding: as in `Checksums`."""
        if self._bytes % CHECKSUM_BLOCK:
            self._end_block()
        mapped = File(index).content
        header = HEADER.pack(MAGIC, self._bytes, len(mapped), xxhash.xxh3_64_intdigest(mapped), 0)[:SEALED]
        self._sealed.update(header)
        own = self._sealed.intdigest()
        if encoding is not None:
            self._file.write(_tail(own, encoding))
        self._file.seek(0)
        self._file.write(header + struct.pack("<Q", own))
        self._file.flush()
        os.fsync(self._file.fileno())
        self.close()

    def close(self) -> None:
        """Close the file, complete or not."""
        self._file.close()

    def _end_block(self) -> None:
        digest = struct.pack("<Q", self._block.intdigest())
        self._file.write(digest)
        self._sealed.update(digest)
        self._block.reset()


class BlockVerifier:
    """Compares each block of a `.bin` to its checksum at the first read, and again after the file changed."""

    def __init__(self, file: File, checksums: Checksums) -> None:
        """Verify `file`. Its size must be `checksums.bin_bytes`."""
        self._file, self._checksums = file, checksums
        self._seen = bytearray(len(checksums.blocks))
        self._changed = file.changed()

    def notice_changes(self) -> None:
        """Verify all blocks again if the file was written to since the last call."""
        if (changed := self._file.changed()) != self._changed:
            self._changed, self._seen = changed, bytearray(len(self._seen))

    def verify(self, start: int, end: int) -> None:
        """Verify the blocks that hold the bytes `[start, end)`. Raises DataError that names the first damaged block."""
        for block in range(start // CHECKSUM_BLOCK, block_count(end)):
            if not self._seen[block]:
                self._verify(block)

    def damaged(self, block: int) -> bool:
        """Return whether a block does not match its checksum."""
        content = self._file.content[block * CHECKSUM_BLOCK : (block + 1) * CHECKSUM_BLOCK]
        return xxhash.xxh3_64_intdigest(content) != self._checksums.blocks[block]

    def _verify(self, block: int) -> None:
        if self.damaged(block):
            first, last = block * CHECKSUM_BLOCK, min((block + 1) * CHECKSUM_BLOCK, len(self._file.content))
            raise DataError(
                f"{self._file.path} does not match its checksums in bytes {first} to {last}; it was damaged or changed "
                "after preparation, so prepare the data again or restore the file from a backup"
            )
        self._seen[block] = 1
