"""Block quantization: the C++ kernels against the reference, and the format's guarantees."""

import threading
from typing import Any, cast

import pytest
import torch
from llmtrain_kernels import native
from llmtrain_kernels.quantize import cpu
from llmtrain_kernels.quantize import op as module
from llmtrain_kernels.quantize.format import ELEMENT_DTYPES
from llmtrain_kernels.quantize.op import dequantize, dequantize_sum, quantize
from llmtrain_kernels.quantize.packed_size import MAX_CODE, packed_bytes
from llmtrain_kernels.quantize.reference import REFERENCE
from torch import Tensor

SHAPES = [(2, 32), (64, 96), (100, 4160), (2048, 32), (2048, 100_000)]  # with short last blocks and odd lengths


def numbers(numel: int, dtype: torch.dtype) -> Tensor:
    """Return three rows of numbers of all sizes: blocks of zeros, of tiny numbers, with infinity, and with NaN."""
    torch.manual_seed(numel)
    x = (torch.randn(3, numel) * torch.rand(3, numel) ** 4 * 10).to(dtype)
    x[0, :20] = 0
    x[0, 20:24] = 1e-7
    x[1, 5] = torch.inf
    x[2, 7] = torch.nan
    x[2, 20:26] = 1e-37
    return x


def packed(x: Tensor, bits: int, block: int, **how: Any) -> Tensor:
    out = torch.full((len(x), packed_bytes(x.shape[1], bits, block)), 77, dtype=torch.uint8)
    quantize(x, bits, block, out, **how)
    return out


def unpacked(buffer: Tensor, bits: int, block: int, numel: int, dtype: torch.dtype = torch.float32) -> Tensor:
    out = torch.full((len(buffer), numel), 77, dtype=dtype)
    dequantize(buffer, bits, block, out)
    return out


