"""What tells one prepared set from another, and from what it was before, without reading all of it."""

from dataclasses import dataclass, replace

import numpy as np
import xxhash

from llmtrain_data.checksums import BLOCK, block_count
from llmtrain_data.indexed import IndexedData

SAMPLED = 256
"""Blocks of the `.bin` that are read; sets of up to 16 MiB are read whole."""


@dataclass(frozen=True)
class Fingerprint:
    """A prepared set as a run has found it, in values that JSON has. path: its prefix.

    index, sample, blocks: XXH3-64 digests in hexadecimal, of the `.idx`, of SAMPLED blocks of the `.bin` spread evenly,
    and, from its checksums if it has any, of every block.
    """

    path: str
    bin_bytes: int
    idx_bytes: int
    index: str
    sample: str
    blocks: str | None = None

    def same_data(self, other: "Fingerprint") -> bool:
        """Return whether both are of the same tokens, wherever they lie. Where one has no checksums, a change of
        part of the `.bin` that keeps its size is seen only where it touches a sampled block."""
        alike = replace(self, path=other.path, blocks=other.blocks) == other
        return alike and (self.blocks == other.blocks or None in (self.blocks, other.blocks))


def fingerprint(data: IndexedData) -> Fingerprint:
    """Return the fingerprint of a set. Raises DataError where a block that is read does not match its checksum."""
    size = data.token_count * data.dtype.itemsize
    count, per_block = block_count(size), BLOCK // data.dtype.itemsize
    sample = xxhash.xxh3_64()
    for block in np.unique(np.linspace(0, max(count - 1, 0), SAMPLED).astype(int)).tolist():
        sample.update(data.read(block * per_block, min((block + 1) * per_block, data.token_count)).data)
    return Fingerprint(
        path=data.prefix,
        bin_bytes=size,
        idx_bytes=data.index_bytes,
        index=f"{data.index_digest():016x}",
        sample=sample.hexdigest(),
        blocks=f"{data.checksums.digest:016x}" if data.checksums else None,
    )


def difference(before: list[Fingerprint], now: list[Fingerprint]) -> str:
    """Return what `now` has otherwise than `before`, as the subject of a sentence names the set; empty for nothing."""
    if len(before) != len(now):
        return f"data.path names {len(now)} sets, and the run was trained on {len(before)}"
    for was, one in zip(before, now, strict=True):
        if not one.same_data(was):
            if was.path == one.path:
                return f"{one.path} holds other data than the run was trained on"
            return f"{one.path} does not hold the data of {was.path}, which the run was trained on"
    return ""
