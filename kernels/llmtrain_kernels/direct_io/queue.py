"""Reads and writes of files that run while the caller computes, past the page cache."""

import errno
import functools
import os
from collections import Counter
from contextlib import suppress
from types import SimpleNamespace
from typing import Literal

import torch
from torch import Tensor

from llmtrain_kernels.native import native_functions, native_reason

# Addresses, offsets and sizes are multiples of this many bytes. Devices ask for 512 or 4096.
FILE_ALIGNMENT = 4096
# Bytes of a piece of a transfer, and the pieces that are with the kernel at once.
PIECE, DEPTH = 2**20, 64

Interface = Literal["io_uring", "aio"]


def aligned_bytes(nbytes: int) -> Tensor:
    """Return host memory that a queue can transfer: uint8 `[nbytes]` at a multiple of ALIGNMENT, uninitialized."""
    return aligned(torch.empty(nbytes + FILE_ALIGNMENT, dtype=torch.uint8), nbytes)


def aligned(memory: Tensor, nbytes: int) -> Tensor:
    """Return `[nbytes]` of `memory`, uint8 `[nbytes + ALIGNMENT]`, that begin at a multiple of ALIGNMENT."""
    start = -memory.data_ptr() % FILE_ALIGNMENT
    return memory[start : start + nbytes]


class DirectQueue:
    """Starts transfers between memory and files opened with O_DIRECT, and waits for them.

    interface: the kernel's interface that it uses; None for io_uring, or Linux AIO where there is no io_uring or a
    container forbids it. One thread at a time calls its methods. moved: bytes of the transfers that began, by file and
    by "read" or "write".
    """

    def __init__(self, interface: Interface | None = None, depth: int = DEPTH, piece: int = PIECE) -> None:
        """Raises OSError, which says why, if there is no such interface, or none of both; RuntimeError if the C++ part
        cannot be built."""
        self._functions, self._next = _functions(), 0
        self._pending: dict[int, Tensor] = {}
        self._failed = list[Tensor]()
        self.moved: Counter[tuple[int, str]] = Counter()
        self.interface: Interface = interface or "io_uring"
        try:
            self._queue = self._open(self.interface, depth, piece)
        except OSError as no_ring:
            if interface is not None:
                raise
            self.interface = "aio"
            try:
                self._queue = self._open(self.interface, depth, piece)
            except OSError as no_aio:
                raise OSError(no_aio.errno, f"{no_ring.strerror}; {no_aio.strerror}") from no_aio

    def read(self, file: int, offset: int, into: Tensor) -> int:
        """Start to read into contiguous host memory; return the transfer's number. file: descriptor."""
        return self._start(file, offset, into, "read")

    def write(self, file: int, offset: int, values: Tensor) -> int:
        """Start to write contiguous host memory, which must not change until it is done; return the transfer's
        number."""
        return self._start(file, offset, values, "write")

    def finish(self, transfer: int) -> None:
        """Wait until a transfer is done. Raises OSError."""
        error = torch.zeros(1, dtype=torch.int64)
        self._functions.queue_finish(self._queue, transfer, error.data_ptr())
        memory = self._pending.pop(transfer)
        if code := int(error):
            # The kernel may still use it for other pieces of the transfer.
            self._failed.append(memory)
            raise OSError(code, os.strerror(code))

    def close(self) -> None:
        """Wait for all transfers, whatever their outcome, and free the queue."""
        for transfer in list(self._pending):
            with suppress(OSError):
                self.finish(transfer)
        self._functions.queue_close(self._queue)

    def _start(self, file: int, offset: int, memory: Tensor, kind: str) -> int:
        if any(number % FILE_ALIGNMENT for number in (offset, memory.nbytes, memory.data_ptr())):
            raise ValueError(
                f"a transfer of {memory.nbytes} bytes at {offset} is not aligned to {FILE_ALIGNMENT} bytes"
            )
        self._next += 1
        # The reference keeps the memory until the kernel no longer uses it.
        self._pending[self._next] = memory
        self.moved[file, kind] += memory.nbytes
        writes = int(kind == "write")
        self._functions.queue_start(self._queue, self._next, file, writes, memory.data_ptr(), memory.nbytes, offset)
        return self._next

    def _open(self, interface: Interface, depth: int, piece: int) -> int:
        opened = torch.zeros(2, dtype=torch.int64)
        self._functions.queue_open(depth, piece, int(interface == "aio"), opened.data_ptr())
        queue, code = opened.tolist()
        if not queue:
            raise OSError(code or errno.ENOSYS, f"{interface}: {os.strerror(code or errno.ENOSYS)}")
        return int(queue)


@functools.cache
def _functions() -> SimpleNamespace:
    found = native_functions("direct_io", queue_open="lllp", queue_start="plllpll", queue_finish="plp", queue_close="p")
    if found is None:
        raise RuntimeError(native_reason(("direct_io",)))
    return found
