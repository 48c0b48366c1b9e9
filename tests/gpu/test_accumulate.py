"""Gradients added to a flat sum on a GPU have the bits of a CPU."""

import pytest
import torch
from llmtrain_kernels.accumulate.op import accumulate

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("summed", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("first", [0, 7])
def test_has_the_bits_of_a_cpu(first: int, dtype: torch.dtype, summed: torch.dtype, overwrite: bool) -> None:
    torch.manual_seed(0)
    shapes, starts, place = [(2048,), (3, 2048), (50257, 16), (1,), (0,), (4096, 1024)], [], first
    for shape in shapes:
        starts.append(place)
        place += torch.Size(shape).numel()
    flat = torch.randn(place + 5).to(summed)
    gradients = [torch.randn(shape).to(dtype) for shape in shapes]
    ours = flat.cuda()
    accumulate(ours, starts, [one.cuda() for one in gradients], overwrite)
    accumulate(flat, starts, gradients, overwrite)
    assert torch.equal(ours.cpu(), flat)
