"""The sum of squares in Triton's interpreter, on a CPU.

test_kernels_squared_sum_triton.py runs this file in a separate process, because TRITON_INTERPRET takes effect at
import.
"""

import pytest
import torch
from llmtrain_kernels.native import native_reason
from llmtrain_kernels.squared_sum.op import SQUARES_BLOCK, squared_blocks
from llmtrain_kernels.squared_sum.triton_backend import GROUP, block_sums

from tests.triton_lab import counted


@pytest.mark.parametrize("first", [0, 96, SQUARES_BLOCK - 1])
@pytest.mark.parametrize("numel", [0, 15, SQUARES_BLOCK + 17, (GROUP + 2) * SQUARES_BLOCK + 5])
def test_blocks_have_the_bits_of_the_cpu(numel: int, first: int) -> None:
    assert native_reason(("squared_sum",)) is None
    torch.manual_seed(numel)
    x = torch.randn(numel) * torch.exp(8 * torch.randn(numel))
    expected = squared_blocks(x, first) if numel else []
    assert block_sums(x, first, SQUARES_BLOCK).tolist() == expected


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_numbers(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = torch.randn(2 * SQUARES_BLOCK + 17).to(dtype)
    assert block_sums(x, 96, SQUARES_BLOCK).tolist() == squared_blocks(x.float(), 96)


def test_overflow_and_numbers_that_are_not_finite() -> None:
    x = torch.ones(2 * SQUARES_BLOCK)
    x[0], x[SQUARES_BLOCK] = 1e30, torch.inf
    assert block_sums(x, 0, SQUARES_BLOCK).tolist() == [pytest.approx(1e60), torch.inf]
    x[SQUARES_BLOCK] = torch.nan
    assert block_sums(x, 0, SQUARES_BLOCK).isnan().tolist() == [False, True]


def test_bytes_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(3 * SQUARES_BLOCK + 7)
    with counted(monkeypatch) as moved:
        block_sums(x, 5, SQUARES_BLOCK)
    assert (moved.loaded, moved.stored) == (x.nbytes, 4 * 8)
