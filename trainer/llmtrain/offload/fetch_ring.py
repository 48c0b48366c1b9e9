"""Buckets of states that pass through memory in any order: read ahead, stepped, and written behind."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from llmtrain_kernels.direct_io.queue import DirectQueue
from torch import Tensor

from llmtrain.comm.pinned_memory import aligned_host_bytes
from llmtrain.offload.striped_file import StripedFile

Transfers = list[tuple[int, int]]


@dataclass
class _Slot:
    """region: what its memory is written to."""

    memory: Tensor
    read: Transfers = field(default_factory=list)
    write: Transfers = field(default_factory=list)
    region: int = -1
    nbytes: int = 0


class FetchRing:
    """Regions of a file that pass through slots, in the order in which they are fetched. Memory: `slots` regions of the
    largest size.

    Region number n of all that are ever fetched passes through slot n modulo the number of slots. At most `slots` are
    fetched and not put back.
    """

    def __init__(self, file: StripedFile, queue: DirectQueue, sizes: Sequence[int], slots: int, pinned: bool) -> None:
        """sizes: bytes of each region. pinned: whether a GPU copies from and to the slots."""
        self._file, self._queue, self._sizes = file, queue, sizes
        memory = aligned_host_bytes(slots * max(sizes, default=0), pinned)
        self._slots = [_Slot(one) for one in memory.split(max(sizes, default=1))]
        # Counts of regions ever fetched, ever taken, and ever put back.
        self._fetched = self._taken = self._put = 0

    def fetch(self, region: int, reads: bool = True) -> None:
        """Start to read a region, after earlier writes to it. reads: False reserves a slot and reads nothing."""
        slot = self._slots[self._fetched % len(self._slots)]
        for one in self._slots:
            if one is slot or one.region == region:
                self._finish(one.write)
        slot.nbytes = self._sizes[region]
        slot.read = self._file.start_read(self._queue, region, slot.memory[: slot.nbytes]) if reads else []
        self._fetched += 1

    def take(self) -> Tensor:
        """Return the region that was fetched first and is not taken, as uint8 `[nbytes]`. The caller may change it
        until it is put back."""
        slot = self._slots[self._taken % len(self._slots)]
        self._finish(slot.read)
        self._taken += 1
        return slot.memory[: slot.nbytes]

    def put(self, region: int, writes: bool = True) -> None:
        """Put back the region that was taken first and is still held: start to write it to `region`, its own or another
        one of the same size. writes: False frees the slot and writes nothing."""
        slot = self._slots[self._put % len(self._slots)]
        if writes:
            slot.write, slot.region = self._file.start_write(self._queue, region, slot.memory[: slot.nbytes]), region
        self._put += 1

    def forget(self) -> None:
        """Forget what was fetched and not taken."""
        for slot in self._slots:
            self._finish(slot.read)
        self._fetched = self._taken = self._put

    def flush(self) -> None:
        """Wait until the file has all that was put back."""
        for slot in self._slots:
            self._finish(slot.write)

    @property
    def nbytes(self) -> int:
        """Bytes of the slots."""
        return sum(slot.memory.nbytes for slot in self._slots)

    def _finish(self, transfers: Transfers) -> None:
        """Wait for transfers, and forget them."""
        waiting = transfers[:]
        transfers.clear()
        self._file.finish(self._queue, waiting)
