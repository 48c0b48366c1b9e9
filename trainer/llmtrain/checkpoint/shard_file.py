"""One rank's shard of a checkpoint: its ranges in one safetensors file, and their entries for the manifest."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Protocol

from llmtrain.checkpoint.checksums import digest
from llmtrain.checkpoint.manifest import FileEntry, StoredRange, TensorEntry
from llmtrain.checkpoint.safetensors_file import DurableFile, FileTensor, safetensors_header
from llmtrain.plan.memory.checkpoint_copies import SHARD_FILE_BLOCK


@dataclass(frozen=True)
class Range:
    """The elements `[start, end)` of one state of one canonical tensor."""

    tensor: str
    shape: tuple[int, ...]
    state: str
    start: int
    end: int

    def file_tensor(self) -> FileTensor:
        """Return the range's entry in the file: a full tensor in its own shape, else flat and named by its range."""
        if self.end - self.start == prod(self.shape):
            return FileTensor(f"{self.tensor}.{self.state}", "F32", self.shape)
        name = f"{self.tensor}.{self.state}[{self.start}:{self.end}]"
        return FileTensor(name, "F32", (self.end - self.start,))


@dataclass(frozen=True)
class ShardFile:
    """One file of a checkpoint. stored: the place of each of `ranges`, in the order of the file."""

    name: str
    entry: FileEntry
    ranges: list[Range]
    stored: list[StoredRange]


class Content(Protocol):
    """Bytes of which slices can be taken."""

    def __len__(self) -> int:
        """Return their number."""

    def __getitem__(self, part: slice, /) -> memoryview:
        """Return some of them."""


def write_shard_file(
    path: Path, ranges: Sequence[Range], contents: Iterable[Content], moved: Callable[[], None] = lambda: None
) -> ShardFile:
    """Write `ranges` into a new file at `path`, and make it durable.

    contents: yields the bytes of each range. moved: called whenever a part is written or durable. Hashes the bytes
    while it writes them. Raises OSError.
    """
    header = safetensors_header([r.file_tensor() for r in ranges], {"format": "pt"})
    offset, stored = len(header), []
    with DurableFile(path, moved) as file:
        file.write(header)
        for one, content in zip(ranges, contents, strict=True):
            digests = []
            for start in range(0, len(content), SHARD_FILE_BLOCK):
                block = content[start : start + SHARD_FILE_BLOCK]
                digests.append(digest(block))
                file.write(block)
            stored.append(StoredRange(one.start, one.end, path.name, offset, digests))
            offset += len(content)
    return ShardFile(path.name, FileEntry(offset, len(header), digest(header)), list(ranges), stored)


def merge_shard_files(shard_files: Iterable[ShardFile]) -> tuple[dict[str, FileEntry], dict[str, TensorEntry]]:
    """Return the manifest's `files` and `tensors` for a checkpoint with these shard files."""
    files: dict[str, FileEntry] = {}
    found: dict[str, dict[str, list[StoredRange]]] = defaultdict(lambda: defaultdict(list))
    shapes: dict[str, tuple[int, ...]] = {}
    for shard_file in shard_files:
        files[shard_file.name] = shard_file.entry
        for one, stored in zip(shard_file.ranges, shard_file.stored, strict=True):
            shapes[one.tensor] = one.shape
            found[one.tensor][one.state].append(stored)
    tensors = {
        name: TensorEntry(list(shapes[name]), {state: sorted(p, key=lambda x: x.start) for state, p in states.items()})
        for name, states in found.items()
    }
    return files, tensors
