"""Block quantization to 8 or 4 bits: one dispatch point, and the reference that every backend equals bit for bit.

ZeRO++ (Wang et al., 2023, sections 3.1 and 3.3) gathers weights in 8 bits and reduces gradients in 4. A row of elements
is packed into one buffer: its payload, then one fp32 scale for each block of elements. The last block may be short.

- scale = absmax * fp32(1 / most), most = 127 or 7; code = round(x * fp32(1 / scale)); value = code * scale. fp32.
- 8 bits: one signed byte an element. 4 bits: byte j of a block of n holds element j in its low half and element
  j + n/2 in its high half, each as two's complement.
- A block whose absmax is below 2^-118 counts as zeros: its scale is 0. A block that holds NaN or infinity has the scale
  NaN, so that all of it is NaN when unpacked.
- Rounding to nearest takes even codes at ties. Stochastic rounding takes the code below or above, each as likely as
  it is near, by a hash of seed, row and the byte its code is in: by the hash's high half, or, for a code in the high
  half of a byte, by its low half.
"""

from collections.abc import Callable, Iterator
from functools import cache
from importlib.util import find_spec
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from llmtrain_kernels.native import native_functions

Rounding = Literal["nearest", "stochastic"]

MOST = {8: 127, 4: 7}
SMALLEST = 2.0**-118
GOLDEN = 0x9E3779B9
DTYPES = (torch.float32, torch.bfloat16, torch.float16)  # the C++ functions get the place in this list
_WORD = 0xFFFFFFFF


class Backend(NamedTuple):
    """The three functions as one device runs them. Arguments are checked; `key` is None to round to nearest."""

    quantize: Callable[[Tensor, int, int, Tensor, int | None], None]
    dequantize: Callable[[Tensor, int, int, Tensor], None]
    dequantize_sum: Callable[[Tensor, int, int, Tensor, bool], None]


def packed_bytes(numel: int, bits: int, block: int) -> int:
    """Return the bytes of one packed row of `numel` elements."""
    if bits not in MOST:
        raise ValueError(f"bits is {bits}: expected 4 or 8")
    if block < 1 or (bits == 4 and block % 2):
        raise ValueError(f"block is {block}: expected a positive number, even for 4 bits")
    if numel % 32 or not 0 <= numel <= _WORD:
        raise ValueError(f"numel is {numel}: expected a multiple of 32 below 2^32; pad it")
    return numel * bits // 8 + 4 * -(-numel // block)


def quantize(x: Tensor, bits: int, block: int, out: Tensor, rounding: Rounding = "nearest", seed: int = 0) -> None:
    """Pack the rows of `x` (`[rows, numel]`, fp32, bf16 or fp16) into `out` (uint8 `[rows, packed_bytes]`).

    seed: for stochastic rounding; the same one gives the same bytes on every device. Rows may lie apart, the elements
    of one may not. Raises ValueError where shapes, dtypes or numbers do not fit.
    """
    _check(x, bits, block, out)
    if rounding not in ("nearest", "stochastic"):
        raise ValueError(f"rounding is {rounding!r}: expected 'nearest' or 'stochastic'")
    _backend(x.device.type).quantize(x, bits, block, out, _key(seed) if rounding == "stochastic" else None)


def dequantize(packed: Tensor, bits: int, block: int, out: Tensor) -> None:
    """Unpack the rows of `packed` (uint8 `[rows, packed_bytes]`) into `out` (`[rows, numel]`, fp32, bf16 or fp16).

    Raises ValueError where shapes, dtypes or numbers do not fit.
    """
    _check(out, bits, block, packed)
    _backend(out.device.type).dequantize(packed, bits, block, out)


