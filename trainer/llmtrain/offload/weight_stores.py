"""Memory for weight shards outside of the device: the host's memory, or files."""

from collections.abc import Mapping

import torch
from llmtrain_kernels.direct_io.queue import ALIGNMENT, DirectQueue, aligned_bytes
from torch import Tensor

from llmtrain.offload.striped_file import StripedFile
from llmtrain.offload.usage import LinkCount, TierUsage


class HostWeights:
    """Weight shards in the host's memory; pinned, so that a GPU copies from and to it directly, if `pinned`. See
    WeightStore."""

    def __init__(self, sizes: Mapping[str, int], dtype: torch.dtype, pinned: bool) -> None:
        """sizes: elements of each unit's shard."""
        self._pinned, self._link = pinned, LinkCount()
        memory = torch.zeros(sum(sizes.values()), dtype=dtype, pin_memory=pinned)
        self._shards = dict(zip(sizes, memory.split(list(sizes.values())), strict=True))
        self.nbytes, self._pinned = memory.nbytes, pinned

    def load(self, unit: str, into: Tensor) -> None:
        """See WeightStore."""
        into.copy_(self._shards[unit], non_blocking=True)
        self._link.to_device += into.nbytes if self._pinned else 0

    def store(self, unit: str, values: Tensor) -> None:
        """See WeightStore."""
        self._shards[unit].copy_(values, non_blocking=True)
        self._link.to_host += values.nbytes if self._pinned else 0

    def read(self, unit: str, start: int, end: int) -> Tensor:
        """See WeightStore."""
        if self._pinned:
            # Writes are done in the order of the current stream, for which the host has not waited.
            torch.cuda.current_stream().synchronize()
        return self._shards[unit][start:end]

    def usage(self) -> TierUsage:
        """Return what was moved: nothing passes through files."""
        return TierUsage().with_link(self._link)

    def close(self) -> None:
        """Do nothing: the memory is freed with its last reference."""


class FileWeights:
    """Weight shards in files, striped over volumes. See WeightStore.

    A CPU reads them into the memory that computes. For a GPU they pass through a pinned buffer for each direction.
    """

    def __init__(
        self, sizes: Mapping[str, int], dtype: torch.dtype, pinned: bool, paths: tuple[str, ...],
        weights: tuple[float, ...],
    ) -> None:  # fmt: skip
        """sizes: elements of each unit's shard, whole pages. pinned: whether a GPU computes. weights: relative
        bandwidths of the volumes. Raises RunFailedError."""
        self._link = LinkCount()
        self._regions = {unit: place for place, unit in enumerate(sizes)}
        self._dtype = dtype
        self._file = StripedFile(paths, [numel * dtype.itemsize for numel in sizes.values()], weights)
        self._reads, self._writes = DirectQueue(), DirectQueue()
        largest = max(sizes.values(), default=0) if pinned else 0
        self._coming, self._going = (torch.empty(largest, dtype=dtype, pin_memory=pinned) for _ in range(2))

    def load(self, unit: str, into: Tensor) -> None:
        """See WeightStore."""
        memory = self._coming[: into.numel()] if len(self._coming) else into
        transfers = self._file.start_read(self._reads, self._regions[unit], memory.view(torch.uint8))
        self._file.finish(self._reads, transfers)
        if memory is not into:
            into.copy_(memory)
            self._link.to_device += into.nbytes

    def store(self, unit: str, values: Tensor) -> None:
        """See WeightStore."""
        memory = self._going[: values.numel()].copy_(values) if len(self._going) else values
        self._link.to_host += 0 if memory is values else values.nbytes
        transfers = self._file.start_write(self._writes, self._regions[unit], memory.view(torch.uint8))
        self._file.finish(self._writes, transfers)

    def read(self, unit: str, start: int, end: int) -> Tensor:
        """See WeightStore; the copy is the caller's. It is not counted in `usage`."""
        size = self._dtype.itemsize
        first, last = start * size // ALIGNMENT * ALIGNMENT, -(-end * size // ALIGNMENT) * ALIGNMENT
        into = aligned_bytes(last - first)
        self._file.read(self._regions[unit], first, into)
        return into.view(self._dtype)[start - first // size : end - first // size]

    def usage(self) -> TierUsage:
        """Return what was moved."""
        read = {path: counts[0] for path, counts in self._file.moved(self._reads).items()}
        written = {path: counts[1] for path, counts in self._file.moved(self._writes).items()}
        return TierUsage(read, written, waits=self._file.waits).with_link(self._link)

    def close(self) -> None:
        """Free the files. No stream uses them any more."""
        self._reads.close()
        self._writes.close()
        self._file.close()

    @property
    def nbytes(self) -> int:
        """Bytes of the host's memory."""
        return self._coming.nbytes + self._going.nbytes
