"""Read ranges of canonical tensors from a checkpoint, and verify every byte before it is returned."""

import os
import resource
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Self

import torch
from llmtrain_data.files import allow_many_files

from llmtrain.checkpoint.checksums import verify_digest
from llmtrain.checkpoint.manifest import ITEM, MANIFEST, StoredRange, read_manifest
from llmtrain.checkpoint.plain_file import DamagedError, open_plain, patiently, read_into
from llmtrain.checkpoint.safetensors_file import bytes_of

# Most files that a reader keeps open; also at most half of those that the process may open.
_OPEN_FILES = 65536


class CheckpointReader:
    """A checkpoint opened for reading, in a `with` block. Raises DamagedError if its manifest is damaged.

    All methods raise OSError, with the path, after an error of the file system that lasts for two tries: it does not
    say that the checkpoint is damaged.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.manifest = patiently(folder / MANIFEST, lambda: read_manifest(folder))
        self._open: dict[str, int] = {}
        # Tensors in their order go through all files of a unit again and again: opening them anew takes longer than
        # reading them.
        allow_many_files()
        self._most_open = min(_OPEN_FILES, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2)
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

        values: fp32, one-dimensional, verified, valid only until the next iteration. Reads full blocks, so at most two
        blocks more than needed. Raises DamagedError, which names the file and the tensor.
        """
        per_block = self.manifest.block // ITEM
        for stored in self.manifest.tensors[tensor].states[state]:
            low, high = max(start, stored.start), min(end, stored.end)
            if low >= high:
                continue
            for index in range((low - stored.start) // per_block, -(-(high - stored.start) // per_block)):
                first = stored.start + index * per_block
                values = self.block(f"{tensor} ({state})", stored, index)
                a, b = max(low, first), min(high, first + len(values))
                yield a, values[a - first : b - first]

    def full_tensor(self, tensor: str, state: str) -> torch.Tensor:
        """Return one state of a tensor in its canonical shape, fp32, verified. Raises DamagedError."""
        result = torch.empty(self.manifest.tensors[tensor].shape)
        flat = result.view(-1)
        for position, values in self.read(tensor, state, 0, flat.numel()):
            flat[position : position + len(values)] = values
        return result

    def block(self, name: str, stored: StoredRange, index: int) -> torch.Tensor:
        """Return one block of a stored range, fp32, one-dimensional, verified, valid until the next call.

        name: the range's name in the message of a DamagedError.
        """
        begin = index * self.manifest.block
        length = min(self.manifest.block, stored.nbytes - begin)
        values = self._block[: length // ITEM]
        view = bytes_of(values)
        whole = patiently(self.folder / stored.file, lambda: self._read_into(stored.file, view, stored.offset + begin))
        if not whole:
            raise DamagedError(f"{stored.file} ends before {name}")
        first = stored.start + begin // ITEM
        where = f"at {name}, elements {first} to {first + len(values)}"
        verify_digest(view, stored.xxh3[index], stored.file, where)
        return values

    def file(self, name: str) -> int:
        """Return the descriptor of a file after verifying its length and header. Raises DamagedError."""
        return patiently(self.folder / name, lambda: self._descriptor(name))

    def _read_into(self, name: str, view: memoryview, offset: int) -> bool:
        try:
            return read_into(self._descriptor(name), view, offset)
        except OSError:
            if name in self._open:
                os.close(self._open.pop(name))
            raise

    def _descriptor(self, name: str) -> int:
        if name not in self._open:
            if len(self._open) == self._most_open:
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
            if not read_into(fd, memoryview(header), 0):
                raise DamagedError(f"{name} ends in its header")
            verify_digest(header, entry.xxh3, name, "in its header")
        except (DamagedError, OSError):
            os.close(fd)
            raise
        return fd
