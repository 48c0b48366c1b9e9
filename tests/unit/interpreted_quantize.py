"""The Triton kernels of block quantization in Triton's interpreter, on a CPU.

test_kernels_quantize_triton.py runs this file in a separate process, because TRITON_INTERPRET takes effect at import.
"""

from collections.abc import Iterator

import pytest
import torch
from llmtrain_kernels.quantize import triton_backend
from llmtrain_kernels.quantize.format import ELEMENT_DTYPES
from llmtrain_kernels.quantize.packed_size import packed_bytes
from llmtrain_kernels.quantize.reference import REFERENCE

from tests.triton_lab import counted, rounded


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with rounded(monkeypatch):
        yield


@pytest.mark.parametrize("block", [64, 256, 2048])
@pytest.mark.parametrize("bits", [8, 4])
def test_bytes_moved(bits: int, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers are read once and written once, in both forms."""
    x = torch.randn(3, 4160).bfloat16()
    packed, sums = torch.empty(3, packed_bytes(4160, bits, block), dtype=torch.uint8), torch.zeros(4160)
    with counted(monkeypatch) as moved:
        triton_backend.quantize(x, bits, block, packed, None)
    assert (moved.loaded, moved.stored) == (x.nbytes, packed.nbytes)
    with counted(monkeypatch) as moved:
        triton_backend.dequantize(packed, bits, block, x)
    assert (moved.loaded, moved.stored) == (packed.nbytes, x.nbytes)
    for accumulate in (True, False):
        with counted(monkeypatch) as moved:
            triton_backend.dequantize_sum(packed, bits, block, sums, accumulate)
        assert (moved.loaded, moved.stored) == (packed.nbytes + accumulate * sums.nbytes, sums.nbytes)


@pytest.mark.parametrize(("block", "numel"), [(2, 32), (64, 4160), (100, 4160), (2048, 4160)])
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("dtype", ELEMENT_DTYPES)
def test_equals_reference(dtype: torch.dtype, bits: int, block: int, numel: int) -> None:
    torch.manual_seed(0)
    x = (torch.randn(3, numel) * torch.rand(3, numel) ** 4 * 10).to(dtype)
    x[0, :20] = 0
    x[1, 5] = torch.inf
    x[2, 7] = torch.nan
    for key in (None, 3 << 40 | 5, 1 << 31):
        ours, theirs = (torch.full((3, packed_bytes(numel, bits, block)), 77, dtype=torch.uint8) for _ in range(2))
        triton_backend.quantize(x, bits, block, ours, key)
        REFERENCE.quantize(x, bits, block, theirs, key)
        assert torch.equal(ours, theirs)
    ours_out, theirs_out = torch.full((2, 3, numel), 77.0, dtype=dtype)
    triton_backend.dequantize(ours, bits, block, ours_out)
    REFERENCE.dequantize(ours, bits, block, theirs_out)
    torch.testing.assert_close(ours_out, theirs_out, rtol=0, atol=0, equal_nan=True)
    ours_sum = torch.arange(float(numel))
    theirs_sum = ours_sum.clone()
    for accumulate in (True, False):
        triton_backend.dequantize_sum(ours, bits, block, ours_sum, accumulate)
        REFERENCE.dequantize_sum(ours, bits, block, theirs_sum, accumulate)
        torch.testing.assert_close(ours_sum, theirs_sum, rtol=0, atol=0, equal_nan=True)
