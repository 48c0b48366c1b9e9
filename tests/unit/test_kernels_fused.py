"""Normalisation, nonlinearities and the loss against their plain forms in fp64, forward and backward."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import cast

import pytest
import torch
import torch.nn.functional as F
from llmtrain_kernels import triton_launch
from llmtrain_kernels.activation import op as activation
from llmtrain_kernels.activation.kinds import Activation
from llmtrain_kernels.activation.op import activate, reference_activate
from llmtrain_kernels.cross_entropy import chunks
from llmtrain_kernels.cross_entropy import op as cross_entropy
from llmtrain_kernels.cross_entropy.op import linear_cross_entropy, reference_linear_cross_entropy
from llmtrain_kernels.native import native_available
from llmtrain_kernels.norm import op as norm
from llmtrain_kernels.norm.op import rms_norm
from torch import Tensor
from torch.utils.checkpoint import checkpoint

pytestmark = pytest.mark.skipif(not native_available(), reason="no C++ compiler")

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 1e-2}
both_dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
odd_sizes = pytest.mark.parametrize("shape", [(1, 2), (3, 7, 34), (129, 256), (0, 8)], ids=str)


def differentiated(function: Callable[..., Tensor], inputs: list[Tensor], grad: Tensor) -> list[Tensor]:
    """Return the function's value and its gradients with respect to every input."""
    inputs = [x.detach().requires_grad_() for x in inputs]
    value = function(*inputs)
    return [value.detach(), *torch.autograd.grad(value, inputs, grad.to(value.dtype))]


def compare(ours: Callable[..., Tensor], plain: Callable[..., Tensor], inputs: list[Tensor], grad: Tensor) -> None:
    exact = differentiated(plain, [x.double() for x in inputs], grad)
    for mine, wanted in zip(differentiated(ours, inputs, grad), exact, strict=True):
        assert mine.dtype == inputs[0].dtype
        assert mine.shape == wanted.shape
        assert (mine.double() - wanted).norm() <= TOLERANCE[mine.dtype] * wanted.norm()


