"""Cross-entropy on a GPU: Triton's kernels against torch's operations in fp64, with equal inputs."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from llmtrain_kernels.cross_entropy import chunks
from llmtrain_kernels.cross_entropy.chunks import row_stride
from llmtrain_kernels.cross_entropy.op import linear_cross_entropy, scaled
from llmtrain_kernels.cross_entropy.partial import ReferenceLosses, TritonLosses

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 1e-2}
both_dtypes = pytest.mark.parametrize("dtype", TOLERANCE)


def triton_backend() -> Any:
    """Return the kernels; not every machine has Triton."""
    from llmtrain_kernels.cross_entropy import triton_backend

    return triton_backend


def with_gap(x: torch.Tensor) -> torch.Tensor:
    """Copy rows to memory in which each begins at a multiple of 64 elements."""
    rows, width = x.shape
    return x.new_empty(rows, row_stride("cuda", width))[:, :width].copy_(x)


@both_dtypes
@pytest.mark.parametrize("vocab", [61, 8193, 50257, 128256])
def test_rows(vocab: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = torch.randn(37, vocab, device="cuda").mul_(4).to(dtype)
    logits = with_gap(x)
    targets = torch.randint(0, vocab, (37,), device="cuda")
    exact = x.double().requires_grad_()
    expected = F.cross_entropy(exact, targets, reduction="none")
    (gradient,) = torch.autograd.grad(expected.sum(), exact)
    losses = triton_backend().losses(logits, targets, True)
    torch.testing.assert_close(losses.double(), expected.detach(), rtol=2e-6, atol=2e-6)
    assert (logits.double() - gradient).norm() <= TOLERANCE[dtype] * gradient.norm()


def test_more_logits_than_32_bits_count() -> None:
    if torch.cuda.mem_get_info()[0] < 8 * 2**30:
        pytest.skip("needs 8 GiB of a GPU")
    rows, vocab = 16_800, 128_256
    assert rows * vocab > 2**31
    torch.manual_seed(0)
    logits = torch.empty(rows, row_stride("cuda", vocab), dtype=torch.bfloat16, device="cuda")[:, :vocab].normal_()
    targets, last = torch.randint(0, vocab, (rows,), device="cuda"), logits[-8:].double()
    expected = F.cross_entropy(last.requires_grad_(), targets[-8:], reduction="none")
    (gradient,) = torch.autograd.grad(expected.sum(), last)
    losses = triton_backend().losses(logits, targets, True)
    torch.testing.assert_close(losses[-8:].double(), expected.detach(), rtol=2e-6, atol=2e-6)
    assert (logits[-8:].double() - gradient).norm() <= TOLERANCE[torch.bfloat16] * gradient.norm()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_factors_of_gradients_have_32_bits(dtype: torch.dtype) -> None:
    """Also where they multiply 16-bit gradients."""
    torch.manual_seed(0)
    grad_x, grad_weight = torch.randn(1000, device="cuda").to(dtype), torch.randn(1000, device="cuda")
    factor = torch.tensor(1 / (480 * 2048), device="cuda")
    expected = [(values.float() * factor).to(dtype) for values in (grad_x, grad_weight)]
    for ours, exact in zip(scaled(grad_x, grad_weight, factor), expected, strict=True):
        assert torch.equal(ours, exact)


@both_dtypes
def test_shares_of_a_vocabulary(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, targets = torch.randn(37, 25129, device="cuda").mul_(4).to(dtype), torch.randint(-9000, 34000, (37,)).cuda()
    ours, theirs = (with_gap(x) for _ in range(2))
    mine, reference = TritonLosses(ours, targets), ReferenceLosses(theirs, targets)
    torch.testing.assert_close(mine.statistics, reference.statistics, rtol=1e-5, atol=1e-6)
    top, total, _ = reference.statistics
    for one in (mine, reference):
        one.write_gradient(top + 1, total * 2)
    assert (ours.double() - theirs.double()).norm() <= TOLERANCE[dtype] * theirs.double().norm()


@both_dtypes
@pytest.mark.parametrize("elements", [1 << 27, 100 * 50257])
def test_with_the_products(elements: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one chunk, and in several, whose products of the weight add up in fp32."""
    monkeypatch.setattr(chunks, "CHUNK_ELEMENTS", {"cuda": elements})
    monkeypatch.setattr(chunks, "MIN_ROWS", 1)
    torch.manual_seed(0)
    x, weight = torch.randn(300, 64, device="cuda").to(dtype), torch.randn(50257, 64, device="cuda").to(dtype)
    targets, results = torch.randint(0, 50257, (300,), device="cuda"), []
    for ours in (True, False):
        rows, table = ((t if ours else t.double()).detach().requires_grad_() for t in (x, weight))
        loss = linear_cross_entropy(rows, table, targets) if ours else F.cross_entropy(rows @ table.t(), targets)
        results.append([loss.detach(), *torch.autograd.grad(loss, (rows, table))])
    # Logits of bf16 are rounded.
    for mine, exact in zip(*results, strict=True):
        assert (mine.double() - exact).norm() <= 2 * TOLERANCE[dtype] * exact.norm()
