"""Kernels against their references."""

import pytest
import torch
import torch.nn.functional as F
from llmtrain_kernels.adamw.op import adamw
from llmtrain_kernels.adamw.step import AdamWStep
from llmtrain_kernels.attention.op import causal_attention, reference_attention
from llmtrain_kernels.cross_entropy import chunks, op
from llmtrain_kernels.cross_entropy.op import linear_cross_entropy, reference_linear_cross_entropy


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_attention_matches_reference(kv_heads: int) -> None:
    q = torch.randn(2, 17, 4, 8)
    k, v = torch.randn(2, 2, 17, kv_heads, 8)
    torch.testing.assert_close(causal_attention(q, k, v).double(), reference_attention(q, k, v), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rows", [1, 5, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_linear_cross_entropy_matches_reference(rows: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunks, "CHUNK_ELEMENTS", {"cpu": rows * 31})
    monkeypatch.setattr(chunks, "MIN_ROWS", 1)
    x, weight = torch.randn(13, 16), torch.randn(31, 16)
    targets = torch.randint(0, 31, (13,))
    losses, gradients = [], []
    for function in (linear_cross_entropy, reference_linear_cross_entropy):
        rows_in, table = (t.to(dtype).requires_grad_() for t in (x, weight))
        loss = function(rows_in, table, targets) * 3.0
        loss.backward()
        losses.append(loss.detach())
        gradients.append([rows_in.grad, table.grad])
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype]
    torch.testing.assert_close(*losses, rtol=tolerance, atol=tolerance)
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("rows", [5, 64])
def test_rows_of_padding_change_nothing(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on GPUs. All logits are far below 0, so that the exponential of the padding's would be infinite."""
    monkeypatch.setattr(chunks, "CHUNK_ELEMENTS", {"cpu": rows * 31})
    monkeypatch.setattr(chunks, "MIN_ROWS", 1)
    monkeypatch.setattr(op, "_kernel", lambda: None)
    x, weight, targets = torch.rand(13, 16) + 10, torch.rand(31, 16) - 10, torch.randint(0, 31, (13,))
    found = []
    for width in (31, 64):
        monkeypatch.setattr(op, "row_stride", lambda device, vocab, width=width: width)
        inputs = (x.clone().requires_grad_(), weight.clone().requires_grad_())
        loss = linear_cross_entropy(inputs[0], inputs[1], targets)
        found.append([loss.detach(), *torch.autograd.grad(loss, inputs)])
        assert op.padded(weight).shape == (width, 16)
    for padded, plain in zip(*found, strict=True):
        torch.testing.assert_close(padded, plain)


def test_gradients_of_a_tied_embedding_are_added_in_place() -> None:
    """Otherwise their sum takes memory of its own, which was 3% of a step on CPUs."""
    weight, tokens = torch.randn(31, 16, requires_grad=True), torch.randint(0, 31, (13,))
    loss = linear_cross_entropy(F.embedding(tokens, weight), weight, tokens)
    with torch.profiler.profile() as profile:
        loss.backward()
    called = [event.name for event in profile.events()]
    assert "aten::add_" in called
    assert "aten::add" not in called


def test_linear_cross_entropy_without_gradients() -> None:
    x, weight, targets = torch.randn(5, 4), torch.randn(7, 4), torch.randint(0, 7, (5,))
    with torch.no_grad():
        loss = linear_cross_entropy(x.requires_grad_(), weight.requires_grad_(), targets)
    torch.testing.assert_close(loss, reference_linear_cross_entropy(x, weight, targets).detach())


@pytest.mark.parametrize("divisor", [None, 7.5])
@pytest.mark.parametrize("backend", ["cpu", "reference", "torch"])
def test_adamw_matches_torch_optimizer(backend: str, divisor: float | None) -> None:
    start = torch.randn(1000)
    theirs = torch.nn.Parameter(start.clone())
    optimizer = torch.optim.AdamW([theirs], lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.3)
    master = start.clone()
    m, v = torch.zeros(1000), torch.zeros(1000)
    for step in range(1, 6):
        gradient = torch.randn(1000)
        theirs.grad = gradient / (divisor or 1.0)
        optimizer.step()
        scale = None if divisor is None else torch.tensor(divisor)
        numbers = AdamWStep(
            step=step, lr=1e-2, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.3, gradient_divisor=scale
        )
        adamw(backend, master, m, v, gradient.clone(), numbers)
    torch.testing.assert_close(master, theirs.detach(), rtol=1e-5, atol=1e-6)
