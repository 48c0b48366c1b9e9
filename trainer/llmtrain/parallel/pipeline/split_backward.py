"""Layers of a plain model whose gradients of weights may wait."""

import torch
from llmtrain_kernels.matmul import Product, linear
from torch import Tensor, nn

from llmtrain.model.layers import InputMajorLinear, Linear
from llmtrain.parallel.pipeline.weight_gradient_queue import WeightGradientQueue


class SplitBackwardLinear(nn.Module):
    """The affine map of a plain layer, with its parameters under their names."""

    def __init__(self, plain: Linear | InputMajorLinear, queue: WeightGradientQueue) -> None:
        super().__init__()
        self.weight, self.bias, self._queue = plain.weight, plain.bias, queue
        self._input_major = isinstance(plain, InputMajorLinear)

    def forward(self, x: Tensor) -> Tensor:
        """Map `[..., in]` to `[..., out]`."""
        return self._uncompiled(x) if torch.compiler.is_compiling() else self._map(x)

    @torch.compiler.disable
    def _uncompiled(self, x: Tensor) -> Tensor:
        return self._map(x)

    def _map(self, x: Tensor) -> Tensor:
        return linear(x, self.weight.t() if self._input_major else self.weight, self.bias, self._later)

    def _later(self, for_weight: Product, for_bias: Product) -> bool:
        if not self._queue.active:
            return False
        self._queue.push(self.weight, lambda: (lambda: for_weight().t()) if self._input_major else for_weight)
        if self.bias is not None:
            self._queue.push(self.bias, lambda: for_bias)
        return True


def split_backward(blocks: nn.Module, queue: WeightGradientQueue) -> None:
    """Replace the products of blocks by such as wait while `queue` collects, in place."""
    for module in list(blocks.modules()):
        for name, layer in list(module.named_children()):
            if isinstance(layer, Linear | InputMajorLinear):
                setattr(module, name, SplitBackwardLinear(layer, queue))
