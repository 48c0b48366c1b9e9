"""Block quantization on a GPU: Triton's kernels against the reference, with equal inputs."""

import pytest
import torch
from llmtrain_kernels.quantize.format import ELEMENT_DTYPES
from llmtrain_kernels.quantize.op import dequantize, dequantize_sum, quantize
from llmtrain_kernels.quantize.packed_size import packed_bytes
from llmtrain_kernels.quantize.reference import REFERENCE

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.parametrize(("block", "numel"), [(2, 32), (64, 4160), (100, 4160), (256, 1 << 20), (2048, 1_000_032)])
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("dtype", ELEMENT_DTYPES)
def test_equals_reference(dtype: torch.dtype, bits: int, block: int, numel: int) -> None:
    torch.manual_seed(0)
    x = (torch.randn(3, numel) * torch.rand(3, numel) ** 4 * 10).to(dtype)
    x[0, :20] = 0
    x[1, 5] = torch.inf
    x[2, 7] = torch.nan
    out = torch.full((3, packed_bytes(numel, bits, block)), 77, dtype=torch.uint8, device="cuda")
    for rounding in ("nearest", "stochastic"):
        expected = torch.empty_like(out, device="cpu")
        quantize(x, bits, block, expected, rounding, seed=5)
        quantize(x.cuda(), bits, block, out, rounding, seed=5)
        assert torch.equal(out.cpu(), expected)
    back = torch.empty(3, numel, dtype=dtype, device="cuda")
    expected_back = torch.empty(3, numel, dtype=dtype)
    dequantize(out, bits, block, back)
    REFERENCE.dequantize(out.cpu(), bits, block, expected_back)
    torch.testing.assert_close(back.cpu(), expected_back, rtol=0, atol=0, equal_nan=True)
    total = torch.arange(float(numel), device="cuda")
    expected_total = total.cpu()
    for accumulate in (True, False):
        dequantize_sum(out, bits, block, total, accumulate)
        REFERENCE.dequantize_sum(out.cpu(), bits, block, expected_total, accumulate)
        torch.testing.assert_close(total.cpu(), expected_total, rtol=0, atol=0, equal_nan=True)
