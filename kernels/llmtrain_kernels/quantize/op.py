"""Block quantization to 8 or 4 bits (ZeRO++, Wang et al., 2023, section 3.1), by the backend of the tensors' device."""

from functools import cache
from importlib.util import find_spec
from typing import Literal

import torch
from torch import Tensor

from llmtrain_kernels.quantize.cpu import native_backend
from llmtrain_kernels.quantize.format import ELEMENT_DTYPES, QuantizeBackend
from llmtrain_kernels.quantize.packed_size import packed_bytes
from llmtrain_kernels.quantize.reference import REFERENCE

Rounding = Literal["nearest", "stochastic"]


def quantize(x: Tensor, bits: int, block: int, out: Tensor, rounding: Rounding = "nearest", seed: int = 0) -> None:
    """Pack the rows of `x` (`[rows, numel]`, fp32, bf16 or fp16) into `out` (uint8 `[rows, packed_bytes]`).

    seed: for stochastic rounding; the same seed gives the same bytes on every device. Each row must be contiguous; the
    rows together need not be. Raises ValueError for shapes, dtypes or numbers that do not match.
    """
    _check(x, bits, block, out)
    if rounding not in ("nearest", "stochastic"):
        raise ValueError(f"rounding is {rounding!r}: expected 'nearest' or 'stochastic'")
    _backend(x.device.type).quantize(x, bits, block, out, _key(seed) if rounding == "stochastic" else None)


def dequantize(packed: Tensor, bits: int, block: int, out: Tensor) -> None:
    """Unpack the rows of `packed` (uint8 `[rows, packed_bytes]`) into `out` (`[rows, numel]`, fp32, bf16 or fp16).

    Raises ValueError for shapes, dtypes or numbers that do not match.
    """
    _check(out, bits, block, packed)
    _backend(out.device.type).dequantize(packed, bits, block, out)


def dequantize_sum(packed: Tensor, bits: int, block: int, out: Tensor, accumulate: bool = False) -> None:
    """Unpack the rows of `packed` (uint8 `[rows, packed_bytes]`), sum them in row order, and write the sum to `out`
    (fp32 `[numel]`). If `accumulate`, the sum starts from `out`.

    Raises ValueError for shapes, dtypes or numbers that do not match.
    """
    _check(out.expand(len(packed), -1), bits, block, packed)
    if out.dtype != torch.float32:
        raise ValueError(f"out is {out.dtype}: sums are torch.float32")
    _backend(out.device.type).dequantize_sum(packed, bits, block, out, accumulate)


def _check(x: Tensor, bits: int, block: int, packed: Tensor) -> None:
    rows, numel = x.shape
    expected = (rows, packed_bytes(numel, bits, block))
    if packed.dtype != torch.uint8 or packed.shape != expected:
        raise ValueError(f"packed rows are {packed.dtype} {list(packed.shape)}: expected torch.uint8 {list(expected)}")
    if x.dtype not in ELEMENT_DTYPES:
        raise ValueError(f"elements are {x.dtype}: expected one of {', '.join(map(str, ELEMENT_DTYPES))}")
    if x.device != packed.device:
        raise ValueError(f"elements are on {x.device}, packed rows on {packed.device}: expected one device")
    if x.stride(1) != 1 or packed.stride(1) != 1:
        raise ValueError("the elements of a row are not contiguous: expected stride 1 within rows")
    if packed.data_ptr() % 4 or packed.stride(0) % 4:
        raise ValueError("packed rows are not aligned: expected starts at multiples of 4 bytes, as scales are fp32")


@cache
def _backend(device: str) -> QuantizeBackend:
    if device == "cuda" and find_spec("triton"):
        from llmtrain_kernels.quantize import triton_backend

        return QuantizeBackend(triton_backend.quantize, triton_backend.dequantize, triton_backend.dequantize_sum)
    return (native_backend() if device == "cpu" else None) or REFERENCE


def _key(seed: int) -> int:
    """Return a 63-bit hash of the seed (SplitMix64's mixing function; Steele et al., 2014)."""
    x = (seed + 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & 0xFFFFFFFFFFFFFFFF
    x = (x ^ x >> 27) * 0x94D049BB133111EB & 0xFFFFFFFFFFFFFFFF
    return (x ^ x >> 31) >> 1
