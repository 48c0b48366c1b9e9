"""Activations in Triton's interpreter, on a CPU.

test_kernels_activation_triton.py runs this file in a separate process, because TRITON_INTERPRET takes effect at import.
"""

from collections.abc import Callable, Iterator
from typing import get_args

import pytest
import torch
from llmtrain_kernels.activation import op, triton_backend
from llmtrain_kernels.activation.kinds import Activation
from llmtrain_kernels.activation.op import activate, reference_activate
from torch import Tensor

from tests.triton_lab import counted, rounded

# Some fp32 operations, or half of a 16-bit number's last digit.
TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
dtypes = pytest.mark.parametrize("dtype", TOLERANCE)
kinds = pytest.mark.parametrize("kind", get_args(Activation))


@pytest.fixture(autouse=True)
def on_triton(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Give tensors of a CPU to the kernels."""
    monkeypatch.setattr(op, "takes_native", lambda x: False)
    monkeypatch.setattr(op, "takes_triton", lambda x: True)
    with rounded(monkeypatch):
        yield


def differentiated(function: Callable[..., Tensor], x: Tensor, kind: str, grad: Tensor) -> tuple[Tensor, Tensor]:
    x = x.detach().requires_grad_()
    y = function(x, kind)
    return y.detach(), torch.autograd.grad(y, x, grad.to(y.dtype))[0]


@dtypes
@kinds
@pytest.mark.parametrize("shape", [(1, 1), (3, 7, 17), (3, 2048), (2, 2049), (0, 4)], ids=str)
def test_equals_reference(shape: tuple[int, ...], kind: Activation, dtype: torch.dtype) -> None:
    """shape: of the result."""
    torch.manual_seed(shape[-1])
    x = (torch.randn(*shape[:-1], shape[-1] * (2 if kind == "swiglu" else 1)) * 4).to(dtype)
    grad = torch.randn_like(reference_activate(x, kind))
    exact = differentiated(reference_activate, x.double(), kind, grad)
    for mine, true in zip(differentiated(activate, x, kind, grad), exact, strict=True):
        assert mine.dtype == dtype
        assert mine.shape == true.shape
        torch.testing.assert_close(mine.double(), true, rtol=TOLERANCE[dtype], atol=4e-6)


@kinds
def test_far_out(kind: Activation) -> None:
    """The function saturates at both ends, and a NaN stays NaN."""
    x = torch.tensor([[-1e4, -90.0, 90.0, 1e4, float("nan"), 0.0]]).repeat(1, 2 if kind == "swiglu" else 1)
    ours, plain = (differentiated(f, x, kind, torch.ones(1, 6)) for f in (activate, reference_activate))
    for mine, true in zip(ours, plain, strict=True):
        torch.testing.assert_close(mine, true, rtol=1e-5, atol=1e-20, equal_nan=True)


@kinds
def test_strided_inputs(kind: Activation) -> None:
    x, grad = torch.randn(6, 5).t(), torch.randn(3 if kind == "swiglu" else 6, 5).t()
    whole = differentiated(activate, x.contiguous(), kind, grad.contiguous())
    for one, other in zip(differentiated(activate, x, kind, grad), whole, strict=True):
        assert torch.equal(one, other)


@kinds
def test_keeps_its_input_alone(kind: Activation) -> None:
    kept: list[Tensor] = []
    x = torch.randn(3, 8, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        activate(x, kind)
    assert [one.data_ptr() for one in kept] == [x.data_ptr()]


@kinds
def test_bytes_moved(kind: Activation, monkeypatch: pytest.MonkeyPatch) -> None:
    """Inputs are read once and results written once, to the byte."""
    x = torch.randn(3, 2 * 2100).bfloat16()
    with counted(monkeypatch) as moved:
        y = triton_backend.forward(x, kind)
    assert (moved.loaded, moved.stored) == (x.nbytes, y.nbytes)
    with counted(monkeypatch) as moved:
        triton_backend.backward(x, torch.randn(y.shape).bfloat16(), kind)
    assert (moved.loaded, moved.stored) == (x.nbytes + y.nbytes, x.nbytes)


@dtypes
@pytest.mark.parametrize("kind", ["gelu", "gelu_tanh"])
@pytest.mark.parametrize("shape", [(1, 1), (3, 7, 33), (21, 301), (0, 8)], ids=str)
def test_sums_a_biass_gradient(
    shape: tuple[int, ...], kind: Activation, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gradient of x is the same to the bit, and its sum exact but for fp32 and the result's rounding."""
    monkeypatch.setattr(triton_backend, "PROGRAMS", 2)
    x, grad = (torch.randn(shape).to(dtype) for _ in range(2))
    _, alone = differentiated(activate, x, kind, grad)
    x, bias = x.requires_grad_(), torch.zeros(shape[-1], dtype=dtype, requires_grad=True)
    of_x, of_bias = torch.autograd.grad(activate(x, kind, bias), (x, bias), grad)
    assert torch.equal(of_x, alone)
    assert of_bias.dtype == dtype
    exact = alone.double().flatten(0, -2).sum(0)
    torch.testing.assert_close(of_bias.double(), exact, rtol=TOLERANCE[dtype], atol=4e-6)


def test_sums_in_the_same_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(100, 512).bfloat16()
    monkeypatch.setattr(triton_backend, "PROGRAMS", 4)
    with counted(monkeypatch) as moved:
        triton_backend.backward_and_sums(x, torch.randn(x.shape).bfloat16(), "gelu")
    assert (moved.loaded, moved.stored) == (2 * x.nbytes, x.nbytes + 2 * 512 * 4)
