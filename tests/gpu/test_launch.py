"""A kernel whose compiled form is called again has the bits of the launch that found it."""

from collections.abc import Callable

import pytest
import torch
from llmtrain_kernels import triton_launch
from llmtrain_kernels.accumulate.op import accumulate
from llmtrain_kernels.activation.op import activate
from llmtrain_kernels.norm.op import residual_norm
from llmtrain_kernels.squared_sum.op import squared_sum
from torch import Tensor

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def normed(x: Tensor) -> list[Tensor]:
    x = x.detach().requires_grad_()
    weight = torch.linspace(-1, 1, x.shape[1], device="cuda", dtype=x.dtype)
    total, y = residual_norm(x, x, weight, None, 1e-5)
    return [total, y, *torch.autograd.grad((total, y), [x], (x.detach(), y.detach()))]


def added(x: Tensor) -> list[Tensor]:
    flat = torch.ones(2 * x.numel(), device="cuda")
    accumulate(flat, [0, x.numel()], [x, x + 1], overwrite=False)
    return [flat]


KERNELS: dict[str, Callable[[Tensor], list[Tensor]]] = {
    "norm": normed,
    "accumulate": added,
    "activation": lambda x: [activate(x, "swiglu")],
    "squared_sum": lambda x: [squared_sum(x.flatten(), 0)],
}


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("first", [0, 8, 1])
def test_repeated_launches(name: str, first: int) -> None:
    """From element 1 on, addresses are no multiples of 16 bytes, so Triton finds the form each time."""
    torch.manual_seed(0)
    x = torch.randn(64 * 768 + 8, device="cuda").bfloat16()[first : first + 64 * 768].view(64, 768)
    triton_launch._forms.cache_clear()
    wanted = KERNELS[name](x)
    for _ in range(2):
        for mine, true in zip(KERNELS[name](x), wanted, strict=True):
            assert torch.equal(mine, true)


def test_another_stream() -> None:
    """The form is launched on the current stream, not on that of its first launch."""
    x, stream = torch.randn(8192, 4096, device="cuda"), torch.cuda.Stream()
    wanted = activate(x, "gelu")
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        late = x.clone()
        for _ in range(50):
            late = late * 1.0
        found = activate(late, "gelu")
    stream.synchronize()
    assert torch.equal(found, wanted)
