"""Block quantization on a CPU, in C++."""

import torch
from torch import Tensor

from llmtrain_kernels.native import native_functions
from llmtrain_kernels.quantize.format import ELEMENT_DTYPES, QuantizeBackend


def native_backend() -> QuantizeBackend | None:
    """Return the C++ backend, or None if it cannot be built."""
    functions = native_functions(
        "quantize", quantize="pllplllllll", dequantize="pllpllllll", dequantize_sum="pplllllll"
    )
    if functions is None:
        return None

    def numbers(packed: Tensor, numel: int, bits: int, block: int) -> tuple[int, ...]:
        return packed.data_ptr(), packed.stride(0), len(packed), numel, bits, block, torch.get_num_threads()

    def quantize(x: Tensor, bits: int, block: int, out: Tensor, key: int | None) -> None:
        elements = x.data_ptr(), ELEMENT_DTYPES.index(x.dtype), x.stride(0)
        functions.quantize(*elements, *numbers(out, x.shape[1], bits, block), -1 if key is None else key)

    def dequantize(packed: Tensor, bits: int, block: int, out: Tensor) -> None:
        elements = out.data_ptr(), ELEMENT_DTYPES.index(out.dtype), out.stride(0)
        functions.dequantize(*elements, *numbers(packed, out.shape[1], bits, block))

    def dequantize_sum(packed: Tensor, bits: int, block: int, out: Tensor, accumulate: bool) -> None:
        functions.dequantize_sum(out.data_ptr(), *numbers(packed, len(out), bits, block), accumulate)

    return QuantizeBackend(quantize, dequantize, dequantize_sum)
