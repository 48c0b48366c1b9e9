"""The sum of squares on a GPU: the blocks have the bits of the CPU."""

import pytest
import torch
from llmtrain_kernels.squared_sum.op import SQUARES_BLOCK, squared_blocks, squared_sum

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.parametrize("offset", [0, 1, 96, SQUARES_BLOCK - 1])
@pytest.mark.parametrize("numel", [1, 15, SQUARES_BLOCK + 17, (1 << 22) + 5])
def test_blocks_have_the_bits_of_the_cpu(numel: int, offset: int) -> None:
    torch.manual_seed(0)
    x = torch.randn(numel) * torch.exp(8 * torch.randn(numel))
    assert squared_blocks(x.cuda(), offset) == squared_blocks(x, offset)
    assert float(squared_sum(x.cuda(), offset)) == pytest.approx(float(squared_sum(x, offset)), rel=1e-14)
