"""Stores for offloaded group inputs: in the host's memory, or in files."""

from collections import deque
from collections.abc import Sequence
from math import prod
from typing import Protocol

import torch
from llmtrain_kernels.direct_io.queue import DirectQueue
from torch import Tensor

from llmtrain.comm.pinned_memory import aligned_host_bytes, host_zeros
from llmtrain.offload.striped_file import StripedFile
from llmtrain.offload.usage import LinkCount, TierUsage
from llmtrain.plan.activation_offload import ActivationMoves
from llmtrain.plan.per_rank.rank_activations import in_pages


class ActivationStore(Protocol):
    """Regions that hold a group input each. Group inputs come back in the order in which their reads start.

    link: counts what is copied between it and a GPU.
    """

    link: LinkCount

    def destination(self, region: int) -> Tensor:
        """Return host memory, `[batch, sequence, hidden]` of the compute dtype, for the group input of a region."""

    def put(self, region: int) -> None:
        """Report that `destination` has the group input."""

    def fetch(self, region: int) -> None:
        """Start to read a region."""

    def take(self, region: int) -> Tensor:
        """Return the group input that was fetched first, in host memory, of the shape and dtype of `destination`. It is
        valid until INPUTS_AHEAD more are fetched and one is taken."""

    def usage(self) -> TierUsage:
        """Return the usage since the start."""

    def close(self) -> None:
        """Free the memory."""

    @property
    def nbytes(self) -> int:
        """Bytes of the host's memory."""


class HostActivations:
    """Group inputs in the host's memory; pinned, so that a GPU copies from and to it directly, if `pinned`."""

    def __init__(self, moves: ActivationMoves, shape: Sequence[int], dtype: torch.dtype, pinned: bool) -> None:
        self.link = LinkCount()
        numel = moves.regions * prod(shape)
        memory = host_zeros(numel, dtype, pinned) if pinned else torch.empty(numel, dtype=dtype)
        self._memory = memory.view(moves.regions, *shape)
        self._read = self._written = 0

    def destination(self, region: int) -> Tensor:
        """See ActivationStore."""
        return self._memory[region]

    def put(self, region: int) -> None:
        """See ActivationStore."""
        self._written += self._memory[region].nbytes

    def fetch(self, region: int) -> None:
        """See ActivationStore. The region is in memory."""

    def take(self, region: int) -> Tensor:
        """See ActivationStore."""
        self._read += self._memory[region].nbytes
        return self._memory[region]

    def usage(self) -> TierUsage:
        """See ActivationStore."""
        return TierUsage(read={"host": self._read}, written={"host": self._written}).with_link(self.link)

    def close(self) -> None:
        """See ActivationStore."""

    @property
    def nbytes(self) -> int:
        """Bytes of all regions."""
        return self._memory.nbytes


class FileActivations:
    """Group inputs in files, which pass through slots of the host's memory: written behind the forward pass, read ahead
    of the backward pass."""

    def __init__(
        self, moves: ActivationMoves, shape: Sequence[int], dtype: torch.dtype, file: StripedFile, pinned: bool
    ) -> None:
        """file: has a region of whole pages for each region of `moves`. pinned: whether the slots are."""
        self.link = LinkCount()
        self._file, self._queue, self._shape, self._dtype = file, DirectQueue(), shape, dtype
        self._used = prod(shape) * dtype.itemsize
        size = in_pages(self._used)
        self._slots = aligned_host_bytes((moves.write_slots + moves.read_slots) * size, pinned).split(size)
        self._writes, self._reads = moves.write_slots, moves.read_slots
        # Counts of group inputs that were ever written, and of which reads ever started.
        self._written = self._fetched = 0
        # Transfers by region, and the region that each slot was last written to.
        self._writing: dict[int, list[tuple[int, int]]] = {}
        self._written_to: dict[int, int] = {}
        self._coming: deque[tuple[int, Tensor, list[tuple[int, int]]]] = deque()

    def destination(self, region: int) -> Tensor:
        """See ActivationStore."""
        slot = self._written % self._writes
        if slot in self._written_to:
            self._file.finish(self._queue, self._writing.pop(self._written_to[slot], []))
        return self._as_group_input(self._slots[slot])

    def put(self, region: int) -> None:
        """See ActivationStore."""
        slot = self._written % self._writes
        self._writing[region] = self._file.start_write(self._queue, region, self._slots[slot])
        self._written_to[slot] = region
        self._written += 1

    def fetch(self, region: int) -> None:
        """See ActivationStore. Waits until the region has been written."""
        self._file.finish(self._queue, self._writing.pop(region, []))
        slot = self._slots[self._writes + self._fetched % self._reads]
        self._coming.append((region, self._as_group_input(slot), self._file.start_read(self._queue, region, slot)))
        self._fetched += 1

    def take(self, region: int) -> Tensor:
        """See ActivationStore."""
        fetched, group_input, transfers = self._coming.popleft()
        assert fetched == region
        self._file.finish(self._queue, transfers)
        return group_input

    def usage(self) -> TierUsage:
        """See ActivationStore."""
        return self._file.usage(self._queue).with_link(self.link)

    def close(self) -> None:
        """See ActivationStore. Waits for the transfers that run."""
        self._queue.close()
        self._file.close()

    @property
    def nbytes(self) -> int:
        """Bytes of the slots."""
        return sum(slot.nbytes for slot in self._slots)

    def _as_group_input(self, slot: Tensor) -> Tensor:
        return slot[: self._used].view(self._dtype).view(*self._shape)
