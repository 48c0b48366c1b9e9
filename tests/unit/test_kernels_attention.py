"""The CPU's attention kernel against the plain forms."""

from typing import Any

import pytest
import torch
from llmtrain_kernels.attention import op as attention
from llmtrain_kernels.attention.op import Rotary, joint_attention
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

pytestmark = pytest.mark.skipif(attention._kernel() is None, reason="no C++ compiler")


def rotary_of(positions: int, channels: int) -> Rotary:
    angles = torch.outer(torch.arange(positions), torch.logspace(0, -2, channels // 2)).unsqueeze(1)
    return angles.cos(), angles.sin()


def gradient(qkv: Tensor, heads: int, rotary: Rotary | None, grad: Tensor) -> tuple[Tensor, Tensor]:
    qkv = qkv.detach().requires_grad_()
    mixed = joint_attention(qkv, heads, rotary)
    mixed.backward(grad)
    assert qkv.grad is not None
    return mixed.detach(), qkv.grad


def exact(qkv: Tensor, heads: int, rotary: Rotary | None, grad: Tensor) -> tuple[Tensor, Tensor]:
    """Compute in fp64, which the kernel does not support."""
    rotary = rotary and (rotary[0].double(), rotary[1].double())
    return gradient(qkv.double(), heads, rotary, grad.double())


def error(ours: Tensor, exact: Tensor) -> float:
    return float((ours.double() - exact).norm() / exact.norm())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("batch", "sequence", "heads", "kv_heads", "dim", "channels"),
    [
        (2, 64, 4, 4, 64, 0),
        (3, 1, 2, 2, 16, 16),
        (1, 63, 3, 3, 8, 8),
        (2, 65, 6, 2, 20, 20),
        (1, 200, 4, 4, 33, 16),
        (2, 130, 8, 8, 128, 128),
    ],
)
def test_matches_the_plain_form(
    batch: int, sequence: int, heads: int, kv_heads: int, dim: int, channels: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    qkv = torch.randn(batch, sequence, heads + 2 * kv_heads, dim, dtype=dtype)
    grad = torch.randn(batch, sequence, heads, dim, dtype=dtype)
    rotary = rotary_of(sequence + 5, channels) if channels else None
    tolerance = {torch.float32: 2e-6, torch.bfloat16: 1e-2}[dtype]
    for ours, wanted in zip(gradient(qkv, heads, rotary, grad), exact(qkv, heads, rotary, grad), strict=True):
        assert ours.dtype == dtype
        assert error(ours, wanted) < tolerance


def test_scores_far_apart() -> None:
    """Some weights underflow, and the largest score moves from tile to tile."""
    qkv, grad = torch.randn(2, 300, 6, 16), torch.randn(2, 300, 2, 16)
    qkv[:, :, :4] *= torch.linspace(1, 12, 300)[:, None, None]
    for ours, wanted in zip(gradient(qkv, 2, None, grad), exact(qkv, 2, None, grad), strict=True):
        assert error(ours, wanted) < 1e-5


def test_not_a_number_stays() -> None:
    qkv = torch.randn(2, 10, 6, 16)
    qkv[0, 4, 0, 0] = float("nan")
    mixed = joint_attention(qkv, 2, None)
    assert mixed[0, 4, 0].isnan().all()
    assert int(mixed.isnan().sum()) == 16


def test_strided_inputs() -> None:
    wide, grads = torch.randn(2, 12, 33, 16), torch.randn(2, 2, 33, 16)
    qkv, grad = wide[:, ::2].transpose(1, 2), grads.transpose(1, 2)
    for strided, plain in zip(
        gradient(qkv, 2, None, grad), gradient(qkv.contiguous(), 2, None, grad.contiguous()), strict=True
    ):
        assert torch.equal(strided, plain)


def test_threads_do_not_change_a_bit() -> None:
    qkv, grad, before = torch.randn(3, 70, 6, 16), torch.randn(3, 70, 2, 16), torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append(gradient(qkv, 2, None, grad))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(a, b) for other in results[1:] for a, b in zip(results[0], other, strict=True))


def test_recomputed_and_with_saved_tensors_packed() -> None:
    qkv, grad, rotary = torch.randn(2, 33, 6, 16), torch.randn(2, 33, 2, 16), rotary_of(33, 16)
    _, wanted = gradient(qkv, 2, rotary, grad)
    again = qkv.clone().requires_grad_()
    recomputed = checkpoint(joint_attention, again, 2, rotary, use_reentrant=False)
    recomputed.backward(grad)
    assert again.grad is not None
    assert torch.equal(again.grad, wanted)
    packed = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: packed.append(x) or x.clone(), lambda x: x):
        again = again.detach().requires_grad_()
        mixed = joint_attention(again, 2, rotary)
    assert any(x.data_ptr() == again.data_ptr() for x in packed)
    mixed.backward(grad)
    assert again.grad is not None
    assert torch.equal(again.grad, wanted)


def test_the_operator_is_sound() -> None:
    """torch.compile relies on shapes without data, and on a gradient that can be traced."""
    qkv = torch.randn(2, 5, 6, 8, requires_grad=True)
    operator: Any = attention._joint_attention
    torch.library.opcheck(operator, (qkv, *(table for table in rotary_of(5, 8)), 2))


@pytest.mark.parametrize(
    ("dtype", "dim", "dropout", "capability", "shared"),
    [
        (torch.bfloat16, 64, 0.0, (9, 0), True),
        (torch.float16, 64, 0.1, (8, 0), True),
        (torch.float16, 64, 0.0, (7, 5), False),
        (torch.bfloat16, 320, 0.0, (9, 0), False),
        (torch.float32, 64, 0.0, (9, 0), False),
        (torch.bfloat16, 192, 0.1, (8, 9), True),
        (torch.bfloat16, 224, 0.0, (8, 9), False),
        (torch.bfloat16, 256, 0.0, (8, 6), True),
        (torch.bfloat16, 256, 0.1, (12, 0), False),
        (torch.bfloat16, 256, 0.1, (10, 0), True),
    ],
)
def test_only_flash_attention_shares_keys_on_gpus(
    dtype: torch.dtype,
    dim: int,
    dropout: float,
    capability: tuple[int, int],
    shared: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each other kernel gets the keys and values of each query head."""
    given: list[tuple[int, bool]] = []

    def attend(q: Tensor, k: Tensor, v: Tensor, enable_gqa: bool, **others: object) -> Tensor:
        assert k.shape == v.shape
        given.append((k.shape[1], enable_gqa))
        return torch.empty_like(q)

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(attention.F, "scaled_dot_product_attention", attend)
    with FakeTensorMode():
        q, k, v = (torch.empty(2, 8, heads, dim, dtype=dtype, device="cuda") for heads in (6, 2, 2))
        attention.causal_attention(q, k, v, dropout)
    assert given == [(2, True)] if shared else [(6, False)]


def test_keys_of_each_query_head() -> None:
    """The same results and gradients as with keys that query heads share."""
    drawn = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 8, heads, 16, generator=drawn, requires_grad=True) for heads in (6, 2, 2))
    shared = attention.causal_attention(q, k, v)
    separate = attention.causal_attention(q, attention._of_each_query(k, 6), attention._of_each_query(v, 6))
    torch.testing.assert_close(separate, shared)
    above = torch.randn(shared.shape, generator=drawn)
    for ours, theirs in zip(*(torch.autograd.grad(y, (q, k, v), above) for y in (separate, shared)), strict=True):
        torch.testing.assert_close(ours, theirs)
