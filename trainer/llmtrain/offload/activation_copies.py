"""How inputs of recomputed groups reach the memory outside of the device, and how they come back."""

from collections import deque
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from llmtrain.comm.stalls import StreamStalls
from llmtrain.offload.activation_store import ActivationStore
from llmtrain.plan.per_rank.rank_activations import DEVICE_SLOTS


class ActivationCopies(Protocol):
    """Moves group inputs between the memory that computes and a store."""

    def save(self, values: Tensor, region: int) -> None:
        """Start to write a group input, `[batch, sequence, hidden]` of the compute dtype. It must not change, and its
        memory is kept, until `release` or the next `save`."""

    def release(self) -> None:
        """Release the group input that was saved last: its memory may be used again."""

    def fetch(self, region: int) -> None:
        """Start to read a group input back."""

    def advance(self) -> None:
        """Start to copy the group input that was fetched first, and is not taken, to the device."""

    def take(self, region: int) -> Tensor:
        """Return the group input that was fetched first, on the device, of the shape and dtype that was saved. It is
        valid until the next one is taken."""

    @property
    def waited(self) -> float:
        """Seconds that a GPU waited for group inputs."""


class CpuCopies:
    """A CPU computes: a group input is copied once, and used where it comes back."""

    waited = 0.0

    def __init__(self, store: ActivationStore) -> None:
        self._store = store

    def save(self, values: Tensor, region: int) -> None:
        """See ActivationCopies."""
        self._store.destination(region).copy_(values)
        self._store.put(region)

    def release(self) -> None:
        """See ActivationCopies."""

    def fetch(self, region: int) -> None:
        """See ActivationCopies."""
        self._store.fetch(region)

    def advance(self) -> None:
        """See ActivationCopies."""

    def take(self, region: int) -> Tensor:
        """See ActivationCopies."""
        return self._store.take(region)


class GpuCopies:
    """A GPU computes: group inputs are copied on a stream of their own for each direction.

    A group input is copied down while its group is computed. One comes up while the one before is used. The host waits
    for each copy when the next one starts, so that it runs at most a group ahead of the GPU.
    """

    def __init__(self, store: ActivationStore, device: torch.device, shape: Sequence[int], dtype: torch.dtype) -> None:
        self._store = store
        self._down, self._up = torch.cuda.Stream(device), torch.cuda.Stream(device)
        self._slots = torch.empty(DEVICE_SLOTS, *shape, dtype=dtype, device=device)
        self._went, self._came = torch.cuda.Event(), [torch.cuda.Event() for _ in range(DEVICE_SLOTS)]
        self._going: tuple[int, Tensor] | None = None
        # Regions that are fetched, those of them that are on their way up, and how many ever were.
        self._fetched: deque[int] = deque()
        self._coming: deque[int] = deque()
        self._count = 0
        self._stalls = StreamStalls(device)

    def save(self, values: Tensor, region: int) -> None:
        """See ActivationCopies."""
        self.release()
        destination = self._store.destination(region)
        # The group input was computed on the current stream.
        self._down.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._down):
            destination.copy_(values, non_blocking=True)
            self._went.record()
        self._store.link.to_host += values.nbytes
        # Its own tensor: the caller empties the given one after its group's forward pass.
        self._going = region, values.detach()

    def release(self) -> None:
        """See ActivationCopies."""
        if self._going is not None:
            self._went.synchronize()
            self._store.put(self._going[0])
            self._going = None

    def fetch(self, region: int) -> None:
        """See ActivationCopies."""
        self._store.fetch(region)
        self._fetched.append(region)

    def advance(self) -> None:
        """See ActivationCopies."""
        if not self._fetched or self._coming:
            return
        region, slot = self._fetched.popleft(), self._count % DEVICE_SLOTS
        # What used the slot before was computed on the current stream.
        self._up.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._up):
            self._slots[slot].copy_(self._store.take(region), non_blocking=True)
            self._came[slot].record()
        self._store.link.to_device += self._slots[slot].nbytes
        self._coming.append(slot)
        self._count += 1

    def take(self, region: int) -> Tensor:
        """See ActivationCopies."""
        self.advance()
        slot = self._coming.popleft()
        # The host waits too, because the store may then overwrite what was copied.
        self._stalls.timed(self._came[slot].synchronize)
        return self._slots[slot]

    @property
    def waited(self) -> float:
        """See ActivationCopies."""
        return self._stalls.seconds()
