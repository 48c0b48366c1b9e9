"""Buckets of states that pass through memory: read ahead, stepped, and written behind."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from llmtrain_kernels.direct_io.queue import DirectQueue, aligned_bytes
from torch import Tensor

from llmtrain.offload.striped_file import StripedFile

Transfers = list[tuple[int, int]]


@dataclass
class _Slot:
    memory: Tensor
    read: Transfers = field(default_factory=list)
    write: Transfers = field(default_factory=list)


class BucketRing:
    """The buckets of a file, taken in order, again and again. Memory: `slots` buckets of the largest size.

    waited: seconds that `take` and `flush` have waited for transfers. Bucket number n of all that are ever taken passes
    through slot n modulo the number of slots. While it is in use, the next `ahead` are read, and those before it are
    written.
    """

    def __init__(self, file: StripedFile, queue: DirectQueue, sizes: Sequence[int], slots: int, ahead: int) -> None:
        """sizes: bytes of each bucket."""
        self._file, self._queue, self._sizes = file, queue, sizes
        self._ahead = min(ahead, slots - 1)
        memory = aligned_bytes(slots * max(sizes, default=0))
        self._slots = [_Slot(one) for one in memory.split(max(sizes, default=1))]
        # Counts of buckets ever taken, and ever read.
        self._taken = self._started = 0
        self.waited = 0.0

    def take(self, bucket: int) -> Tensor:
        """Return a bucket's bytes, which may change until it is put back."""
        if self._taken % len(self._sizes) != bucket:
            self._restart(bucket)
        while self._started <= self._taken + self._ahead:
            self._start(self._started)
            self._started += 1
        slot = self._slots[self._taken % len(self._slots)]
        self._finish(slot.read)
        return slot.memory[: self._sizes[bucket]]

    def put(self, bucket: int) -> None:
        """Start to write the bucket that was taken last."""
        slot = self._slots[self._taken % len(self._slots)]
        slot.write = self._file.start_write(self._queue, bucket, slot.memory[: self._sizes[bucket]])
        self._taken += 1

    def flush(self) -> None:
        """Wait until the file has all that was put back."""
        for slot in self._slots:
            self._finish(slot.write)

    def forget(self) -> None:
        """Forget what was read ahead, because the file changes."""
        self._restart(self._taken % len(self._sizes))

    @property
    def nbytes(self) -> int:
        """Bytes of the slots."""
        return sum(slot.memory.nbytes for slot in self._slots)

    def _start(self, count: int) -> None:
        bucket, slot = count % len(self._sizes), self._slots[count % len(self._slots)]
        self._finish(slot.write)
        slot.read = self._file.start_read(self._queue, bucket, slot.memory[: self._sizes[bucket]])

    def _restart(self, bucket: int) -> None:
        self.flush()
        for slot in self._slots:
            self._finish(slot.read)
        # The next count of this bucket: counts go on, because they choose the slots.
        self._taken += (bucket - self._taken) % len(self._sizes)
        self._started = self._taken

    def _finish(self, transfers: Transfers) -> None:
        """Wait for transfers, and forget them."""
        started, waiting = time.perf_counter(), transfers[:]
        transfers.clear()
        self._file.finish(self._queue, waiting)
        self.waited += time.perf_counter() - started
