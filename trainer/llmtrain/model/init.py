"""Seeded initialisation. It depends only on the seed and the tensor, never on the layout of ranks."""

import torch
import xxhash
from torch import Tensor

from llmtrain.model.tensors import TensorSpec, UnitSpec

# Elements of a block. Each block has its own generator, so that a shard draws only its own blocks and still gets the
# same values as the whole tensor.
BLOCK = 1 << 20


def initialize(unit: UnitSpec, start: int, end: int, seed: int, out: Tensor) -> None:
    """Fill `out`, fp32 `[end - start]`, with the initial values of `[start, end)` of the unit."""
    place = 0
    for tensor, first, last in unit.tensor_ranges(start, end):
        _draw(tensor, first, last, seed, out[place : place + last - first])
        place += last - first


def _draw(tensor: TensorSpec, first: int, last: int, seed: int, out: Tensor) -> None:
    if tensor.std is None:
        out.fill_(tensor.fill)
        return
    for block in range(first // BLOCK, (last - 1) // BLOCK + 1):
        origin = block * BLOCK
        key = xxhash.xxh3_64_intdigest(f"{seed}/{tensor.name}/{block}".encode())
        generator = torch.Generator().manual_seed(key >> 1)
        size = min(BLOCK, tensor.numel - origin)
        drawn = torch.empty(size).normal_(0.0, tensor.std, generator=generator)
        begin, stop = max(first, origin), min(last, origin + size)
        out[begin - first : stop - first] = drawn[begin - origin : stop - origin].to(out.device)
