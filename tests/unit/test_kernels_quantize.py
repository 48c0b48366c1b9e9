"""Block quantization: the reference by its definition, and the C++ form by the reference."""

import pytest
import torch
from llmtrain_kernels.quantize import (
    REFERENCE,
    Backend,
    dequantize,
    dequantize_sum,
    native_backend,
    packed_bytes,
    quantize,
)

LEVELS = {8: 127, 4: 7}


def numbers(rows: int, numel: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    torch.manual_seed(numel)
    return (torch.randn(rows, numel) * torch.logspace(-3, 1, numel)).to(dtype)


def packed(x: torch.Tensor, bits: int, block: int, rounding: str = "nearest", seed: int = 0) -> torch.Tensor:
    out = torch.empty(len(x), packed_bytes(x.shape[1], bits, block), dtype=torch.uint8)
    quantize(x, bits, block, out, rounding, seed)
    return out


@pytest.mark.parametrize("block", [32, 64, 2048])
@pytest.mark.parametrize("bits", [8, 4])
def test_error_is_at_most_half_a_level_of_the_block(bits: int, block: int) -> None:
    x = numbers(3, 4096 + 96)
    back = torch.empty_like(x)
    dequantize(packed(x, bits, block), bits, block, back)
    for start in range(0, x.shape[1], block):
        part, error = x[:, start : start + block], (back - x)[:, start : start + block]
        half = part.abs().amax(1) / LEVELS[bits] / 2
        assert (error.abs().amax(1) <= half * 1.001).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("block", [34, 64, 2048])
@pytest.mark.parametrize("bits", [8, 4])
def test_native_is_the_reference_bit_by_bit(bits: int, block: int, dtype: torch.dtype) -> None:
    native = native_backend()
    assert native is not None
    x = numbers(4, 6400 + 32, dtype)
    x[1, :256] = 0
    found = []
    for backend in (native, REFERENCE):
        out = torch.zeros(4, packed_bytes(x.shape[1], bits, block), dtype=torch.uint8)
        backend.quantize(x, bits, block, out, None)
        back, total = torch.zeros_like(x), torch.ones(x.shape[1])
        backend.dequantize(out, bits, block, back)
        backend.dequantize_sum(out, bits, block, total, True)
        found.append((out, back, total))
    for ours, reference in zip(*found, strict=True):
        assert torch.equal(ours, reference)
    assert found[0][1].any()


def test_sum_is_that_of_the_rows() -> None:
    x = numbers(5, 640)
    out, back, total = packed(x, 4, 64), torch.empty_like(x), torch.empty(640)
    dequantize(out, 4, 64, back)
    dequantize_sum(out, 4, 64, total)
    torch.testing.assert_close(total, back.sum(0))


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_stays_so(bits: int, bad: float) -> None:
    x = numbers(1, 256)
    x[0, 70] = bad
    back = torch.empty_like(x)
    dequantize(packed(x, bits, 64), bits, 64, back)
    assert not torch.isfinite(back[0, 64:128]).all()
    assert torch.isfinite(back[0, :64]).all()


@pytest.mark.parametrize("backend", ["native", "reference"])
def test_stochastic_rounding_has_no_bias(backend: str) -> None:
    chosen: Backend | None = REFERENCE if backend == "reference" else native_backend()
    assert chosen is not None
    x = torch.rand(1, 64) * 2 - 1
    x[0, 0] = 1.0
    total, out, back = (
        torch.zeros(1, 64),
        torch.empty(1, packed_bytes(64, 4, 64), dtype=torch.uint8),
        torch.empty(1, 64),
    )
    seeds = 2000
    for seed in range(seeds):
        chosen.quantize(x, 4, 64, out, seed)
        chosen.dequantize(out, 4, 64, back)
        total += back
    # Six standard errors of a mean of values that are rounded by up to one level.
    assert (total / seeds - x).abs().max() < 6 * 0.5 / 7 / seeds**0.5


def test_odd_blocks_of_half_bytes_are_refused() -> None:
    with pytest.raises(ValueError, match="33"):
        packed_bytes(64, 4, 33)
