"""One rank's part of a checkpoint: its ranges in one safetensors file, and the manifest's word on them."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

from llmtrain.checkpoint.manifest import BLOCK, FileEntry, StoredRange, TensorEntry, digest
from llmtrain.checkpoint.safetensors_file import DurableFile, FileTensor, safetensors_header


@dataclass(frozen=True)
class Range:
    """The elements `[start, end)` of one state of one canonical tensor."""

    tensor: str
    shape: tuple[int, ...]
    state: str
    start: int
    end: int

    def file_tensor(self) -> FileTensor:
        """Return it as the file holds it: in its own shape if whole, else flat and named by its range."""
        if self.end - self.start == prod(self.shape):
            return FileTensor(f"{self.tensor}.{self.state}", "F32", self.shape)
        name = f"{self.tensor}.{self.state}[{self.start}:{self.end}]"
        return FileTensor(name, "F32", (self.end - self.start,))


@dataclass(frozen=True)
class ShardFile:
    """One file of a checkpoint. pieces: what it holds of each range, in the order of the file."""

    name: str
    entry: FileEntry
    ranges: list[Range]
    pieces: list[StoredRange]


def write_shard_file(path: Path, ranges: Sequence[Range], contents: Iterable[memoryview]) -> ShardFile:
    """Write `ranges` into a new file at `path`, and make it durable.

    contents: the bytes of each range in turn; they are hashed on their way. Raises OSError.
    """
    header = safetensors_header([r.file_tensor() for r in ranges], {"format": "pt"})
    offset, pieces = len(header), []
    with DurableFile(path) as file:
        file.write(header)
        for held, content in zip(ranges, contents, strict=True):
            digests = []
            for start in range(0, len(content), BLOCK):
                block = content[start : start + BLOCK]
                digests.append(digest(block))
                file.write(block)
            pieces.append(StoredRange(held.start, held.end, path.name, offset, digests))
            offset += len(content)
    return ShardFile(path.name, FileEntry(offset, len(header), digest(header)), list(ranges), pieces)


def merge_shard_files(parts: Iterable[ShardFile]) -> tuple[dict[str, FileEntry], dict[str, TensorEntry]]:
    """Return the manifest's `files` and `tensors` of a checkpoint made of `parts`."""
    files: dict[str, FileEntry] = {}
    found: dict[str, dict[str, list[StoredRange]]] = defaultdict(lambda: defaultdict(list))
    shapes: dict[str, tuple[int, ...]] = {}
    for part in parts:
        files[part.name] = part.entry
        for held, piece in zip(part.ranges, part.pieces, strict=True):
            shapes[held.tensor] = held.shape
            found[held.tensor][held.state].append(piece)
    tensors = {
        name: TensorEntry(list(shapes[name]), {state: sorted(p, key=lambda x: x.start) for state, p in states.items()})
        for name, states in found.items()
    }
    return files, tensors
