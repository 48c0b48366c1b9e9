"""How gradients reach the CPU that steps offloaded states, and how the stepped weights go back."""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

Part = tuple[Tensor, Tensor | None]


class Staging(Protocol):
    """Moves the buckets of one unit at a time. A bucket is a slice of the unit's gradient and of its weight."""

    def begin(self, gradient: Tensor, weight: Tensor | None, buckets: Sequence[slice]) -> None:
        """Begin a unit. gradient: fp32 `[n]`. weight: `[n]` of the compute dtype; None if nothing goes back."""

    def take(self, number: int) -> Part:
        """Return a bucket's gradient, and the memory for its weight, in the host's memory. Buckets come in order."""

    def put(self, number: int) -> None:
        """Send back the weight of the bucket that was taken last."""

    def end(self) -> None:
        """Let what is computed next wait for the weights."""


class InPlace:
    """A CPU computes: the unit's memory is the host's, and nothing moves."""

    def begin(self, gradient: Tensor, weight: Tensor | None, buckets: Sequence[slice]) -> None:
        """See Staging."""
        self._gradient, self._weight, self._buckets = gradient, weight, buckets

    def take(self, number: int) -> Part:
        """See Staging."""
        own = self._buckets[number]
        return self._gradient[own], None if self._weight is None else self._weight[own]

    def put(self, number: int) -> None:
        """See Staging."""

    def end(self) -> None:
        """See Staging."""


class Pinned:
    """A GPU computes: buckets pass through two pinned slots, on a stream of their own for each direction.

    The gradient of the next bucket comes while one is stepped, and the weight of the one before goes back.
    """

    def __init__(self, device: torch.device, bucket: int, dtype: torch.dtype) -> None:
        """bucket: most elements of a bucket. dtype: of weights."""
        self._down, self._up = torch.cuda.Stream(device), torch.cuda.Stream(device)
        self._gradients = torch.empty(2, bucket, pin_memory=True)
        self._weights = torch.empty(2, bucket, dtype=dtype, pin_memory=True)
        self._came = [torch.cuda.Event() for _ in range(2)]
        self._went = [torch.cuda.Event() for _ in range(2)]

    def begin(self, gradient: Tensor, weight: Tensor | None, buckets: Sequence[slice]) -> None:
        """See Staging. weight: not None, as a CPU cannot step weights on a GPU."""
        assert weight is not None
        self._gradient, self._weight, self._buckets = gradient, weight, buckets
        # The gradient was computed on the current stream, and the weight was last read there.
        for stream in (self._down, self._up):
            stream.wait_stream(torch.cuda.current_stream())
        self._fetch(0)

    def take(self, number: int) -> Part:
        """See Staging."""
        if number + 1 < len(self._buckets):
            self._fetch(number + 1)
        slot, size = number % 2, self._size(number)
        self._came[slot].synchronize()
        # The weight of two buckets ago leaves the slot.
        self._went[slot].synchronize()
        return self._gradients[slot, :size], self._weights[slot, :size]

    def put(self, number: int) -> None:
        """See Staging."""
        slot = number % 2
        with torch.cuda.stream(self._up):
            values = self._weights[slot, : self._size(number)]
            self._weight[self._buckets[number]].copy_(values, non_blocking=True)
            self._went[slot].record()

    def end(self) -> None:
        """See Staging."""
        torch.cuda.current_stream().wait_stream(self._up)

    def _fetch(self, number: int) -> None:
        slot = number % 2
        with torch.cuda.stream(self._down):
            part = self._gradient[self._buckets[number]]
            self._gradients[slot, : part.numel()].copy_(part, non_blocking=True)
            self._came[slot].record()

    def _size(self, number: int) -> int:
        own = self._buckets[number]
        return int(own.stop - own.start)


def staging_for(device: torch.device, bucket: int, dtype: torch.dtype) -> Staging:
    """Return the staging of a rank that computes on `device`."""
    return InPlace() if device.type == "cpu" else Pinned(device, bucket, dtype)
