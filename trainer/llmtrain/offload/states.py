"""Optimizer states outside of the device, bucket by bucket: in the host's memory, or in files."""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from llmtrain_kernels.direct_io.queue import DirectQueue, aligned_bytes
from torch import Tensor

from llmtrain.comm.pinned_memory import host_zeros
from llmtrain.offload.fetch_ring import FetchRing
from llmtrain.offload.striped_file import StripedFile
from llmtrain.offload.usage import TierUsage
from llmtrain.plan.offload import OVERLAP, PARTS, Bucket, bucket_slots


class StateStore(Protocol):
    """Holds fp32 states of buckets. Those with spare memory have two regions: a step ahead leaves the current one as it
    is and writes the other one, which `commit` makes the current one."""

    def fetch(self, bucket: int) -> None:
        """Start to bring the states of a bucket. Buckets are taken and put back in this order."""

    def take(self, bucket: int, ahead: bool) -> tuple[Tensor, Tensor]:
        """Return the states of a bucket, fp32 `[states, n]` in the host's memory, and the memory to write the new ones
        to, which may be the same memory. Both are valid until `put`. ahead: whether the current region keeps the old
        states."""

    def put(self, bucket: int, ahead: bool) -> None:
        """Give back a bucket with its new states."""

    def commit(self, bucket: int) -> None:
        """Make the region that a step ahead has written the current one."""

    def start_read(self, bucket: int, state: int, start: int, end: int) -> Callable[[], Tensor]:
        """Start to bring the elements `[start, end)` of one state; return what waits for them and returns them: fp32,
        valid until the state changes."""

    def write(self, bucket: int, state: int, start: int, values: Tensor) -> None:
        """Set the elements of one state from `start` on to `values`, `[n]` of any float dtype, on any device."""

    def close(self) -> None:
        """Free the memory."""

    def usage(self) -> TierUsage:
        """Return the usage since the start."""

    @property
    def nbytes(self) -> int:
        """Bytes of the host's memory."""


class Regions:
    """Which region has the current states of each bucket: its own, which has the bucket's number, or its spare one."""

    def __init__(self, buckets: Sequence[Bucket]) -> None:
        spare = [number for number, bucket in enumerate(buckets) if bucket.spare]
        self._regions = [[number] for number in range(len(buckets))]
        for index, number in enumerate(spare):
            self._regions[number].append(len(buckets) + index)
        self.buckets = [*buckets, *(buckets[number] for number in spare)]

    def current(self, bucket: int) -> int:
        """Return the region with the current states."""
        return self._regions[bucket][0]

    def written(self, bucket: int, ahead: bool) -> int:
        """Return the region that a step writes."""
        return self._regions[bucket][1 if ahead else 0]

    def flip(self, bucket: int) -> None:
        """Make the other region the current one."""
        self._regions[bucket].reverse()


class HostStates:
    """States in the host's memory; pinned, so that a GPU copies from and to it directly, if `pinned`. Several threads
    may take different buckets at the same time."""

    def __init__(self, buckets: Sequence[Bucket], pinned: bool) -> None:
        self._regions = Regions(buckets)
        sizes = [bucket.states * (bucket.end - bucket.start) for bucket in self._regions.buckets]
        self._memory = host_zeros(sum(sizes), torch.float32, pinned)
        parts = zip(self._memory.split(sizes), self._regions.buckets, strict=True)
        self._states = [part.view(bucket.states, -1) for part, bucket in parts]

    def fetch(self, bucket: int) -> None:
        """See StateStore."""

    def take(self, bucket: int, ahead: bool) -> tuple[Tensor, Tensor]:
        """See StateStore."""
        return self._states[self._regions.current(bucket)], self._states[self._regions.written(bucket, ahead)]

    def put(self, bucket: int, ahead: bool) -> None:
        """See StateStore."""

    def commit(self, bucket: int) -> None:
        """See StateStore."""
        self._regions.flip(bucket)

    def start_read(self, bucket: int, state: int, start: int, end: int) -> Callable[[], Tensor]:
        """See StateStore."""
        values = self._states[self._regions.current(bucket)][state, start:end]
        return lambda: values

    def write(self, bucket: int, state: int, start: int, values: Tensor) -> None:
        """See StateStore."""
        states = self._states[self._regions.current(bucket)]
        states[state, start : start + values.numel()].copy_(values)

    def close(self) -> None:
        """See StateStore."""

    def usage(self) -> TierUsage:
        """See StateStore. Nothing moves."""
        return TierUsage()

    @property
    def nbytes(self) -> int:
        """Bytes of all states."""
        return self._memory.nbytes


