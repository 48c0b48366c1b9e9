"""Norms, activations and the rotary embedding on a GPU: Triton's kernels against torch's operations in fp64."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from llmtrain_kernels.activation.kinds import Activation
from llmtrain_kernels.activation.op import activate, reference_activate
from llmtrain_kernels.heads.op import parted
from llmtrain_kernels.norm.op import residual_norm
from llmtrain_kernels.rotary.op import rotate, rotated
from torch import Tensor

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
dtypes = pytest.mark.parametrize("dtype", TOLERANCE)


def compare(ours: Callable[..., Any], exact: Callable[..., Any], given: list[Tensor]) -> None:
    """Compare results and gradients; `exact` gets the numbers in fp64."""
    found = []
    for function, inputs in ((ours, given), (exact, [one.double() for one in given])):
        inputs = [one.detach().requires_grad_() for one in inputs]
        outputs = function(*inputs)
        torch.manual_seed(1)
        grads = [torch.randn(one.shape, device="cuda").to(given[0].dtype).to(one.dtype) for one in outputs]
        found.append([*(one.detach() for one in outputs), *torch.autograd.grad(outputs, inputs, grads)])
    for mine, true in zip(*found, strict=True):
        assert mine.dtype == given[0].dtype
        assert (mine.double() - true).norm() <= 2 * TOLERANCE[mine.dtype] * true.norm()


@dtypes
@pytest.mark.parametrize("centered", [False, True])
@pytest.mark.parametrize("shape", [(3, 33), (5000, 768), (2, 600, 2048), (300, 8192)], ids=str)
def test_norm(shape: tuple[int, ...], centered: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    width = shape[-1:]
    given = [torch.randn(size, device="cuda").to(dtype) for size in (shape, shape, width, *([width] * centered))]

    def ours(x: Tensor, added: Tensor, weight: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return residual_norm(x, added, weight, bias, 1e-5)

    def exact(x: Tensor, added: Tensor, weight: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
        # The sum is rounded; its gradient is not.
        total = x + added
        total = total + (total.to(dtype).double() - total).detach()
        if bias is None:
            return total, F.rms_norm(total, width, weight, 1e-5)
        return total, F.layer_norm(total, width, weight, bias, 1e-5)

    compare(ours, exact, given)


@dtypes
@pytest.mark.parametrize("kind", ["gelu", "gelu_tanh", "swiglu"])
@pytest.mark.parametrize("shape", [(3, 34), (300, 11008), (70_000, 6)], ids=str)
def test_activations(shape: tuple[int, ...], kind: Activation, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = (4 * torch.randn(shape, device="cuda")).to(dtype)
    compare(lambda x: (activate(x, kind),), lambda x: (reference_activate(x, kind),), [x])


@dtypes
@pytest.mark.parametrize(("heads", "kv_heads", "dim", "half"), [(12, 12, 64, 8), (32, 8, 128, 64), (5, 1, 14, 7)])
def test_rotary(heads: int, kv_heads: int, dim: int, half: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    qkv = torch.randn(3, 200, heads + 2 * kv_heads, dim, device="cuda").to(dtype)
    angles = torch.rand(200, 1, half, device="cuda") * 6
    cos, sin = angles.cos(), angles.sin()

    def exact(qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = qkv.split([heads, kv_heads, kv_heads], dim=2)
        return rotate(q, cos, sin), rotate(k, cos, sin), v

    compare(lambda qkv: rotated(qkv * 1, heads, cos, sin), exact, [qkv])
    for mine, true in zip(rotated(qkv.clone(), heads, cos, sin), exact(qkv), strict=True):
        assert torch.equal(mine, true)


@dtypes
@pytest.mark.parametrize("kind", ["gelu", "gelu_tanh"])
def test_gradients_of_biases_before_activations(kind: Activation, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, bias = torch.randn(5000, 3072, device="cuda").to(dtype), torch.zeros(3072, device="cuda", dtype=dtype)
    compare(
        lambda x, bias: (activate(x, kind, bias),), lambda x, bias: (reference_activate(x + bias, kind),), [x, bias]
    )


@dtypes
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(12, 12, 64), (32, 8, 128), (5, 1, 14)])
def test_gradients_of_biases_of_heads(heads: int, kv_heads: int, dim: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    qkv = torch.randn(3, 200, heads + 2 * kv_heads, dim, device="cuda").to(dtype)
    bias = torch.zeros(qkv.shape[2] * dim, device="cuda", dtype=dtype)

    def exact(qkv: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
        return (qkv + bias.view(-1, dim)).split([heads, kv_heads, kv_heads], dim=2)

    compare(lambda qkv, bias: parted(qkv, heads, bias), exact, [qkv, bias])
