"""Seeded initialisation. It depends only on the seed and the tensor, never on the layout of ranks."""

from concurrent.futures import ThreadPoolExecutor

import torch
import xxhash
from torch import Tensor

from llmtrain.model.tensors import TensorSpec, UnitSpec

# Elements of a block. Each block has its own generator, so that a shard draws only its own blocks and still gets the
# same values as the full tensor.
RANDOM_BLOCK = 1 << 20


def initialize(unit: UnitSpec, start: int, end: int, seed: int, out: Tensor) -> None:
    """Fill `out`, fp32 `[end - start]`, with the initial values of `[start, end)` of the unit."""
    offset = 0
    for tensor, first, last in unit.tensor_ranges(start, end):
        _draw(tensor, first, last, seed, out[offset : offset + last - first])
        offset += last - first


def _draw(tensor: TensorSpec, first: int, last: int, seed: int, out: Tensor) -> None:
    if tensor.std is None:
        out.fill_(tensor.fill)
        return
    blocks, threads = range(first // RANDOM_BLOCK, (last - 1) // RANDOM_BLOCK + 1), torch.get_num_threads()
    with ThreadPoolExecutor(threads) as pool:
        # A block of each thread at the same time, so that few of them are in memory.
        for start in range(0, len(blocks), threads):
            part = blocks[start : start + threads]
            for block, drawn in zip(part, pool.map(lambda block: _normal(tensor, block, seed), part), strict=True):
                origin = block * RANDOM_BLOCK
                begin, stop = max(first, origin), min(last, origin + len(drawn))
                out[begin - first : stop - first] = drawn[begin - origin : stop - origin].to(out.device)


def _normal(tensor: TensorSpec, block: int, seed: int) -> Tensor:
    """Return a block's values. One thread draws them, whatever the number of torch's."""
    assert tensor.std is not None
    key = xxhash.xxh3_64_intdigest(f"{seed}/{tensor.name}/{block}".encode())
    generator = torch.Generator().manual_seed(key >> 1)
    size = min(RANDOM_BLOCK, tensor.numel - block * RANDOM_BLOCK)
    return torch.empty(size).normal_(0.0, tensor.std, generator=generator)
