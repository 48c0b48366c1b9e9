"""Block quantization with torch operations. Every backend must equal it bit for bit."""

from collections.abc import Iterator

import torch
from torch import Tensor

from llmtrain_kernels.quantize.format import GOLDEN, SMALLEST, QuantizeBackend
from llmtrain_kernels.quantize.packed_size import MAX_CODE, WORD


def _reference_quantize(x: Tensor, bits: int, block: int, out: Tensor, key: int | None) -> None:
    for columns, payload, scales in _parts(out, x.shape[1], bits, block):
        blocks = x[:, columns].float().unflatten(1, (scales.shape[1], -1))
        absmax = blocks.abs().amax(2, keepdim=True)
        scale = torch.where(absmax < SMALLEST, 0.0, absmax * _reciprocal(MAX_CODE[bits]))
        scale = torch.where(absmax.isfinite(), scale, torch.nan)
        # A block with scale 0 or NaN gets zero codes. Without this, infinity times 0 would give NaN.
        values = torch.where(scale > 0, blocks * scale.reciprocal(), 0.0)
        if key is not None:
            values += _dither(key, x, columns, bits, block)
        codes = values.round().clamp(-MAX_CODE[bits], MAX_CODE[bits]).to(torch.int8)
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


REFERENCE = QuantizeBackend(_reference_quantize, _reference_dequantize, _reference_dequantize_sum)


def _parts(packed: Tensor, numel: int, bits: int, block: int) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Yield columns, payload and scales: first of the full blocks, then of the short last block."""
    payload, scales = packed.tensor_split([numel * bits // 8], 1)
    whole = numel // block
    full, short = (slice(0, whole * block), slice(0, whole)), (slice(whole * block, numel), slice(whole, None))
    for columns, blocks in (full, short):
        if columns.start < columns.stop:
            part = payload[:, columns.start * bits // 8 : columns.stop * bits // 8]
            yield columns, part, scales.view(torch.float32)[:, blocks]


def _reciprocal(number: int) -> float:
    return float(torch.tensor(float(number)).reciprocal())


def _dither(key: int, x: Tensor, columns: slice, bits: int, block: int) -> Tensor:
    """Return pseudo-random odd multiples of 2^-17 between -1/2 and 1/2, `[rows, blocks, elements]`."""
    row = torch.arange(len(x), device=x.device).unsqueeze(1)
    a = _mix((key & WORD) + row * GOLDEN & WORD)
    b = _mix((key >> 32) + a & WORD)
    hashes = torch.arange(columns.start * bits // 8, columns.stop * bits // 8, device=x.device) ^ a
    hashes = (hashes ^ hashes >> 16) * 0x7FEB352D & WORD
    hashes = ((hashes ^ hashes >> 15) + b) * 0x846CA68B & WORD
    hashes = hashes.unflatten(1, (-1, min(block, columns.stop - columns.start) * bits // 8))
    if bits == 4:
        hashes = torch.cat((hashes, hashes << 16), 2)
    return (hashes << 32 >> 47 | 1) * 2.0**-17


def _mix(x: Tensor) -> Tensor:
    """Hash 32 bits to 32 bits (Wellons' lowbias32)."""
    x = (x ^ x >> 16) * 0x7FEB352D & WORD
    x = (x ^ x >> 15) * 0x846CA68B & WORD
    return x ^ x >> 16
