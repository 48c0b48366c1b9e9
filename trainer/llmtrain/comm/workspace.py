"""Named buffers that jobs on a stream reuse."""

from collections.abc import Mapping

import torch
from torch import Tensor


class Workspace:
    """Buffers by name, allocated once."""

    def __init__(self, device: torch.device, sizes: Mapping[str, int]) -> None:
        """sizes: bytes of each buffer."""
        self._buffers = {name: torch.empty(nbytes, dtype=torch.uint8, device=device) for name, nbytes in sizes.items()}

    def take(self, name: str, numel: int, dtype: torch.dtype) -> Tensor:
        """Return the buffer `name` as `[numel]` of `dtype`, uninitialized. Raises RuntimeError if it is smaller."""
        nbytes, buffer = numel * dtype.itemsize, self._buffers.get(name)
        if buffer is None or buffer.numel() < nbytes:
            planned = 0 if buffer is None else buffer.numel()
            raise RuntimeError(f"the buffer {name!r} was planned with {planned} bytes, but {nbytes} are taken")
        return buffer[:nbytes].view(dtype)

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        return sum(buffer.numel() for buffer in self._buffers.values())
