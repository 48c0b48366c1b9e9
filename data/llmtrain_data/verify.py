"""Verifies all of a prepared set against its checksums, and writes checksums for a set without them."""

import os
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path

import xxhash

from llmtrain_data import units
from llmtrain_data.checksums import (
    CHECKSUM_BLOCK,
    BlockVerifier,
    ChecksumsWriter,
    block_count,
    checksums_path,
    read_checksums,
)
from llmtrain_data.errors import DataError
from llmtrain_data.files import File
from llmtrain_data.indexed import IndexedData, bin_path, check_present, idx_path, open_locked, partial_paths
from llmtrain_data.output import json_text
from llmtrain_data.progress import progress

SHOWN, LISTED = 20, 1000
"""Most damaged ranges that the table shows, and that the JSON lists."""

READ_AT_ONCE = 256 * CHECKSUM_BLOCK
"""Bytes per read and progress report."""


@dataclass(frozen=True)
class Damage:
    """Bytes `[first, last)` of a file do not match their checksums."""

    file: str
    first: int
    last: int


@dataclass(frozen=True)
class Verification:
    """The result of verifying a set. blocks: number of blocks of the `.bin`, as it is or as it should be, whichever has
    more; block_bytes: bytes of one. damaged: the first LISTED ranges, adjacent blocks merged. damaged_blocks: number of
    damaged blocks of the `.bin`. damaged_bytes: size of all damaged ranges."""

    prefix: str
    blocks: int
    block_bytes: int
    damaged_blocks: int
    damaged_bytes: int
    damaged: list[Damage]

    def json(self) -> str:
        """Return the verification as one JSON object."""
        return json_text(asdict(self))

    def facts(self) -> list[tuple[str, str]]:
        """Return the verification as (name, value) rows."""
        if not self.damaged:
            return [("blocks", f"{self.blocks:,} of {units.size(self.block_bytes)}"), ("verified", "no damage found")]
        index = ", and the index" if any(one.file == str(idx_path(self.prefix)) for one in self.damaged) else ""
        found = [("damaged blocks", f"{self.damaged_blocks:,} of {self.blocks:,}{index}")]
        found += [("damaged", f"{one.file}, bytes {one.first} to {one.last}") for one in self.damaged[:SHOWN]]
        if len(self.damaged) > SHOWN:
            found.append(("damaged", f"{len(self.damaged) - SHOWN} or more further ranges"))
        return [*found, ("what to do", "copy the set again from where it is undamaged, or prepare the data again")]


class _Found:
    """Collects damaged ranges, merges adjacent ones, and keeps at most LISTED."""

    def __init__(self) -> None:
        self.damaged, self.bytes, self.blocks = list[Damage](), 0, 0

    def add(self, path: Path, first: int, last: int) -> None:
        self.bytes += last - first
        before = self.damaged[-1] if self.damaged else None
        if before and (before.file, before.last) == (str(path), first):
            self.damaged[-1] = Damage(str(path), before.first, last)
        elif len(self.damaged) < LISTED:
            self.damaged.append(Damage(str(path), first, last))


def verify(prefix: Path) -> Verification:
    """Read all of a prepared set and compare it to its checksums. Raises DataError if it has none."""
    check_present(prefix)
    checksums = read_checksums(prefix)
    if checksums is None:
        raise DataError(
            f"{prefix} has no checksums to verify it against; `llmtrain data checksum {prefix}` writes those of its "
            "present content"
        )
    found = _Found()
    index, content = File(idx_path(prefix)), File(bin_path(prefix))
    if (len(index.content), xxhash.xxh3_64_intdigest(index.content)) != (checksums.idx_bytes, checksums.idx):
        found.add(index.path, 0, max(len(index.content), checksums.idx_bytes))
    verifier, size = BlockVerifier(content, checksums), max(len(content.content), checksums.bin_bytes)
    with progress("verify", size, "bytes") as report:
        for start in range(0, size, READ_AT_ONCE):
            end = min(start + READ_AT_ONCE, size)
            for first in range(start, end, CHECKSUM_BLOCK):
                if first >= checksums.bin_bytes or verifier.damaged(first // CHECKSUM_BLOCK):
                    found.blocks += 1
                    found.add(content.path, first, min(first + CHECKSUM_BLOCK, end))
            report(end - start)
    return Verification(str(prefix), block_count(size), CHECKSUM_BLOCK, found.blocks, found.bytes, found.damaged)


def write_checksums(prefix: Path, overwrite: bool) -> int:
    """Write checksums of a set's present content, for sets that other tools prepared. Return the number of blocks.

    Raises DataError if the set's files do not match, if another process writes the set, or if it has checksums and
    `overwrite` is False.
    """
    path = checksums_path(prefix)
    if os.path.lexists(path) and not overwrite:
        raise DataError(f"{path} already exists; `llmtrain data inspect {prefix} --verify` verifies the set against it")
    check_present(prefix)
    _, partial, _, lock = partial_paths(prefix)
    # Lock before opening the set: a set that is replaced meanwhile would get the old set's checksums.
    with open_locked(lock):
        try:
            blocks = _write_checksums(prefix, partial)
            os.replace(partial, path)
        finally:
            partial.unlink(missing_ok=True)
            lock.unlink(missing_ok=True)
    return blocks


def _write_checksums(prefix: Path, target: Path) -> int:
    IndexedData(prefix, verified=False)
    content = File(bin_path(prefix)).content
    with closing(ChecksumsWriter(target)) as writer, progress("checksum", len(content), "bytes") as report:
        for start in range(0, len(content), READ_AT_ONCE):
            chunk = content[start : start + READ_AT_ONCE]
            writer.add(chunk)
            report(len(chunk))
        writer.finish(idx_path(prefix))
    return block_count(len(content))
