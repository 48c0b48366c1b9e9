"""Norms with the residual sum in Triton's interpreter, on a CPU.

test_kernels_norm_triton.py runs this file in a separate process, because TRITON_INTERPRET takes effect at import.
"""

from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import pytest
import torch
from llmtrain_kernels.norm import op, triton_backend
from llmtrain_kernels.norm.op import residual_norm
from torch import Tensor

from tests.triton_lab import counted, rounded

EPS = 1e-5
# Half a unit in the last place, in relation to a result.
HALF_ULP = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
# What fp32 operations and unlike orders of sums add, in units of the last place of the largest result.
OPERATIONS = 4 * 2.0**-23
dtypes = pytest.mark.parametrize("dtype", HALF_ULP)
forms = pytest.mark.parametrize(("adds", "centered"), list(product((False, True), (False, True))))


@pytest.fixture(autouse=True)
def on_triton(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Give tensors of a CPU to the kernels, with few programs."""
    monkeypatch.setattr(op, "takes_triton", lambda x: True)
    monkeypatch.setattr(triton_backend, "FORWARD_PROGRAMS", 2)
    monkeypatch.setattr(triton_backend, "BACKWARD_PROGRAMS", 2)
    with rounded(monkeypatch):
        yield


# What a norm takes: what it norms, what it adds to that, weights and biases.
Inputs = tuple[Tensor, Tensor | None, Tensor, Tensor | None]


def inputs(shape: tuple[int, ...], dtype: torch.dtype, adds: bool, centered: bool) -> Inputs:
    torch.manual_seed(shape[-1])
    # Rows of unlike sizes, away from 0.
    x = torch.randn(shape) * torch.arange(1, shape[0] + 1).view(-1, *[1] * (len(shape) - 1)) + 0.5
    added, weight = torch.randn(shape) if adds else None, torch.randn(shape[-1:])
    return leaves((x, added, weight, torch.randn(shape[-1:]) if centered else None), dtype)


def leaves(given: Inputs, dtype: torch.dtype) -> Inputs:
    """Return copies of another type, of which gradients are asked."""
    x, added, weight, bias = (None if one is None else one.detach().to(dtype).requires_grad_() for one in given)
    assert x is not None
    assert weight is not None
    return x, added, weight, bias


def results(function: Callable[..., Any], given: Inputs, grads: list[Tensor | None]) -> list[Tensor]:
    """Return sum, norm and the gradients of all inputs. grads: of sum and norm; None: it is not used."""
    outputs = function(*given, EPS)
    pairs = [(out, grad) for out, grad in zip(outputs, grads, strict=True) if grad is not None]
    wanted = [one for one in given if one is not None]
    found = torch.autograd.grad([out for out, _ in pairs], wanted, [grad.to(out.dtype) for out, grad in pairs])
    return [*(one.detach() for one in outputs), *found]


def reference(
    x: Tensor, added: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    """Compute `residual_norm` with torch operations."""
    total = x if added is None else x + added
    centered = total if bias is None else total - total.mean(-1, keepdim=True)
    normal = centered * (centered.square().mean(-1, keepdim=True) + eps).rsqrt() * weight
    return total, normal if bias is None else normal + bias


def exact(given: Inputs, grads: list[Tensor | None], dtype: torch.dtype) -> list[Tensor]:
    """Return the results in fp64. The sum is rounded, as the kernel's is."""
    x, added, weight, bias = leaves(given, torch.float64)
    if added is None:
        return results(reference, (x, added, weight, bias), grads)
    total = (x + added).detach().to(dtype).double().requires_grad_()
    summed, normal, of_sum, *of_weights = results(reference, (total, None, weight, bias), grads)
    return [summed, normal, of_sum, of_sum, *of_weights]


@dtypes
@forms
@pytest.mark.parametrize("shape", [(1, 1), (3, 7, 33), (5, 1000), (2, 8192), (37, 64)], ids=str)
def test_equals_reference(shape: tuple[int, ...], adds: bool, centered: bool, dtype: torch.dtype) -> None:
    given = inputs(shape, dtype, adds, centered)
    for grads in ([torch.randn(shape), torch.randn(shape)], [None, torch.randn(shape)]):
        grads = [None if one is None else one.to(dtype) for one in grads]
        ours = results(residual_norm, given, grads)
        for mine, true in zip(ours, exact(given, grads, dtype), strict=True):
            assert mine.dtype == dtype
            # The gradient of a single channel is 0 but for eps, a difference of numbers of size 1.
            absolute = OPERATIONS * max(float(true.abs().max()), shape[-1] == 1)
            torch.testing.assert_close(mine.double(), true, rtol=HALF_ULP[dtype], atol=absolute)


@forms
def test_sum_alone(adds: bool, centered: bool) -> None:
    """A gradient of the sum passes by the norm."""
    x, added, weight, bias = inputs((3, 8), torch.float32, adds, centered)
    total, _ = residual_norm(x, added, weight, bias, EPS)
    grad = torch.randn(3, 8)
    for one in torch.autograd.grad(total, [one for one in (x, added) if one is not None], grad):
        assert torch.equal(one, grad)


def test_no_rows_and_strided_rows() -> None:
    weight = torch.randn(8, requires_grad=True)
    total, normal = residual_norm(torch.empty(2, 0, 8, requires_grad=True), None, weight, None, EPS)
    assert (total.shape, normal.shape) == ((2, 0, 8), (2, 0, 8))
    assert torch.equal(torch.autograd.grad(normal.sum(), weight)[0], torch.zeros(8))
    x = torch.randn(8, 5).t().requires_grad_()
    pairs = [results(residual_norm, (one, None, weight, None), [None, torch.ones(5, 8)]) for one in (x, x.contiguous())]
    for one, other in zip(*pairs, strict=True):
        assert torch.equal(one, other)


def test_wider_rows_take_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_backend, "WIDEST", 8)
    monkeypatch.setattr(triton_backend, "forward", None)
    given = inputs((3, 9), torch.float32, True, True)
    for mine, true in zip(residual_norm(*given, EPS), reference(*given, EPS), strict=True):
        torch.testing.assert_close(mine, true)


@pytest.mark.parametrize("centered", [False, True])
@pytest.mark.parametrize("adds", [False, True])
def test_bytes_moved(adds: bool, centered: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The most programs share a microbatch of 8,192 tokens: each has 16 rows in the forward pass and 32 in the backward
    pass. Beside rows they move weights, statistics and the sums of their rows' weight gradients, which torch reads."""
    width, size = 2048, 2
    x, added, weight, bias = inputs((64, width), torch.bfloat16, adds, centered)
    monkeypatch.setattr(triton_backend, "FORWARD_PROGRAMS", 4)
    with counted(monkeypatch) as moved:
        total, _, statistics = triton_backend.forward(x, added, weight, bias, EPS)
    least = 64 * width * size * (4 if adds else 2)
    assert least <= moved.loaded + moved.stored <= 1.1 * least
    given, above = x if added is None else total, torch.randn(64, width).bfloat16() if adds else None
    with counted(monkeypatch) as moved:
        triton_backend.backward(given, weight, statistics, torch.randn(64, width).bfloat16(), above)
    least = 64 * width * size * (4 if adds else 3)
    sums = (2 if centered else 1) * 2 * width * 4
    assert least <= moved.loaded + moved.stored + sums <= 1.1 * least