def assert_same(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("key", [None, 3 << 40 | 5])
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("dtype", ELEMENT_DTYPES)
def test_native_equals_reference(dtype: torch.dtype, bits: int, key: int | None) -> None:
    backend = cpu.native_backend()
    assert backend is not None, native.native_reason(("quantize",))
    for block, numel in SHAPES:
        x = numbers(numel, dtype)
        ours, theirs = (torch.full((3, packed_bytes(numel, bits, block)), 77, dtype=torch.uint8) for _ in range(2))
        backend.quantize(x, bits, block, ours, key)
        REFERENCE.quantize(x, bits, block, theirs, key)
        assert torch.equal(ours, theirs)
        ours_out, theirs_out = torch.full((2, 3, numel), 77.0, dtype=dtype)
        backend.dequantize(ours, bits, block, ours_out)
        REFERENCE.dequantize(ours, bits, block, theirs_out)
        assert_same(ours_out, theirs_out)
        for rows in (1, 3, 7):
            many = ours[torch.arange(rows) % 3]
            ours_sum = torch.arange(float(numel))
            theirs_sum = ours_sum.clone()
            for accumulate in (True, False):
                backend.dequantize_sum(many, bits, block, ours_sum, accumulate)
                REFERENCE.dequantize_sum(many, bits, block, theirs_sum, accumulate)
                assert_same(ours_sum, theirs_sum)


@pytest.mark.parametrize("bits", [8, 4])
def test_format(bits: int) -> None:
    """Whole numbers up to the largest code are their own codes; scales follow the payload."""
    most = MAX_CODE[bits]
    x = torch.tensor([most, -most, 0.5, 1.5, 2.5, -1.5, 3, 0] * 8).view(1, 64)
    buffer = packed(x, bits, 32)
    payload, scales = buffer[0].tensor_split([64 * bits // 8])
    assert scales.view(torch.float32).tolist() == [1.0, 1.0]
    codes = x.round().to(torch.int8).view(2, 32)  # ties to even
    expected = codes if bits == 8 else codes[:, :16] & 15 | codes[:, 16:] << 4
    assert payload.tolist() == expected.view(torch.uint8).flatten().tolist()


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_error_is_below_a_step(bits: int, rounding: str) -> None:
    x = torch.randn(2, 5000 // 32 * 32)
    back = unpacked(packed(x, bits, 128, rounding=rounding, seed=1), bits, 128, x.shape[1])
    for values, quantized in zip(x.split(128, 1), back.split(128, 1), strict=True):
        step = values.abs().amax(1, keepdim=True) / MAX_CODE[bits]
        assert ((values - quantized).abs() <= step * (0.5 if rounding == "nearest" else 1.0) * (1 + 1e-5)).all()


@pytest.mark.parametrize("bits", [8, 4])
def test_packing_again_changes_nothing(bits: int) -> None:
    buffer = packed(torch.randn(1, 4096), bits, 64)
    again = packed(unpacked(buffer, bits, 64, 4096), bits, 64)
    payload = 4096 * bits // 8
    assert torch.equal(buffer[:, :payload], again[:, :payload])


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
def test_what_is_not_finite_stays_so(bits: int, bad: float) -> None:
    x = torch.randn(2, 256)
    x[1, 100] = bad
    buffer = packed(x, bits, 64)
    for dtype in ELEMENT_DTYPES:
        finite = unpacked(buffer, bits, 64, 256, dtype).isfinite()
        assert finite.sum() == 2 * 256 - 64
        assert not finite[1, 64:128].any()
    total = torch.zeros(256)
    dequantize_sum(buffer, bits, 64, total)
    assert total.isfinite().tolist() == finite[1].tolist()


@pytest.mark.parametrize("bits", [8, 4])
def test_zeros_stay_zeros(bits: int) -> None:
    x = torch.zeros(1, 96)
    x[0, 64:] = 1.0
    for rounding in ("nearest", "stochastic"):
        back = unpacked(packed(x, bits, 32, rounding=rounding, seed=9), bits, 32, 96)
        assert (back[0, :64] == 0).all()
        assert (back[0, 64:] == 1).all()


@pytest.mark.parametrize("bits", [8, 4])
def test_stochastic_rounding_is_unbiased(bits: int) -> None:
    """One value's rounding has a standard deviation of half a step at most; no mean may be off by six of its own."""
    x = torch.rand(2, 128) * 2 - 1
    x[:, ::64] = 1.0
    seeds = 4096
    mean = torch.stack(
        [unpacked(packed(x, bits, 64, rounding="stochastic", seed=s), bits, 64, 128) for s in range(seeds)]
    )
    errors = (mean.mean(0) - x) * MAX_CODE[bits]
    assert errors.abs().max() < 6 * 0.5 / seeds**0.5
    assert errors.mean().abs() < 6 * 0.5 / (seeds * x.numel()) ** 0.5
    # Neighbours, halves of blocks, rows and seeds are rounded independently of each other.
    noise = (mean - x) * MAX_CODE[bits]
    halves = noise.unflatten(2, (2, 2, 32))
    pairs = (noise[:, :, 1:], noise[:, :, :-1]), (noise[:, 0], noise[:, 1]), (noise[1:], noise[:-1])
    for a, b in (*pairs, (halves[:, :, :, 0], halves[:, :, :, 1])):
        assert (a * b).mean().abs() < 6 * 0.25 / a.numel() ** 0.5


@pytest.mark.parametrize("bits", [8, 4])
def test_no_dither_leads_past_the_largest_code(bits: int) -> None:
    """A code beyond the largest would have the other sign. There are enough elements for each of the 2^16 dithers; if a
    quotient is rounded down, the code below is allowed."""
    x = (1 + torch.rand(1, 1 << 15, 1)).expand(-1, -1, 32).flatten(1) * torch.tensor([1.0, -1.0]).repeat(1 << 19)
    back = unpacked(packed(x, bits, 32, rounding="stochastic", seed=3), bits, 32, x.shape[1])
    assert ((back - x).abs() <= x.abs() * (1.001 / MAX_CODE[bits])).all()
    assert (back.abs() <= x.abs() * (1 + 1e-6)).all()


@pytest.mark.parametrize("bits", [8, 4])
def test_sum_is_that_of_the_rows(bits: int) -> None:
    buffer = packed(torch.randn(5, 640), bits, 64)
    total = torch.full((640,), 2.0)
    dequantize_sum(buffer, bits, 64, total, accumulate=True)
    torch.testing.assert_close(total, unpacked(buffer, bits, 64, 640).sum(0) + 2.0)


def test_rows_that_lie_apart() -> None:
    x = torch.randn(3, 512)[:, 128:256]
    whole = torch.zeros(3, 200, dtype=torch.uint8)
    quantize(x, 8, 64, whole[:, 4 : 4 + 136])
    assert torch.equal(whole[:, 4:140], packed(x.contiguous(), 8, 64))
    assert not whole[:, :4].any()
    assert not whole[:, 140:].any()
    back = torch.zeros(3, 300)
    dequantize(whole[:, 4:140], 8, 64, back[:, 20:148])
    assert torch.equal(back[:, 20:148], unpacked(whole[:, 4:140], 8, 64, 128))
    assert not back[:, 148:].any()


def test_any_number_of_threads_gives_the_same() -> None:
    x = torch.randn(3, 64_000)
    expected = packed(x, 4, 128)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        buffers = []
        thread = threading.Thread(target=lambda: buffers.append(packed(x, 4, 128)))
        thread.start()
        buffers.append(packed(x, 4, 128))
        thread.join()
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(buffer, expected) for buffer in buffers)


def test_reference_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(2, 256)
    expected = packed(x, 4, 64)
    monkeypatch.setattr(cpu, "native_functions", lambda *_, **__: None)
    module._backend.cache_clear()
    try:
        assert module._backend("cpu") is REFERENCE
        assert torch.equal(packed(x, 4, 64), expected)
    finally:
        module._backend.cache_clear()


def test_packed_bytes() -> None:
    assert packed_bytes(4096, 8, 2048) == 4096 + 8
    assert packed_bytes(4096 + 32, 4, 2048) == 2048 + 16 + 12
    assert packed_bytes(0, 4, 2048) == 0


@pytest.mark.parametrize(("numel", "bits", "block"), [(64, 4, 63), (64, 5, 64), (64, 8, 0), (63, 8, 32)])
def test_numbers_that_do_not_fit(numel: int, bits: int, block: int) -> None:
    with pytest.raises(ValueError, match="expected"):
        packed_bytes(numel, bits, block)


def test_tensors_that_do_not_fit() -> None:
    x, out = torch.randn(2, 64), torch.zeros(2, 72, dtype=torch.uint8)
    quantize(x, 8, 32, out)
    for wrong in ((x.double(), out), (x, out[:1]), (x, out.int()), (x[:, ::2].repeat(1, 2).t().contiguous().t(), out)):
        with pytest.raises(ValueError, match="expected"):
            quantize(wrong[0], 8, 32, wrong[1])
    with pytest.raises(ValueError, match="expected"):
        quantize(x, 8, 32, torch.zeros(2 * 72 + 1, dtype=torch.uint8)[1:].view(2, 72))
    with pytest.raises(ValueError, match="expected 'nearest' or 'stochastic'"):
        quantize(x, 8, 32, out, rounding=cast(Any, "up"))
    with pytest.raises(ValueError, match="sums are"):
        dequantize_sum(out, 8, 32, torch.zeros(64, dtype=torch.bfloat16))


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_values_that_were_packed_stay(dtype: torch.dtype, bits: int) -> None:
    """A skipped step sends its weights again, which are unpacked already: 16-bit ones to the bit, fp32 ones within the
    rounding of a scale."""
    for seed in range(20):
        torch.manual_seed(seed)
        once = torch.randn(1, 8192) * 10 ** float(torch.rand(1) * 6 - 4)
        once = unpacked(packed(once.to(dtype), bits, 256), bits, 256, 8192, dtype)
        twice = unpacked(packed(once, bits, 256), bits, 256, 8192, dtype)
        torch.testing.assert_close(twice, once, rtol=3e-7 if dtype == torch.float32 else 0, atol=0)
