"""The sum of squares: exact to fp64, and bit-equal for any number of threads and any split of the range."""

import pytest
import torch
from llmtrain_kernels.squared_sum.op import SQUARES_BLOCK, squared_blocks, squared_sum


@pytest.mark.parametrize("count", [0, 1, 31, SQUARES_BLOCK, 3 * SQUARES_BLOCK + 17, 200_003])
@pytest.mark.parametrize("offset", [0, 32, SQUARES_BLOCK - 32, 5 * SQUARES_BLOCK + 64])
def test_against_fp64(count: int, offset: int) -> None:
    x = 100 * torch.randn(count, generator=torch.Generator().manual_seed(count))
    found = squared_sum(x, offset)
    assert found.dtype == torch.float64
    assert float(found) == pytest.approx(float(x.double().square().sum()), rel=1e-14)


@pytest.mark.parametrize("offset", [0, SQUARES_BLOCK - 32])
@pytest.mark.parametrize("count", [0, 31, 3 * SQUARES_BLOCK + 17, 200_003])
def test_bf16_has_the_bits_of_the_same_numbers_in_fp32(count: int, offset: int) -> None:
    x = (100 * torch.randn(count, generator=torch.Generator().manual_seed(count))).bfloat16()
    assert torch.equal(squared_sum(x, offset), squared_sum(x.float(), offset))
    if count:
        assert squared_blocks(x, offset) == squared_blocks(x.float(), offset)
        assert float(squared_sum(x.half(), offset)) == pytest.approx(float(squared_sum(x.half().float(), offset)))


def test_threads_do_not_change_a_bit() -> None:
    x, threads = torch.randn(300_001), torch.get_num_threads()
    found = set()
    for count in (1, 2, 3, 7):
        torch.set_num_threads(count)
        found.add(float(squared_sum(x, 96)))
    torch.set_num_threads(threads)
    assert len(found) == 1


def test_blocks_lie_where_the_whole_has_them() -> None:
    """The sums of ranges that end at blocks' ends, added in order, are bit-equal to the sum of the entire range."""
    x = torch.randn(8 * SQUARES_BLOCK)
    whole, total = squared_sum(x, 0), torch.zeros((), dtype=torch.float64)
    for start in range(0, len(x), SQUARES_BLOCK):
        total += squared_sum(x[start : start + SQUARES_BLOCK], start)
    assert torch.equal(total, whole)


def test_what_overflows_in_fp32_and_what_is_no_number() -> None:
    assert float(squared_sum(torch.full((4,), 1e30), 0)) == pytest.approx(4e60)
    assert torch.isinf(squared_sum(torch.tensor([1.0, float("inf")]), 0))
    assert torch.isnan(squared_sum(torch.tensor([1.0, float("nan")]), 0))
