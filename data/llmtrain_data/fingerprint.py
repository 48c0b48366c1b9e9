"""Fingerprints that identify a prepared set and its version, without reading all of it."""

from dataclasses import dataclass, field, replace

import numpy as np
import xxhash

from llmtrain_data.checksums import CHECKSUM_BLOCK, block_count
from llmtrain_data.indexed import IndexedData

SAMPLED = 256
"""Blocks of the `.bin` that a fingerprint reads. This covers sets of up to 16 MiB completely."""


@dataclass(frozen=True, kw_only=True)
class Fingerprint:
    """The fingerprint of a prepared set, in JSON types. path: its prefix.

    index, sample, blocks: XXH3-64 digests in hexadecimal: of the `.idx`, of SAMPLED evenly spread blocks of the `.bin`,
    and of its checksums file, None if there is none. begin: the id that begins each document, None if none is recorded.
    """

    path: str
    bin_bytes: int
    idx_bytes: int
    index: str
    sample: str
    blocks: str | None = None
    # The tokens decide whether data is the same; the record may be missing.
    begin: int | None = field(default=None, compare=False)

    def same_data(self, other: "Fingerprint") -> bool:
        """Return whether both sets have the same tokens; paths may differ. If one has no checksums, this misses changes
        that keep the size of the `.bin` and touch no sampled block."""
        same = replace(self, path=other.path, blocks=other.blocks) == other
        return same and (self.blocks == other.blocks or None in (self.blocks, other.blocks))


def fingerprint(data: IndexedData) -> Fingerprint:
    """Return the fingerprint of a set. Raises DataError if a sampled block does not match its checksum."""
    size = data.token_count * data.dtype.itemsize
    count, per_block = block_count(size), CHECKSUM_BLOCK // data.dtype.itemsize
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
        begin=data.begin,
    )


def difference(before: list[Fingerprint], now: list[Fingerprint]) -> str:
    """Return how the sets `now` differ from `before`, as one clause; empty if they do not differ."""
    if len(before) != len(now):
        return f"data.path names {len(now)} sets, and the run was trained on {len(before)}"
    for was, one in zip(before, now, strict=True):
        if not one.same_data(was):
            if was.path == one.path:
                return f"{one.path} holds other data than the run was trained on"
            return f"{one.path} does not hold the data of {was.path}, which the run was trained on"
    return ""
