"""Linear layers by oneDNN against torch's own, on any CPU."""

import pytest
import torch
import torch.nn.functional as F
from llmtrain_kernels import matmul
from llmtrain_kernels.matmul import linear
from llmtrain_kernels.operators import constant


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Make oneDNN take products of every size; returns a list of the shapes that it was given."""
    shapes: list[tuple[int, ...]] = []
    original = matmul._onednn

    def noted(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        shapes.append(tuple(x.shape))
        return original(x, weight, bias)

    monkeypatch.setattr(matmul, "MIN_MULTIPLICATIONS", 0)
    monkeypatch.setattr(matmul, "onednn_is_wider", lambda: True)
    monkeypatch.setattr(matmul, "_onednn", noted)
    return shapes


@pytest.mark.parametrize("input_major", [False, True])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("shape", [(7, 48), (3, 5, 48), (2, 3, 1, 48)])
def test_linear(taken: list[tuple[int, ...]], shape: tuple[int, ...], with_bias: bool, input_major: bool) -> None:
    stored = torch.randn(48, 33) if input_major else torch.randn(33, 48)
    tensors = [torch.randn(shape), stored, *([torch.randn(33)] if with_bias else [])]
    upstream = torch.randn(*shape[:-1], 33)
    results = []
    for function, dtype in ((linear, torch.float32), (F.linear, torch.float64)):
        x, weight, *rest = [tensor.detach().clone().to(dtype).requires_grad_() for tensor in tensors]
        y = function(x, weight.t() if input_major else weight, rest[0] if rest else None)
        y.backward(upstream.to(dtype))
        results.append([y.detach(), *(tensor.grad for tensor in (x, weight, *rest))])
    assert len(taken) == 3
    for ours, theirs in zip(*results, strict=True):
        assert ours is not None
        assert ours.is_contiguous()
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-5, atol=1e-5)


def test_only_the_gradients_that_are_wanted(taken: list[tuple[int, ...]]) -> None:
    x, weight = torch.randn(4, 8), torch.randn(6, 8, requires_grad=True)
    linear(x, weight).sum().backward()
    assert taken == [(4, 8), (6, 4)]


def test_what_stays_with_torch(taken: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight = torch.randn(4, 8), torch.randn(6, 8)
    linear(x.bfloat16(), weight.bfloat16())
    monkeypatch.setattr(matmul, "MIN_MULTIPLICATIONS", 4 * 8 * 6 + 1)
    linear(x, weight)
    monkeypatch.setattr(matmul, "MIN_MULTIPLICATIONS", 4 * 8 * 6)
    monkeypatch.setattr(matmul, "onednn_is_wider", lambda: False)
    linear(x, weight)
    assert taken == []
    monkeypatch.setattr(matmul, "onednn_is_wider", lambda: True)
    linear(x, weight)
    assert taken == [(4, 8)]


def test_a_constant_is_marked_as_torch_marks_it() -> None:
    def ours() -> None: ...

    def theirs() -> None: ...

    assert vars(constant(ours)) == vars(torch.compiler.assume_constant_result(theirs)) != {}
