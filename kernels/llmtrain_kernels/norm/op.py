"""RMSNorm (Zhang and Sennrich, 2019, section 4)."""

import functools
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from llmtrain_kernels.native import native_functions, takes_native
from llmtrain_kernels.recomputed import recomputed


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Divide each row of x (`[..., width]`) by its root mean square, and multiply it by `weight` (`[width]`)."""
    if takes_native(x) and weight.dtype == x.dtype and _kernel() is not None:
        return _RMSNorm.apply(x, weight, eps)
    if x.is_cuda:
        return F.rms_norm(x, weight.shape, weight, eps)
    # On CPUs torch has no kernel of its own for this, and its operations keep copies in fp32.
    return recomputed(lambda x, weight: F.rms_norm(x, weight.shape, weight, eps), x, weight)


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
