"""Named buffers that jobs on a stream reuse."""

from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass
class Workspace:
    """Buffers by name. They grow in the first step and then keep their sizes."""

    device: torch.device
    _buffers: dict[str, Tensor] = field(default_factory=dict)
    _outgrown: list[Tensor] = field(default_factory=list)

    def take(self, name: str, numel: int, dtype: torch.dtype) -> Tensor:
        """Return the buffer `name` as `[numel]` of `dtype`, uninitialized."""
        nbytes = numel * dtype.itemsize
        held = self._buffers.get(name)
        if held is None or held.numel() < nbytes:
            if held is not None and held.is_cuda:
                # Another stream may still use the smaller buffer. Waiting for all streams would also wait for messages
                # whose receives are posted ahead.
                self._outgrown.append(held)
            held = self._buffers[name] = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
        return held[:nbytes].view(dtype)

    def match(self, other: "Workspace") -> None:
        """Grow to the sizes of the buffers of `other`."""
        for name, buffer in other._buffers.items():
            self.take(name, buffer.numel(), buffer.dtype)

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        return sum(buffer.numel() for buffer in self._buffers.values())
