"""Write a safetensors file front to back, without a copy of the data, faster than write-then-fsync.

safetensors' own `save_file` first collects all data in memory. Here the header follows from the shapes alone, so each
tensor's bytes go directly from its memory to the disk. The kernel begins to write back each block immediately, so that
the final fsync has little left to do. The format is that of the safetensors documentation: an 8-byte little-endian
length, a JSON header padded with spaces, the tensors back to back.
"""

import ctypes
import errno
import json
import os
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from llmtrain.plan.placement import PAGE

if TYPE_CHECKING:
    import torch

ITEM_BYTES = {"F32": 4, "BF16": 2, "F16": 2}
_WRITE_BLOCK = 16 * 1024**2
# Bytes that are made durable between two signs of life.
_DURABLE_BLOCK = 1024**3


@dataclass(frozen=True)
class FileTensor:
    """One tensor of a safetensors file. dtype: safetensors' name for it (F32, BF16, F16)."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of data."""
        return prod(self.shape) * ITEM_BYTES[self.dtype]


def safetensors_header(tensors: Sequence[FileTensor], metadata: Mapping[str, str]) -> bytes:
    """Return the file's bytes before the data, for `tensors` back to back in the given order."""
    entries: dict[str, object] = {"__metadata__": dict(metadata)}
    offset = 0
    for tensor in tensors:
        end = offset + tensor.nbytes
        entries[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def bytes_of(tensor: "torch.Tensor") -> memoryview:
    """Return the bytes of a contiguous CPU tensor, without copying them."""
    # Not at the top: listing checkpoints needs no torch.
    import torch

    return tensor.detach().view(-1).view(torch.uint8).numpy().data


class DurableFile:
    """A new file, written front to back; the end of the `with` block makes it durable, except after an error.

    moved: called whenever a part is written or durable. Raises OSError with the path if the disk is full or the folder
    cannot be written.
    """

    def __init__(self, path: Path, moved: Callable[[], None] = lambda: None) -> None:
        self._path, self._moved = path, moved
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o666)
        self._written = self._queued = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                # On a slow disk, one fsync of everything would look like a hang.
                for start in range(0, self._written, _DURABLE_BLOCK):
                    _sync_range(self._fd, start, _DURABLE_BLOCK)
                    self._moved()
                os.fsync(self._fd)
        except OSError as failure:
            raise self._named(failure) from failure
        finally:
            os.close(self._fd)

    def write(self, data: bytes | memoryview) -> None:
        """Append `data`."""
        view = memoryview(data)
        for start in range(0, len(view), _WRITE_BLOCK):
            block = view[start : start + _WRITE_BLOCK]
            while block:
                try:
                    count = os.write(self._fd, block)
                except OSError as failure:
                    raise self._named(failure) from failure
                self._written += count
                block = block[count:]
                self._queue()
                self._moved()

    def _queue(self) -> None:
        """Let the kernel begin to write back the data so far, in complete pages, which no later write touches."""
        complete = self._written // PAGE * PAGE
        if complete - self._queued >= _WRITE_BLOCK and hasattr(os, "posix_fadvise"):
            # Besides dropping clean pages from the cache, this makes Linux queue the dirty ones for writing.
            os.posix_fadvise(self._fd, self._queued, complete - self._queued, os.POSIX_FADV_DONTNEED)
            self._queued = complete

    def _named(self, error: OSError) -> OSError:
        return OSError(error.errno, error.strerror, str(self._path))


def _sync_range(file: int, start: int, nbytes: int) -> None:
    """Wait until a part of a file's data is on the disk, where the system can. The file still needs an fsync. Raises
    OSError, which that fsync would not repeat."""
    sync_file_range = getattr(ctypes.CDLL(None, use_errno=True), "sync_file_range", None)
    if sync_file_range is None:
        return
    wait_before, write, wait_after = 1, 2, 4
    failed = sync_file_range(file, ctypes.c_int64(start), ctypes.c_int64(nbytes), wait_before | write | wait_after)
    if failed and (code := ctypes.get_errno()) not in (errno.ENOSYS, errno.EINVAL, errno.ESPIPE):
        raise OSError(code, os.strerror(code))