def dequantize_sum(packed: Tensor, bits: int, block: int, out: Tensor, accumulate: bool = False) -> None:
    """Unpack the rows of `packed` (uint8 `[rows, packed_bytes]`) and add them, the first one first, in `out`
    (fp32 `[numel]`): to what it holds if `accumulate`, else to zero.

    Raises ValueError where shapes, dtypes or numbers do not fit.
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
    if x.dtype not in DTYPES:
        raise ValueError(f"elements are {x.dtype}: expected one of {', '.join(map(str, DTYPES))}")
    if x.device != packed.device:
        raise ValueError(f"elements are on {x.device}, packed rows on {packed.device}: expected one device")
    if x.stride(1) != 1 or packed.stride(1) != 1:
        raise ValueError("a row's elements lie apart: expected rows that are contiguous")
    if packed.data_ptr() % 4 or packed.stride(0) % 4:
        raise ValueError("a packed row starts between words: expected multiples of 4 bytes, as its scales are fp32")


@cache
def _backend(device: str) -> Backend:
    if device == "cuda" and find_spec("triton"):
        from llmtrain_kernels import quantize_triton

        return Backend(quantize_triton.quantize, quantize_triton.dequantize, quantize_triton.dequantize_sum)
    return (native_backend() if device == "cpu" else None) or REFERENCE


def native_backend() -> Backend | None:
    """Return the C++ functions, or None where they cannot be built."""
    functions = native_functions(
        "quantize", quantize="pllplllllll", dequantize="pllpllllll", dequantize_sum="pplllllll"
    )
    if functions is None:
        return None

    def numbers(packed: Tensor, numel: int, bits: int, block: int) -> tuple[int, ...]:
        return packed.data_ptr(), packed.stride(0), len(packed), numel, bits, block, torch.get_num_threads()

    def quantize(x: Tensor, bits: int, block: int, out: Tensor, key: int | None) -> None:
        elements = x.data_ptr(), DTYPES.index(x.dtype), x.stride(0)
        functions.quantize(*elements, *numbers(out, x.shape[1], bits, block), -1 if key is None else key)

    def dequantize(packed: Tensor, bits: int, block: int, out: Tensor) -> None:
        elements = out.data_ptr(), DTYPES.index(out.dtype), out.stride(0)
        functions.dequantize(*elements, *numbers(packed, out.shape[1], bits, block))

    def dequantize_sum(packed: Tensor, bits: int, block: int, out: Tensor, accumulate: bool) -> None:
        functions.dequantize_sum(out.data_ptr(), *numbers(packed, len(out), bits, block), accumulate)

    return Backend(quantize, dequantize, dequantize_sum)


def _reference_quantize(x: Tensor, bits: int, block: int, out: Tensor, key: int | None) -> None:
    for columns, payload, scales in _parts(out, x.shape[1], bits, block):
        blocks = x[:, columns].float().unflatten(1, (scales.shape[1], -1))
        absmax = blocks.abs().amax(2, keepdim=True)
        scale = torch.where(absmax < SMALLEST, 0.0, absmax * _reciprocal(MOST[bits]))
        scale = torch.where(absmax.isfinite(), scale, torch.nan)
        # A block without a scale is made of zeros. (Infinity times 0 would be NaN, and that no code at all.)
        values = torch.where(scale > 0, blocks * scale.reciprocal(), 0.0)
        if key is not None:
            values += _dither(key, x, columns, bits, block)
        codes = values.round().clamp(-MOST[bits], MOST[bits]).to(torch.int8)
        if bits == 4:
            low, high = codes.chunk(2, 2)
            codes = low & 15 | high << 4
        payload.copy_(codes.flatten(1).view(torch.uint8))
        scales.copy_(scale.squeeze(2))


def _reference_dequantize(packed: Tensor, bits: int, block: int, out: Tensor) -> None:
    for columns, payload, scales in _parts(packed, out.shape[1], bits, block):
        codes = payload.view(torch.int8).unflatten(1, (scales.shape[1], -1))
        if bits == 4:
            codes = torch.cat((codes << 4 >> 4, codes >> 4), 2)
        out[:, columns] = (codes * scales.unsqueeze(2)).flatten(1).to(out.dtype)


def _reference_dequantize_sum(packed: Tensor, bits: int, block: int, out: Tensor, accumulate: bool) -> None:
    if not accumulate:
        out.zero_()
    row = torch.empty_like(out).unsqueeze(0)
    for index in range(len(packed)):
        _reference_dequantize(packed[index : index + 1], bits, block, row)
        out += row[0]


REFERENCE = Backend(_reference_quantize, _reference_dequantize, _reference_dequantize_sum)


def _parts(packed: Tensor, numel: int, bits: int, block: int) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Yield columns, payload and scales of the whole blocks, and of the short one."""
    payload, scales = packed.tensor_split([numel * bits // 8], 1)
    whole = numel // block
    full, short = (slice(0, whole * block), slice(0, whole)), (slice(whole * block, numel), slice(whole, None))
    for columns, blocks in (full, short):
        if columns.start < columns.stop:
            part = payload[:, columns.start * bits // 8 : columns.stop * bits // 8]
            yield columns, part, scales.view(torch.float32)[:, blocks]


def _reciprocal(number: int) -> float:
    return float(torch.tensor(float(number)).reciprocal())


def _key(seed: int) -> int:
    """Return 63 bits that another seed gives differently (Steele et al., 2014: the mixing function of SplitMix64)."""
    x = (seed + 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & 0xFFFFFFFFFFFFFFFF
    x = (x ^ x >> 27) * 0x94D049BB133111EB & 0xFFFFFFFFFFFFFFFF
    return (x ^ x >> 31) >> 1


def _dither(key: int, x: Tensor, columns: slice, bits: int, block: int) -> Tensor:
    """Return `[rows, blocks, elements]` numbers between -1/2 and 1/2, odd multiples of 2^-17."""
    row = torch.arange(len(x), device=x.device).unsqueeze(1)
    a = _mix((key & _WORD) + row * GOLDEN & _WORD)
    b = _mix((key >> 32) + a & _WORD)
    hashes = torch.arange(columns.start * bits // 8, columns.stop * bits // 8, device=x.device) ^ a
    hashes = (hashes ^ hashes >> 16) * 0x7FEB352D & _WORD
    hashes = ((hashes ^ hashes >> 15) + b) * 0x846CA68B & _WORD
    hashes = hashes.unflatten(1, (-1, min(block, columns.stop - columns.start) * bits // 8))
    if bits == 4:
        hashes = torch.cat((hashes, hashes << 16), 2)
    return (hashes << 32 >> 47 | 1) * 2.0**-17


def _mix(x: Tensor) -> Tensor:
    """Return 32 bits for 32 bits, each changed by each (the constants are Wellons' lowbias32)."""
    x = (x ^ x >> 16) * 0x7FEB352D & _WORD
    x = (x ^ x >> 15) * 0x846CA68B & _WORD
    return x ^ x >> 16
