"""Block quantization on a GPU, as Triton kernels that equal `reference.py` bit for bit.

A program packs or unpacks one tile of a row: whole blocks with about TILE bytes of payload. For 4 bits, a tile holds
the first halves of its blocks in one array and the second halves in another.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from llmtrain_kernels.quantize.format import GOLDEN, SMALLEST
from llmtrain_kernels.quantize.packed_size import MAX_CODE
from llmtrain_kernels.triton_launch import ceil_div, power_of_2_from

TILE = 2048
# No fused multiply-add: products and sums round separately, as in the reference.
OPTIONS = {"num_warps": 4, "enable_fp_fusion": False}


def quantize(x: Tensor, bits: int, block: int, out: Tensor, key: int | None) -> None:
    """Pack the rows of `x` into `out`. key: None rounds to nearest."""
    payload, scales = _parts(out, x.shape[1], bits)
    # Both fit into int32: Triton chooses an integer's type by its value.
    low, high = (0, 0) if key is None else (((key & 0xFFFFFFFF) ^ 0x80000000) - 0x80000000, key >> 32)
    strides = x.stride(0), payload.stride(0) // 4, scales.stride(0)
    reciprocal = float(torch.tensor(float(MAX_CODE[bits])).reciprocal())
    constants = tile_constants(bits, block) | format_constants(bits) | {"dither": key is not None}
    _launch(_quantize, len(x), constants, x, payload, scales, *strides, x.shape[1], low, high, reciprocal)


def dequantize(packed: Tensor, bits: int, block: int, out: Tensor) -> None:
    """Unpack the rows of `packed` into those of `out`."""
    payload, scales = _parts(packed, out.shape[1], bits)
    strides = out.stride(0), payload.stride(0) // 4, scales.stride(0)
    constants = tile_constants(bits, block) | {"add": False}
    _launch(_unpack, len(out), constants, out, payload, scales, *strides, out.shape[1], 1)


def dequantize_sum(packed: Tensor, bits: int, block: int, out: Tensor, accumulate: bool) -> None:
    """Unpack the rows of `packed` and write their sum to `out`. If `accumulate`, the sum starts from `out`."""
    payload, scales = _parts(packed, len(out), bits)
    strides = 0, payload.stride(0) // 4, scales.stride(0)
    constants = tile_constants(bits, block) | {"add": accumulate}
    _launch(_unpack, 1, constants, out, payload, scales, *strides, len(out), len(packed))


def tile_constants(bits: int, block: int) -> dict[str, int]:
    """Return the constants of both kernels. width: bytes of a block; group: blocks of a tile; both powers of 2."""
    width = power_of_2_from(block * bits // 8)
    return {"bits": bits, "block": block, "width": width, "group": max(1, TILE // width)}


def format_constants(bits: int) -> dict[str, float]:
    """Return the constants of the packing kernel alone."""
    return {"max_code": MAX_CODE[bits], "smallest": SMALLEST, "golden": GOLDEN}


def _parts(packed: Tensor, numel: int, bits: int) -> tuple[Tensor, Tensor]:
    """Return payload `[rows, bytes]` and scales `[rows, blocks]`."""
    payload, scales = packed.tensor_split([numel * bits // 8], 1)
    return payload, scales.view(torch.float32)


def _launch(kernel: Any, rows: int, constants: dict[str, Any], *tensors_and_numbers: Any) -> None:
    x, _, scales = tensors_and_numbers[:3]
    grid = ceil_div(scales.shape[1], constants["group"]), rows
    if 0 in grid:
        return
    # Triton launches on the current device, not on the device of its arguments.
    with torch.cuda.device(x.device if x.is_cuda else -1):
        kernel[grid](*tensors_and_numbers, **constants, **OPTIONS)


@triton.jit
def _tile(
    numel: tl.tensor, bits: tl.constexpr, block: tl.constexpr, width: tl.constexpr, group: tl.constexpr
) -> tuple[tl.tensor, ...]:
    """Return block indices, first elements and payload bytes, each `[group, 1]`; byte offsets within a block,
    `[1, width]`; and the mask of bytes that exist, `[group, width]`."""
    blocks = (tl.program_id(0) * group + tl.arange(0, group))[:, None]
    starts = blocks.to(tl.int64) * block
    sizes = (tl.minimum(tl.maximum(numel - starts, 0), block) * bits // 8).to(tl.int32)
    offsets = tl.arange(0, width)[None, :]
    return blocks, starts, sizes, offsets, offsets < sizes


@triton.jit
def _mix(x: tl.tensor) -> tl.tensor:
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def _hash(
    byte: tl.tensor, row: tl.tensor, low: tl.tensor, high: tl.tensor, golden: tl.constexpr, dither: tl.constexpr
) -> tl.tensor:
    """Return the 32-bit hash that rounds the codes of a byte; zeros without `dither`."""
    if dither:
        a = _mix(low.to(tl.uint32, bitcast=True) + row.to(tl.uint32) * golden)
        b = _mix(high.to(tl.uint32, bitcast=True) + a)
        h = byte.to(tl.uint32) ^ a
        h = (h ^ (h >> 16)) * 0x7FEB352D
        h = ((h ^ (h >> 15)) + b) * 0x846CA68B
    else:
        h = tl.zeros_like(byte).to(tl.uint32)
    return h


@triton.jit
def _codes(
    x: tl.tensor, inverse: tl.tensor, hash: tl.tensor, max_code: tl.constexpr, dither: tl.constexpr
) -> tl.tensor:
    """Return the int32 codes of `x`; 0 where `inverse` is 0."""
    values = tl.where(inverse > 0, x, 0.0) * inverse
    if dither:
        values += ((hash.to(tl.int32, bitcast=True) >> 15) | 1).to(tl.float32) * 0.00000762939453125  # 2^-17
    # The sum's low bits hold the nearest integer, ties to even.
    codes = (values + 12582912.0).to(tl.int32, bitcast=True) - 0x4B400000
    return tl.minimum(tl.maximum(codes, -max_code), max_code)


@triton.jit(do_not_specialize=["low", "high"])
def _quantize(
    x: tl.tensor, payload: tl.tensor, scales: tl.tensor, x_stride: tl.tensor, payload_stride: tl.tensor,
    scales_stride: tl.tensor, numel: tl.tensor, low: tl.tensor, high: tl.tensor, reciprocal: tl.tensor,
    max_code: tl.constexpr, smallest: tl.constexpr, golden: tl.constexpr, dither: tl.constexpr, bits: tl.constexpr,
    block: tl.constexpr, width: tl.constexpr, group: tl.constexpr,
) -> None:  # fmt: skip
    row = tl.program_id(1).to(tl.int64)
    blocks, starts, sizes, offsets, there = _tile(numel, bits, block, width, group)
    x += row * x_stride
    columns = starts + offsets
    first = tl.load(x + columns, there, 0.0).to(tl.float32)
    # The bits of absolute values have the order of the values; infinity and NaN are above all numbers.
    absmax = tl.max(first.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1, keep_dims=True)
    if bits == 4:
        second = tl.load(x + columns + sizes, there, 0.0).to(tl.float32)
        absmax = tl.maximum(absmax, tl.max(second.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1, keep_dims=True))
    finite = absmax < 0x7F800000
    absmax = absmax.to(tl.float32, bitcast=True)
    usable = finite & (absmax >= smallest)
    scale = tl.where(usable, absmax * reciprocal, 0.0)
    inverse = tl.where(usable, tl.div_rn(1.0, tl.where(usable, scale, 1.0)), 0.0)
    tl.store(scales + row * scales_stride + blocks, tl.where(finite, scale, float("nan")), starts < numel)
    numbers = starts * bits // 8 + offsets
    hash = _hash(numbers, row, low, high, golden, dither)
    codes = _codes(first, inverse, hash, max_code, dither)
    if bits == 4:
        codes = (codes & 15) | (_codes(second, inverse, hash << 16, max_code, dither) << 4)
    # The factor 4 shows the compiler that rows are 4-byte aligned.
    tl.store(payload + row * payload_stride * 4 + numbers, codes.to(tl.uint8), there)


@triton.jit
def _unpack(
    out: tl.tensor, payload: tl.tensor, scales: tl.tensor, out_stride: tl.tensor, payload_stride: tl.tensor,
    scales_stride: tl.tensor, numel: tl.tensor, rows: tl.tensor, add: tl.constexpr, bits: tl.constexpr,
    block: tl.constexpr, width: tl.constexpr, group: tl.constexpr,
) -> None:  # fmt: skip
    row = tl.program_id(1).to(tl.int64)
    blocks, starts, sizes, offsets, there = _tile(numel, bits, block, width, group)
    out += row * out_stride + starts + offsets
    first = tl.zeros([group, width], tl.float32)
    second = tl.zeros([group, width], tl.float32)
    if add:
        first = tl.load(out, there, 0.0)
        if bits == 4:
            second = tl.load(out + sizes, there, 0.0)
    for _ in range(rows):
        scale = tl.load(scales + row * scales_stride + blocks, starts < numel, 0.0)
        codes = tl.load(payload + row * payload_stride * 4 + starts * bits // 8 + offsets, there, 0).to(tl.int32)
        first += ((codes << (32 - bits)) >> (32 - bits)).to(tl.float32) * scale
        if bits == 4:
            second += ((codes << 24) >> 28).to(tl.float32) * scale
        row += 1
    tl.store(out, first.to(out.dtype.element_ty), there)
    if bits == 4:
        tl.store(out + sizes, second.to(out.dtype.element_ty), there)