@both_dtypes
@odd_sizes
def test_rms_norm(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, weight, grad = torch.randn(shape, dtype=dtype), torch.randn(shape[-1], dtype=dtype), torch.randn(shape)
    compare(
        lambda x, weight: rms_norm(x, weight, 1e-5),
        lambda x, weight: F.rms_norm(x, weight.shape, weight, 1e-5),
        [x * torch.arange(1, shape[0] + 1, dtype=dtype).view(-1, *[1] * (x.dim() - 1)), weight],
        grad.to(dtype),
    )


@both_dtypes
@odd_sizes
@pytest.mark.parametrize("kind", ["gelu", "gelu_tanh", "swiglu"])
def test_activations(kind: Activation, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = torch.randn(shape, dtype=dtype) * 4
    grad = torch.randn_like(reference_activate(x, kind))
    compare(lambda x: activate(x, kind), lambda x: reference_activate(x, kind), [x], grad)


@pytest.mark.parametrize("kind", ["gelu", "gelu_tanh", "swiglu"])
def test_activations_far_out(kind: Activation) -> None:
    """The function saturates at both ends, and a NaN stays NaN."""
    x = torch.tensor([[-1e4, -90.0, 90.0, 1e4, float("nan"), 0.0]]).repeat(1, 2 if kind == "swiglu" else 1)
    ours, plain = (
        differentiated(lambda x, f=f: f(x, kind), [x], torch.ones(1, 6)) for f in (activate, reference_activate)
    )
    for mine, wanted in zip(ours, plain, strict=True):
        torch.testing.assert_close(mine, wanted, rtol=1e-5, atol=1e-20, equal_nan=True)


@both_dtypes
@pytest.mark.parametrize("native", [True, False])
def test_linear_cross_entropy(native: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of uneven size, with logits that are close together to far apart."""
    monkeypatch.setattr(chunks, "CHUNK_ELEMENTS", {"cpu": 5 * 301})
    monkeypatch.setattr(chunks, "MIN_ROWS", 1)
    if not native:
        monkeypatch.setattr(cross_entropy, "_kernel", lambda: None)
    torch.manual_seed(0)
    x, weight = torch.randn(13, 16, dtype=dtype) * torch.linspace(0.1, 8, 13)[:, None].to(dtype), torch.randn(301, 16)
    targets = torch.randint(0, 301, (26,))[::2]
    ours = differentiated(lambda x, w: linear_cross_entropy(x, w, targets), [x, weight.to(dtype)], torch.tensor(3.0))
    exact = [t.double() for t in (x, weight.to(dtype))]
    wanted = differentiated(lambda x, w: F.cross_entropy(x @ w.t(), targets), exact, torch.tensor(3.0))
    for mine, true in zip(ours, wanted, strict=True):
        # The tolerance is doubled: rounding logits to bf16 alone costs as much as the other kernels' total error.
        assert (mine.double() - true).norm() < 2 * TOLERANCE[dtype] * true.norm()
    with torch.no_grad():
        torch.testing.assert_close(linear_cross_entropy(x, weight.to(dtype), targets), ours[0])


def test_products_of_the_weight_add_up_in_fp32_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only a GPU computes such products. Tensors without memory show that torch takes the call, in place."""
    monkeypatch.setattr(cross_entropy, "_sums_in_fp32", lambda x: True)
    total = torch.empty(7, 4, device="meta")
    logits, x = (torch.empty(shape, dtype=torch.bfloat16, device="meta") for shape in ((5, 7), (5, 4)))
    for first in (True, False):
        cross_entropy.add_product(total, logits, x, first)
    assert (total.shape, total.dtype) == ((7, 4), torch.float32)
    with pytest.raises(RuntimeError):
        cross_entropy.add_product(total.bfloat16(), logits, x, True)


def test_products_that_torch_refuses_are_added_after() -> None:
    """It takes none that adds to fp32 on a CPU, and all on tensors without memory."""
    assert not cross_entropy._adds_to_fp32(torch.device("cpu"), torch.bfloat16)
    assert cross_entropy._adds_to_fp32(torch.device("meta"), torch.bfloat16)


def test_scaling_in_one_pass_gives_the_bits_of_two() -> None:
    values, scale = torch.randn(1000), torch.tensor(0.3)
    once = torch.mul(values, scale, out=torch.empty_like(values, dtype=torch.bfloat16))
    assert torch.equal(once, cross_entropy.scaled(torch.zeros(1).bfloat16(), values, scale)[1])


def test_a_loss_that_is_not_a_number_says_so() -> None:
    x, weight, targets = torch.randn(5, 4), torch.randn(7, 4), torch.randint(0, 7, (5,))
    x[3, 1] = float("nan")
    assert linear_cross_entropy(x, weight, targets).isnan()
    x[3, 1] = float("inf")
    assert not linear_cross_entropy(x, weight, targets).isfinite()
    assert not reference_linear_cross_entropy(x, weight, targets).isfinite()


@pytest.mark.parametrize("target", [-1, 7])
def test_a_target_outside_the_vocabulary_is_refused(target: int) -> None:
    with pytest.raises(IndexError, match="vocabulary has 7 tokens"):
        linear_cross_entropy(torch.randn(2, 4), torch.randn(7, 4), torch.tensor([3, target]))


def test_strided_recomputed_and_with_saved_tensors_packed() -> None:
    """The backward pass reads weights from autograd's saved tensors, so that they may move after the forward pass."""
    weight, wide, grad = torch.randn(16), torch.randn(16, 6).t(), torch.randn(6, 8).t().contiguous().t()

    def chain(x: Tensor, weight: Tensor) -> Tensor:
        return activate(rms_norm(x, weight, 1e-5), "swiglu")

    wanted = differentiated(chain, [wide.contiguous(), weight], grad.contiguous())
    recomputed = differentiated(lambda *a: checkpoint(chain, *a, use_reentrant=False), [wide, weight], grad)
    x, moved = wide.detach().requires_grad_(), weight.clone().requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t):
        value = chain(x, moved)
    moved.data.zero_()
    packed = [value.detach(), *torch.autograd.grad(value, [x, moved], grad)]
    for results in (recomputed, packed):
        for mine, true in zip(results, wanted, strict=True):
            assert torch.equal(mine, true)


def test_compiled_blocks_take_the_plain_forms() -> None:
    def chain(x: Tensor, weight: Tensor) -> Tensor:
        return activate(rms_norm(x, weight, 1e-5), "gelu_tanh")

    inputs, grad = [torch.randn(4, 16), torch.randn(16)], torch.randn(4, 16)
    traced = differentiated(torch.compile(chain, backend="aot_eager", fullgraph=True), inputs, grad)
    for mine, true in zip(traced, differentiated(chain, inputs, grad), strict=True):
        torch.testing.assert_close(mine, true, rtol=1e-5, atol=1e-5)


def test_what_torch_compile_traces_takes_no_triton_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """It could not trace the search for Triton either."""
    on_gpu = cast(Tensor, SimpleNamespace(is_cuda=True, dtype=torch.bfloat16))
    monkeypatch.setattr(triton_launch, "triton_installed", lambda: True)
    assert triton_launch.takes_triton(on_gpu)
    monkeypatch.setattr(triton_launch, "triton_installed", None)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert not triton_launch.takes_triton(on_gpu)


@pytest.mark.parametrize("module", [activation, norm])
def test_without_a_compiler(module: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_kernel", lambda: None)
    x, weight = torch.randn(4, 16), torch.randn(16)
    torch.testing.assert_close(rms_norm(x, weight, 1e-5), F.rms_norm(x, (16,), weight, 1e-5))
    torch.testing.assert_close(activate(x, "swiglu"), reference_activate(x, "swiglu"))
