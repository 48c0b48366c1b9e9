"""Memory for buckets of optimizer states outside of the device: the host's memory, or files."""

import threading
from collections.abc import Sequence
from typing import Protocol

import torch
from llmtrain_kernels.direct_io.queue import ALIGNMENT, DirectQueue, aligned_bytes
from torch import Tensor

from llmtrain.offload.bucket_ring import BucketRing
from llmtrain.offload.striped_file import StripedFile
from llmtrain.offload.usage import TierUsage
from llmtrain.plan.gradient_buckets import Move
from llmtrain.plan.offload import READ_AHEAD, Bucket, slots


class StateTier(Protocol):
    """Holds fp32 states of buckets; they are taken to be stepped one after the other, again and again."""

    def begin(self) -> None:
        """Begin a step: what is taken next is its first bucket."""

    def take(self, bucket: int) -> Tensor:
        """Return the states of a bucket in the host's memory, fp32 `[states, n]`, which may change until `put`."""

    def put(self, bucket: int) -> None:
        """Give back the bucket that was taken last, with what changed."""

    def read(self, bucket: int, state: int, start: int, end: int) -> Tensor:
        """Return the elements `[start, end)` of one state: fp32, valid until it changes."""

    def write(self, bucket: int, state: int, start: int, values: Tensor) -> None:
        """Set the elements of one state from `start` on to `values`: of any float dtype, on any device."""

    def close(self) -> None:
        """Free the memory."""

    def usage(self) -> TierUsage:
        """Return what has been moved since the start."""

    @property
    def nbytes(self) -> int:
        """Bytes of the host's memory."""


class HostTier:
    """States in the host's memory; pinned, so that a GPU copies from and to it directly, if `pinned`."""

    def __init__(self, buckets: Sequence[Bucket], pinned: bool) -> None:
        sizes = [bucket.states * (bucket.end - bucket.start) for bucket in buckets]
        self._memory = torch.zeros(sum(sizes), pin_memory=pinned)
        parts = self._memory.split(sizes)
        self._states = [part.view(bucket.states, -1) for part, bucket in zip(parts, buckets, strict=True)]

    def begin(self) -> None:
        """See StateTier."""

    def take(self, bucket: int) -> Tensor:
        """See StateTier."""
        return self._states[bucket]

    def put(self, bucket: int) -> None:
        """See StateTier."""

    def read(self, bucket: int, state: int, start: int, end: int) -> Tensor:
        """See StateTier."""
        return self._states[bucket][state, start:end]

    def write(self, bucket: int, state: int, start: int, values: Tensor) -> None:
        """See StateTier."""
        self._states[bucket][state, start : start + values.numel()].copy_(values)

    def close(self) -> None:
        """See StateTier."""

    def usage(self) -> TierUsage:
        """See StateTier. Nothing moves."""
        return TierUsage()

    @property
    def nbytes(self) -> int:
        """Bytes of all states."""
        return self._memory.nbytes


class FileTier:
    """States in files, which pass through slots of the host's memory (ZeRO-Infinity, section 6.3).

    Any thread may read; the others' calls come from the thread that steps. A read waits for the writes before it.
    """

    def __init__(
        self, buckets: Sequence[Bucket], paths: Sequence[str], weights: Sequence[float] = (), moves: Sequence[Move] = ()
    ) -> None:
        """weights: relative bandwidths of the volumes; equal by default. moves: of one step; by default each bucket is
        read and written, in order.

        Raises RunFailedError if a volume has too little space, or cannot be used."""
        self._buckets, self._lock = buckets, threading.RLock()
        sizes = [bucket.nbytes for bucket in buckets]
        self._file, self._queue = StripedFile(paths, sizes, weights), DirectQueue()
        moves = moves or [Move(number) for number in range(len(sizes))]
        self._ring = BucketRing(self._file, self._queue, sizes, moves, slots(len(sizes)), READ_AHEAD)
        self._staging = aligned_bytes(max(bucket.part for bucket in buckets))

    def begin(self) -> None:
        """See StateTier."""
        with self._lock:
            self._ring.begin()

    def take(self, bucket: int) -> Tensor:
        """See StateTier."""
        held = self._buckets[bucket]
        with self._lock:
            states = self._ring.take(bucket).view(torch.float32).view(held.states, -1)
        return states[:, : held.end - held.start]

    def put(self, bucket: int) -> None:
        """See StateTier."""
        with self._lock:
            self._ring.put(bucket)

    def read(self, bucket: int, state: int, start: int, end: int) -> Tensor:
        """See StateTier; the copy is the caller's."""
        first, last = 4 * start // ALIGNMENT * ALIGNMENT, -(-4 * end // ALIGNMENT) * ALIGNMENT
        into = aligned_bytes(last - first)
        self.settle()
        self._file.read(bucket, state * self._buckets[bucket].part + first, into)
        return into.view(torch.float32)[start - first // 4 : end - first // 4]

    def write(self, bucket: int, state: int, start: int, values: Tensor) -> None:
        """See StateTier."""
        part, place = self._buckets[bucket].part, state * self._buckets[bucket].part
        with self._lock:
            self._ring.forget()
            staged = self._staging[:part]
            if 4 * values.numel() < part:
                self._file.read(bucket, place, staged)
            staged.view(torch.float32)[start : start + values.numel()].copy_(values)
            self._file.write(bucket, place, staged)

    def usage(self) -> TierUsage:
        """See StateTier. Reads that `read` makes and writes that `write` makes are not counted."""
        moved = self._file.moved(self._queue)
        read, written = ({path: counts[way] for path, counts in moved.items()} for way in (0, 1))
        return TierUsage(read, written, self._ring.waited)

    def settle(self) -> None:
        """Wait until the files have all that was put back."""
        with self._lock:
            self._ring.flush()

    def close(self) -> None:
        """See StateTier. Waits for the transfers that run."""
        self._queue.close()
        self._file.close()

    @property
    def nbytes(self) -> int:
        """Bytes of the slots and of the staging buffer."""
        return self._ring.nbytes + self._staging.nbytes
