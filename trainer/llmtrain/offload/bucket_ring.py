"""Buckets of states that pass through memory: read ahead, stepped, and written behind."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from llmtrain_kernels.direct_io.queue import DirectQueue, aligned_bytes
from torch import Tensor

from llmtrain.offload.striped_file import StripedFile
from llmtrain.plan.gradient_buckets import Move

Transfers = list[tuple[int, int]]


@dataclass
class _Slot:
    memory: Tensor
    bucket: int = -1
    read: Transfers = field(default_factory=list)
    write: Transfers = field(default_factory=list)


class BucketRing:
    """The buckets of a file, taken in the order of `moves`, again and again. Memory: `slots` buckets of the largest
    size.

    waited: seconds that calls have waited for transfers. Bucket number n of all that are ever taken passes
    through slot n modulo the number of slots. While it is in use, the next `ahead` are read, and those before it are
    written.
    """

    def __init__(
        self, file: StripedFile, queue: DirectQueue, sizes: Sequence[int], moves: Sequence[Move], slots: int, ahead: int
    ) -> None:
        """sizes: bytes of each bucket."""
        self._file, self._queue, self._sizes, self._moves = file, queue, sizes, moves
        self._ahead = min(ahead, slots - 1)
        memory = aligned_bytes(slots * max(sizes, default=0))
        self._slots = [_Slot(one) for one in memory.split(max(sizes, default=1))]
        # Counts of buckets ever taken, and ever read.
        self._taken = self._started = 0
        self.waited = 0.0

    def take(self, bucket: int) -> Tensor:
        """Return a bucket's bytes, which may change until it is put back; uninitialized if its move does not read
        it."""
        if self._move(self._taken).bucket != bucket:
            raise RuntimeError(f"bucket {bucket} is taken, but the step's next move is {self._move(self._taken)}")
        while self._started <= self._taken + self._ahead and not self._changes_before(self._started):
            self._start(self._started)
            self._started += 1
        slot = self._slots[self._taken % len(self._slots)]
        self._finish(slot.read)
        return slot.memory[: self._sizes[bucket]]

    def put(self, bucket: int) -> None:
        """Start to write the bucket that was taken last, if its move writes it."""
        slot = self._slots[self._taken % len(self._slots)]
        if self._move(self._taken).writes:
            slot.write = self._file.start_write(self._queue, bucket, slot.memory[: self._sizes[bucket]])
        self._taken += 1

    def begin(self) -> None:
        """Go to the first move, if the last pass through all moves is not complete."""
        if self._taken % len(self._moves):
            self._restart(0)

    @property
    def nbytes(self) -> int:
        """Bytes of the slots."""
        return sum(slot.memory.nbytes for slot in self._slots)

    def _move(self, count: int) -> Move:
        return self._moves[count % len(self._moves)]

    def _changes_before(self, count: int) -> bool:
        """Whether a bucket to be read changes in a move that is not complete."""
        moves = (self._move(place) for place in range(self._taken, count))
        return any(move.writes and move.bucket == self._move(count).bucket for move in moves)

    def _start(self, count: int) -> None:
        move, slot = self._move(count), self._slots[count % len(self._slots)]
        self._finish(slot.write)
        slot.bucket = move.bucket
        if not move.reads:
            return
        for other in self._slots:
            if other.bucket == move.bucket:
                self._finish(other.write)
        slot.read = self._file.start_read(self._queue, move.bucket, slot.memory[: self._sizes[move.bucket]])

    def _restart(self, place: int) -> None:
        for slot in self._slots:
            self._finish(slot.write)
            self._finish(slot.read)
        # The next count of this place: counts go on, because they choose the slots.
        self._taken += (place - self._taken) % len(self._moves)
        self._started = self._taken

    def _finish(self, transfers: Transfers) -> None:
        """Wait for transfers, and forget them."""
        started, waiting = time.perf_counter(), transfers[:]
        transfers.clear()
        self._file.finish(self._queue, waiting)
        self.waited += time.perf_counter() - started
