"""Memory outside of the device for buckets of gradient sums: the host's memory, or files."""

from collections import deque
from collections.abc import Sequence
from typing import Protocol

import torch
from llmtrain_kernels.direct_io.queue import DirectQueue
from torch import Tensor

from llmtrain.comm.pinned_memory import host_zeros
from llmtrain.comm.waits import Ticket
from llmtrain.offload.fetch_ring import FetchRing
from llmtrain.offload.move_ring import MoveRing
from llmtrain.offload.striped_file import StripedFile
from llmtrain.offload.usage import LinkCount, TierUsage
from llmtrain.plan.offload import READ_AHEAD, Bucket, bucket_slots
from llmtrain.plan.program.gradient_buckets import Move


class GradientTier(Protocol):
    """Holds fp32 buckets, which are taken in the order of the step's moves. One thread at a time calls its methods.

    link: counts what is copied between it and a GPU.
    """

    link: LinkCount

    def begin(self) -> None:
        """Begin a step: what is taken next is its first bucket."""

    def take(self, bucket: int) -> Tensor:
        """Return a bucket in the host's memory, fp32 `[n]`, which may change until `put`; uninitialized if its move
        does not read it."""

    def put(self, bucket: int, copied: bool = True, reader: Ticket | None = None) -> None:
        """Give back the bucket that was taken last. copied: False if the current stream of a GPU may still copy it.
        reader: ticket of what still reads it. It is waited for at the latest before the next step computes the gradient
        that takes its place; None if nothing does."""

    def usage(self) -> TierUsage:
        """Return the usage since the start."""

    def close(self) -> None:
        """Free the memory."""

    @property
    def nbytes(self) -> int:
        """Bytes of the host's memory."""


class HostGradients:
    """Buckets in the host's memory; pinned, so that a GPU copies from and to it directly, if `pinned`."""

    def __init__(self, buckets: Sequence[Bucket], pinned: bool) -> None:
        self.link = LinkCount()
        sizes = [bucket.numel for bucket in buckets]
        memory = host_zeros(sum(sizes), torch.float32, pinned)
        self._buckets, self.nbytes = memory.split(sizes), memory.nbytes

    def begin(self) -> None:
        """See GradientTier."""

    def take(self, bucket: int) -> Tensor:
        """See GradientTier."""
        return self._buckets[bucket]

    def put(self, bucket: int, copied: bool = True, reader: Ticket | None = None) -> None:
        """See GradientTier. What changes the bucket next comes after the passes of the next step on that stream."""

    def usage(self) -> TierUsage:
        """See GradientTier. Nothing moves."""
        return TierUsage().with_link(self.link)

    def close(self) -> None:
        """See GradientTier."""


class FileGradients:
    """Buckets in files, which pass through slots of the host's memory."""

    def __init__(
        self, buckets: Sequence[Bucket], paths: Sequence[str], bandwidths: Sequence[float], moves: Sequence[Move],
        pinned: bool,
    ) -> None:  # fmt: skip
        """bandwidths: those of the volumes, relative. moves: those of one step. pinned: whether a GPU copies from the
        slots.

        Raises RunFailedError if a volume has too little space, or cannot be used."""
        self.link = LinkCount()
        sizes = [bucket.nbytes for bucket in buckets]
        self._numel = [bucket.numel for bucket in buckets]
        self._file, self._queue = StripedFile(paths, sizes, bandwidths), DirectQueue()
        count = bucket_slots(len(sizes))
        self._ring = FetchRing(self._file, self._queue, sizes, count, pinned)
        ahead = min(READ_AHEAD, count - 1)
        self._moves = MoveRing(self._ring, moves, ahead)
        # Buckets that were put but that their reader may still use. They stay in the slots that are otherwise for
        # writes in flight: in this part of a step, buckets are only read.
        self._kept, self._most_kept = deque[tuple[int, Ticket]](), count - 1 - ahead

    def begin(self) -> None:
        """See GradientTier."""
        self._give_back(0)
        self._moves.begin()

    def take(self, bucket: int) -> Tensor:
        """See GradientTier."""
        return self._moves.take(bucket).view(torch.float32)[: self._numel[bucket]]

    def put(self, bucket: int, copied: bool = True, reader: Ticket | None = None) -> None:
        """See GradientTier. The slot is for another bucket once nothing reads it."""
        if not copied:
            torch.cuda.current_stream().synchronize()
        if reader is None:
            self._give_back(0)
            self._moves.put(bucket)
        else:
            self._kept.append((bucket, reader))
            self._give_back(self._most_kept)

    def usage(self) -> TierUsage:
        """See GradientTier."""
        return self._file.usage(self._queue).with_link(self.link)

    def close(self) -> None:
        """See GradientTier. Waits for the transfers that run."""
        self._queue.close()
        self._file.close()

    def _give_back(self, left: int) -> None:
        """Wait for readers, and give their buckets back, until as many are left."""
        while len(self._kept) > left:
            bucket, reader = self._kept.popleft()
            reader.wait()
            self._moves.put(bucket)

    @property
    def nbytes(self) -> int:
        """Bytes of the slots."""
        return self._ring.nbytes
