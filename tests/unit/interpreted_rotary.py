"""The rotary embedding in Triton's interpreter, on a CPU.

test_kernels_rotary_triton.py runs this file in a separate process, because TRITON_INTERPRET takes effect at import.
"""

from collections.abc import Iterator

import pytest
import torch
from llmtrain_kernels.rotary import op, triton_backend
from llmtrain_kernels.rotary.op import rotate, rotated
from torch import Tensor

from tests.triton_lab import counted, rounded

# Half a unit in the last place, in relation to a result.
HALF_ULP = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
# (heads, kv_heads, head_dim, pairs of rotated channels), by family and with odd sizes.
SHAPES = [(4, 2, 16, 8), (3, 3, 14, 7), (5, 1, 20, 3), (1, 1, 64, 32), (40, 8, 128, 64), (2, 2, 6, 1)]
shapes = pytest.mark.parametrize("shape", SHAPES, ids=str)


@pytest.fixture(autouse=True)
def on_triton(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Give tensors of a CPU to the kernels."""
    monkeypatch.setattr(op, "takes_triton", lambda x: True)
    with rounded(monkeypatch):
        yield


def given(shape: tuple[int, int, int, int], dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, keys and values of two sequences of three tokens, cosines and sines."""
    heads, kv_heads, dim, half = shape
    torch.manual_seed(dim)
    angles = torch.rand(3, 1, half) * 6
    return torch.randn(2, 3, heads + 2 * kv_heads, dim).to(dtype), angles.cos(), angles.sin()


@shapes
@pytest.mark.parametrize("dtype", HALF_ULP)
def test_equals_reference(dtype: torch.dtype, shape: tuple[int, int, int, int]) -> None:
    heads, kv_heads, *_ = shape
    qkv, cos, sin = given(shape, dtype)
    parts = qkv.clone().split([heads, kv_heads, kv_heads], dim=2)
    product = qkv.clone().requires_grad_() * 1
    results = rotated(product, heads, cos, sin)
    for mine, true in zip(results, (rotate(parts[0], cos, sin), rotate(parts[1], cos, sin), parts[2]), strict=True):
        assert torch.equal(mine, true)
        # No other memory is used.
        assert mine.untyped_storage().data_ptr() == product.untyped_storage().data_ptr()
    # As attention returns them: contiguous, head by head, and of a sum, which has no strides.
    of_q, of_k = torch.randn(parts[0].shape), torch.randn(parts[1].transpose(1, 2).shape).transpose(1, 2)
    grads = [of_q.to(dtype), of_k.to(dtype), torch.ones(()).to(dtype).expand(parts[2].shape)]
    exact = qkv.double().requires_grad_()
    q, k, v = exact.split([heads, kv_heads, kv_heads], dim=2)
    (true,) = torch.autograd.grad([rotate(q, cos, sin), rotate(k, cos, sin), v], exact, [one.double() for one in grads])
    (mine,) = torch.autograd.grad(results, product, grads)
    assert mine.dtype == dtype
    assert mine.is_contiguous()
    # An element is a sum of two products, which fp32 rounds in relation to the larger one: some units of 4.
    torch.testing.assert_close(mine.double(), true, rtol=HALF_ULP[dtype], atol=2.0**-21)
    assert torch.equal(mine[:, :, -kv_heads:], grads[2])


def test_strided_products() -> None:
    """With sequence parallelism the product comes as another order of tokens."""
    qkv, cos, sin = given((4, 2, 16, 8), torch.float32)
    strided = qkv.transpose(0, 1).contiguous().transpose(0, 1)
    for one, other in zip(rotated(strided, 4, cos, sin), rotated(qkv, 4, cos, sin), strict=True):
        assert torch.equal(one, other)


@shapes
def test_bytes_moved(shape: tuple[int, int, int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Two numbers per channel, and each token's cosines and sines, in the backward pass for queries and for keys."""
    heads, kv_heads, _, half = shape
    qkv, cos, sin = given(shape, torch.bfloat16)
    tables, least = 6 * 2 * half * 4, 6 * (heads + kv_heads) * 2 * half * 2
    with counted(monkeypatch) as moved:
        triton_backend.rotate_(qkv[:, :, : heads + kv_heads], cos, sin)
    assert (moved.loaded, moved.stored) == (least + tables, least)
    with counted(monkeypatch) as moved:
        q, k, v = qkv.split([heads, kv_heads, kv_heads], dim=2)
        triton_backend.backward(q, k, v, cos, sin)
    assert (moved.loaded, moved.stored) == (qkv.nbytes + 2 * tables, qkv.nbytes)
    if heads == 40:
        assert least + tables + least <= 1.1 * 2 * least
        assert qkv.nbytes + 2 * tables + qkv.nbytes <= 1.1 * 2 * qkv.nbytes
