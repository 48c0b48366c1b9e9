"""Memory for weight shards outside of the device: the host's memory, or files."""

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

import torch
from llmtrain_kernels.direct_io.queue import DirectQueue
from torch import Tensor

from llmtrain.comm.pinned_memory import aligned_host_bytes, host_zeros
from llmtrain.offload.striped_file import StripedFile
from llmtrain.offload.usage import LinkCount, TierUsage
from llmtrain.plan.per_rank.rank_activations import in_pages

# Bytes of the parts in which a shard passes through the host's memory, of files.
_PART = 8 * 2**20


class HostWeights:
    """Weight shards in the host's memory; pinned, so that a GPU copies from and to it directly, if `pinned`. See
    WeightStore. shards: by unit."""

    def __init__(self, sizes: Mapping[str, int], dtype: torch.dtype, pinned: bool) -> None:
        """sizes: elements of each unit's shard."""
        self._pinned, self._link = pinned, LinkCount()
        memory = host_zeros(sum(sizes.values()), dtype, pinned)
        self.shards = dict(zip(sizes, memory.split(list(sizes.values())), strict=True))
        self.nbytes = memory.nbytes

    def load(self, unit: str, into: Tensor) -> None:
        """See WeightStore."""
        into.copy_(self.shards[unit], non_blocking=True)
        self._link.to_device += into.nbytes if self._pinned else 0

    def store(self, unit: str, values: Tensor) -> None:
        """See WeightStore."""
        self.shards[unit][: len(values)].copy_(values, non_blocking=True)
        self._link.to_host += values.nbytes if self._pinned else 0

    def read(self, unit: str, start: int, end: int) -> Tensor:
        """See WeightStore."""
        self.synchronize()
        return self.shards[unit][start:end]

    def synchronize(self) -> None:
        """See WeightStore."""
        if self._pinned:
            # Reads and writes are done in the order of the current stream, for which the host has not waited.
            torch.cuda.current_stream().synchronize()

    def usage(self) -> TierUsage:
        """Return what was moved: nothing passes through files."""
        return TierUsage().with_link(self._link)

    def close(self) -> None:
        """Do nothing: the memory is freed with its last reference."""


class Volumes(NamedTuple):
    """Where files lie. paths: a folder on each volume. bandwidths: those of the volumes, relative."""

    paths: tuple[str, ...]
    bandwidths: tuple[float, ...]


class FileWeights:
    """Weight shards in files, striped over volumes. See WeightStore.

    If `direct`, a CPU reads them into the memory that computes. Otherwise they pass through a buffer for each
    direction, in parts: one is copied to or from the device while the next ones are read or written.
    """

    def __init__(
        self, sizes: Mapping[str, int], dtype: torch.dtype, pinned: bool, volumes: Volumes, direct: bool
    ) -> None:
        """sizes: elements of each unit's shard; whole pages if `direct`. pinned: whether a GPU computes. Raises
        RunFailedError."""
        self._link, self._pinned, self._direct = LinkCount(), pinned, direct
        self._regions = {unit: index for index, unit in enumerate(sizes)}
        self._dtype = dtype
        regions = [in_pages(numel * dtype.itemsize) for numel in sizes.values()]
        self._file = StripedFile(volumes.paths, regions, volumes.bandwidths)
        self._reads, self._writes = DirectQueue(), DirectQueue()
        largest = 0 if direct else max(regions, default=0)
        self._coming, self._going = (aligned_host_bytes(largest, pinned) for _ in range(2))

    def load(self, unit: str, into: Tensor) -> None:
        """See WeightStore."""
        region, flat = self._regions[unit], into.view(torch.uint8)
        parts = self._parts(flat, self._coming)
        reads = [self._file.start_read(self._reads, region, memory, start) for start, memory in parts]
        for (start, memory), read in zip(parts, reads, strict=True):
            self._file.finish(self._reads, read)
            if not self._direct:
                end = min(start + memory.nbytes, flat.nbytes)
                flat[start:end].copy_(memory[: end - start], non_blocking=True)
        if self._pinned:
            # The next load reads into the same memory.
            torch.cuda.current_stream().synchronize()
            self._link.to_device += into.nbytes

    def store(self, unit: str, values: Tensor) -> None:
        """See WeightStore."""
        region, flat = self._regions[unit], values.view(torch.uint8)
        writes = []
        for start, memory in self._parts(flat, self._going):
            if not self._direct:
                end = min(start + memory.nbytes, flat.nbytes)
                memory[: end - start].copy_(flat[start:end])
            writes += self._file.start_write(self._writes, region, memory, start)
        self._link.to_host += values.nbytes if self._pinned else 0
        self._file.finish(self._writes, writes)

    def _parts(self, flat: Tensor, staging: Tensor) -> list[tuple[int, Tensor]]:
        """Return the first byte of each part of a shard, and the host's memory for it. flat: uint8, on the device."""
        if self._direct:
            return [(0, flat)]
        nbytes = in_pages(flat.nbytes)
        return [(start, staging[start : min(start + _PART, nbytes)]) for start in range(0, nbytes, _PART)]

    def read(self, unit: str, start: int, end: int) -> Tensor:
        """See WeightStore; the copy is the caller's. It is not counted in `usage`."""
        return self._file.elements(self._regions[unit], 0, self._dtype, start, end)()

    def synchronize(self) -> None:
        """See WeightStore. `load` and `store` wait for the device."""

    def usage(self) -> TierUsage:
        """Return what was moved. Steps do not wait for it, but the streams of weights."""
        return replace(self._file.usage(self._reads, self._writes), waited=0.0).with_link(self._link)

    def close(self) -> None:
        """Free the files. No stream uses them any more."""
        self._reads.close()
        self._writes.close()
        self._file.close()

    @property
    def nbytes(self) -> int:
        """Bytes of the host's memory."""
        return self._coming.nbytes + self._going.nbytes
