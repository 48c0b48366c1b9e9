"""Buffers that jobs on streams use one after another."""

from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass
class Workspace:
    """Buffers by name; they grow in the first step and then stay."""

    device: torch.device
    _buffers: dict[str, Tensor] = field(default_factory=dict)
    _outgrown: list[Tensor] = field(default_factory=list)

    def take(self, name: str, numel: int, dtype: torch.dtype) -> Tensor:
        """Return the buffer `name` as `[numel]` of `dtype`, with whatever it holds."""
        nbytes = numel * dtype.itemsize
        held = self._buffers.get(name)
        if held is None or held.numel() < nbytes:
            if held is not None and held.is_cuda:
                # Another stream may still use the smaller one, and waiting for all streams would wait for messages
                # that are received ahead.
                self._outgrown.append(held)
            held = self._buffers[name] = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
        return held[:nbytes].view(dtype)

    def match(self, other: "Workspace") -> None:
        """Grow to hold all that `other` holds."""
        for name, buffer in other._buffers.items():
            self.take(name, buffer.numel(), buffer.dtype)

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(buffer.numel() for buffer in self._buffers.values())
