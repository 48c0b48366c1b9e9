"""The joined gradient of queries, keys and values in Triton's interpreter, on a CPU.

test_kernels_heads_triton.py runs this file in a separate process, because TRITON_INTERPRET takes effect at import.
"""

import pytest
import torch
from llmtrain_kernels.heads import triton_backend
from llmtrain_kernels.heads.op import parted

from tests.triton_lab import counted, rounded

# (heads, kv_heads, head_dim)
SHAPES = [(4, 2, 16), (3, 3, 14), (5, 1, 20), (1, 1, 64), (12, 12, 64)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_equals_reference(dtype: torch.dtype, shape: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    heads, kv_heads, dim = shape
    monkeypatch.setattr(triton_backend, "PROGRAMS", 6)
    qkv = torch.randn(2, 13, heads + 2 * kv_heads, dim, dtype=dtype, requires_grad=True)
    bias = torch.zeros(qkv.shape[2] * dim, dtype=dtype, requires_grad=True)
    # As attention returns them: contiguous, head by head, and of a sum, which has no strides.
    q = torch.randn(2, 13, heads, dim).to(dtype)
    k = torch.randn(2, kv_heads, 13, dim).to(dtype).transpose(1, 2)
    v = torch.ones((), dtype=dtype).expand(2, 13, kv_heads, dim)
    with rounded(monkeypatch):
        results = parted(qkv, heads, bias)
        of_qkv, of_bias = torch.autograd.grad(results, (qkv, bias), (q, k, v))
    for mine, true in zip(results, qkv.split([heads, kv_heads, kv_heads], dim=2), strict=True):
        assert torch.equal(mine, true)
    exact = torch.cat((q, k, v), dim=2)
    assert torch.equal(of_qkv, exact)
    assert of_bias.dtype == dtype
    rtol = {torch.float32: 1e-6, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}[dtype]
    torch.testing.assert_close(of_bias.double(), exact.double().sum((0, 1)).flatten(), rtol=rtol, atol=4e-6)


def test_bytes_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each number is read once and written once, and the sums are written once per program."""
    q = torch.randn(2, 50, 4, 64).bfloat16()
    monkeypatch.setattr(triton_backend, "PROGRAMS", 6)
    with counted(monkeypatch) as moved:
        triton_backend.join_and_sum(q, q, q)
    assert (moved.loaded, moved.stored) == (3 * q.nbytes, 3 * q.nbytes + 2 * 768 * 4)