class FileStates:
    """States in files, which pass through slots of the host's memory (ZeRO-Infinity, section 6.3).

    Any thread may read. One thread fetches, takes and puts; another one commits what is put. Writes come while no
    bucket is stepped, from one thread; up to PARTS of them are on their way. A read, or a fetch, waits for the writes
    before it.
    """

    def __init__(
        self, buckets: Sequence[Bucket], paths: Sequence[str], bandwidths: Sequence[float] = (), overlap: int = OVERLAP,
        pinned: bool = False,
    ) -> None:  # fmt: skip
        """bandwidths: those of the volumes, relative; equal by default. overlap: most buckets that are fetched while
        one is taken. pinned: whether a GPU steps them, and copies from and to the slots.

        Raises RunFailedError if a volume has too little space, or cannot be used."""
        self._buckets, self._lock, self._regions = buckets, threading.RLock(), Regions(buckets)
        sizes = [bucket.nbytes for bucket in self._regions.buckets]
        self._file, self._queue = StripedFile(paths, sizes, bandwidths), DirectQueue()
        self._ring = FetchRing(self._file, self._queue, sizes, bucket_slots(len(buckets), overlap), pinned)
        part = max(bucket.part for bucket in buckets)
        self._stagings = deque(aligned_bytes(PARTS * part).split(part))
        self._writes = deque[Callable[[], None]]()

    def fetch(self, bucket: int) -> None:
        """See StateStore."""
        with self._lock:
            self._finish_writes()
            self._ring.fetch(self._regions.current(bucket))

    def take(self, bucket: int, ahead: bool) -> tuple[Tensor, Tensor]:
        """See StateStore."""
        taken = self._buckets[bucket]
        with self._lock:
            states = self._ring.take().view(torch.float32).view(taken.states, -1)
        inside = states[:, : taken.end - taken.start]
        return inside, inside

    def put(self, bucket: int, ahead: bool) -> None:
        """See StateStore."""
        with self._lock:
            self._ring.put(self._regions.written(bucket, ahead))

    def commit(self, bucket: int) -> None:
        """See StateStore."""
        self._regions.flip(bucket)

    def start_read(self, bucket: int, state: int, start: int, end: int) -> Callable[[], Tensor]:
        """See StateStore; the copy is the caller's."""
        self.flush()
        region, offset = self._regions.current(bucket), state * self._buckets[bucket].part
        return self._file.elements(region, offset, torch.float32, start, end)

    def write(self, bucket: int, state: int, start: int, values: Tensor) -> None:
        """See StateStore."""
        part, offset = self._buckets[bucket].part, state * self._buckets[bucket].part
        region = self._regions.current(bucket)
        with self._lock:
            self._ring.flush()
            # The staging that is taken next is that of the oldest write.
            self._finish_writes(left=PARTS - 1)
            staged = self._stagings[0][:part]
            self._stagings.rotate(-1)
            if 4 * values.numel() < part:
                self._finish_writes()
                self._file.reading(region, offset, staged)()
            staged.view(torch.float32)[start : start + values.numel()].copy_(values)
            self._writes.append(self._file.writing(region, offset, staged))

    def usage(self) -> TierUsage:
        """See StateStore. Reads of `start_read` and writes of `write` are not counted."""
        return self._file.usage(self._queue)

    def flush(self) -> None:
        """Wait until the files have all that was put back or written."""
        with self._lock:
            self._ring.flush()
            self._finish_writes()

    def close(self) -> None:
        """See StateStore. Waits for the transfers that run."""
        self._queue.close()
        self._file.close()

    @property
    def nbytes(self) -> int:
        """Bytes of the slots and of the staging buffers."""
        return self._ring.nbytes + sum(staging.nbytes for staging in self._stagings)

    def _finish_writes(self, left: int = 0) -> None:
        """Wait for the oldest writes, until at most `left` are on their way."""
        while len(self._writes) > left:
            self._writes.popleft()()
