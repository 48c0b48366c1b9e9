"""Reading ranges of canonical tensors out of a checkpoint; nothing that fails its checksum is handed out."""

import os
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Self

import torch

from llmtrain.checkpoint.manifest import ITEM, MANIFEST, StoredRange, digest, read_manifest
from llmtrain.checkpoint.plain_file import DamagedError, open_plain, read_into
from llmtrain.checkpoint.safetensors_file import bytes_of

# Fewer than a process may have open; a checkpoint of many ranks has more files.
_OPEN_FILES = 256


class CheckpointReader:
    """A checkpoint opened for reading, in a `with` block. Raises DamagedError if its manifest is unsound."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.manifest = read_manifest(folder)
        self._open: dict[str, int] = {}
        self._block = torch.empty(self.manifest.block // ITEM, dtype=torch.float32)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for fd in self._open.values():
            os.close(fd)
        self._open.clear()

    def read(self, tensor: str, state: str, start: int, end: int) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield (position, values) that together are the elements `[start, end)` of one state of a tensor.

        values: fp32, one-dimensional, verified, only valid until the next is asked for. Raises DamagedError,
        naming file and tensor. Reads whole blocks, so at most two blocks more than asked for.
        """
        per_block = self.manifest.block // ITEM
        for piece in self.manifest.tensors[tensor].states[state]:
            low, high = max(start, piece.start), min(end, piece.end)
            if low >= high:
                continue
            for index in range((low - piece.start) // per_block, -(-(high - piece.start) // per_block)):
                first = piece.start + index * per_block
                values = self.block(f"{tensor} ({state})", piece, index)
                a, b = max(low, first), min(high, first + len(values))
                yield a, values[a - first : b - first]

    def whole(self, tensor: str, state: str) -> torch.Tensor:
        """Return one state of a tensor in its canonical shape, fp32, verified. Raises DamagedError."""
        result = torch.empty(self.manifest.tensors[tensor].shape)
        flat = result.view(-1)
        for position, values in self.read(tensor, state, 0, flat.numel()):
            flat[position : position + len(values)] = values
        return result

    def block(self, what: str, piece: StoredRange, index: int) -> torch.Tensor:
        """Return one block of a piece, fp32, verified, valid until the next is read.

        what: the piece's name in the sentence of a DamagedError.
        """
        begin = index * self.manifest.block
        length = min(self.manifest.block, piece.nbytes - begin)
        values = self._block[: length // ITEM]
        view = bytes_of(values)
        if not read_into(self.file(piece.file), view, piece.offset + begin):
            raise DamagedError(f"{piece.file} cannot be read at {what}")
        if digest(view) != piece.xxh3[index]:
            first = piece.start + begin // ITEM
            raise DamagedError(
                f"{piece.file} does not match its checksum at {what}, elements {first} to {first + len(values)}"
            )
        return values

    def file(self, name: str) -> int:
        """Return the descriptor of a file whose length and header have been verified. Raises DamagedError."""
        if name not in self._open:
            if len(self._open) == _OPEN_FILES:
                os.close(self._open.pop(next(iter(self._open))))
            self._open[name] = self._verified(name)
        return self._open[name]

    def _verified(self, name: str) -> int:
        entry = self.manifest.files[name]
        fd, size = open_plain(self.folder / name)
        try:
            if size != entry.bytes:
                raise DamagedError(f"{name} is {size} bytes long, but {MANIFEST} says {entry.bytes}")
            header = bytearray(entry.header)
            if not read_into(fd, memoryview(header), 0) or digest(bytes(header)) != entry.xxh3:
                raise DamagedError(f"{name} does not match its checksum in its header")
        except DamagedError:
            os.close(fd)
            raise
        return fd
