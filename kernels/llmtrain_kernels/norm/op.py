"""RMSNorm (Zhang and Sennrich, 2019, section 4) and LayerNorm (Ba et al., 2016, section 3)."""

import functools
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from llmtrain_kernels.native import native_functions, takes_native
from llmtrain_kernels.recomputed import recomputed
from llmtrain_kernels.triton_launch import takes_triton


def residual_norm(
    x: Tensor, added: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    """Return the sum of `x` and `added` (`[..., width]`; None: x itself), and that sum normalized over the last
    dimension.

    weight, bias: `[width]`; RMSNorm without a bias, else LayerNorm. Use the first result in place of `x` afterwards:
    then one GPU kernel adds the gradients of both results.
    """
    if takes_triton(x) and weight.dtype == x.dtype and _fits(x.shape[-1]):
        return _ResidualNorm.apply(x, added, weight, bias, eps)
    total = x if added is None else x + added
    if bias is None:
        return total, rms_norm(total, weight, eps)
    return total, F.layer_norm(total, weight.shape, weight, bias, eps)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Divide each row of x (`[..., width]`) by its root mean square, and multiply it by `weight` (`[width]`)."""
    if takes_native(x) and weight.dtype == x.dtype and _kernel() is not None:
        return _RMSNorm.apply(x, weight, eps)
    if x.is_cuda:
        return F.rms_norm(x, weight.shape, weight, eps)
    # On CPUs torch has no kernel of its own for this, and its operations keep copies in fp32.
    return recomputed(lambda x, weight: F.rms_norm(x, weight.shape, weight, eps), x, weight)


def _fits(width: int) -> bool:
    from llmtrain_kernels.norm import triton_backend

    return width <= triton_backend.WIDEST


class _ResidualNorm(torch.autograd.Function):
    """Saves the sum and the fp32 statistics of its rows."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, added: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float
    ) -> tuple[Tensor, Tensor]:
        from llmtrain_kernels.norm import triton_backend

        x, given = x.contiguous(), None if added is None else _rows(added)
        total, y, statistics = triton_backend.forward(_rows(x), given, weight.contiguous(), bias, eps)
        total = x if added is None else total.view(x.shape)
        ctx.save_for_backward(total, weight, statistics)
        ctx.has_bias, ctx.adds, ctx.backend = bias is not None, added is not None, triton_backend
        ctx.set_materialize_grads(False)
        return total, y.view(x.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, above: Tensor | None, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        if grad is None:
            return above, above if ctx.adds else None, None, None, None
        total, weight, statistics = ctx.saved_tensors
        add = None if above is None else _rows(above)
        grad_x, sums = ctx.backend.backward(_rows(total), weight.contiguous(), statistics, _rows(grad), add)
        of_parameters, grad_x = sums.to(weight.dtype), grad_x.view(total.shape)
        of_bias = of_parameters[1] if ctx.has_bias else None
        return grad_x, grad_x if ctx.adds else None, of_parameters[0], of_bias, None


def _rows(x: Tensor) -> Tensor:
    return x.contiguous().view(-1, x.shape[-1])


@functools.cache
def _kernel() -> SimpleNamespace | None:
    return native_functions("norm", rms_norm_forward="ppppfllll", rms_norm_backward="ppppppllll")


def _numbers(x: Tensor) -> tuple[int, int, int, int]:
    # (rows, width, is_bf16, threads)
    width = x.shape[-1]
    return x.numel() // max(1, width), width, int(x.dtype == torch.bfloat16), torch.get_num_threads()


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        kernel, x, weight, numbers = _kernel(), x.contiguous(), weight.contiguous(), _numbers(x)
        assert kernel is not None
        y, inverses = torch.empty_like(x), x.new_empty(numbers[0], dtype=torch.float32)
        kernel.rms_norm_forward(*(t.data_ptr() for t in (x, weight, y, inverses)), eps, *numbers)
        ctx.save_for_backward(x, weight, inverses)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        (x, weight, inverses), kernel, grad = ctx.saved_tensors, _kernel(), grad.contiguous()
        assert kernel is not None
        numbers = _numbers(x)
        grad_x = torch.empty_like(x)
        partial = inverses.new_empty(numbers[3], numbers[1])
        pointers = [t.data_ptr() for t in (x, weight, inverses, grad, grad_x, partial)]
        kernel.rms_norm_backward(*pointers, *numbers)
        return grad_x, partial.sum(0).to(weight.dtype), None
