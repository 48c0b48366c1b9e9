"""AdamW on a GPU: bits equal the reference's, wherever a range is cut."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from llmtrain_kernels.adamw.op import adamw
from llmtrain_kernels.adamw.step import AdamWStep

from tests.adamw_states import cut

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

NUMBERS = AdamWStep(step=1, lr=1e-2, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("numel", [1, 1023, 1024, 70_001, (1 << 22) + 3])
def test_equals_reference_on_the_cpu(numel: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    theirs = (torch.randn(numel), torch.zeros(numel), torch.zeros(numel))
    ours = (theirs[0].cuda(), theirs[1].cuda(), theirs[2].cuda())
    weights = [torch.zeros(numel, dtype=dtype, device=at) for at in ("cuda", "cpu")]
    places = sorted({0, numel // 3, numel // 2, numel})
    decay = [(start, end, number % 2 == 0) for number, (start, end) in enumerate(pairwise(places))]
    for step in range(1, 4):
        gradient = torch.randn(numel) * torch.exp(4 * torch.randn(numel))
        here = replace(NUMBERS, step=step, gradient_divisor=torch.tensor(1.7))
        adamw("reference", *theirs, gradient, here, weights[1], decay=decay)
        # The second half is cut off.
        for first, last in ((0, numel // 2), (numel // 2, numel)):
            parts = [(max(a, first) - first, min(b, last) - first, decays) for a, b, decays in decay]
            parts = [part for part in parts if part[0] < part[1]]
            own = slice(first, last)
            adamw("triton", *cut(ours, own), gradient.cuda()[own], here, weights[0][own], decay=parts)
    for one, other in zip([*ours, weights[0]], [*theirs, weights[1]], strict=True):
        assert torch.equal(one.cpu(), other)
