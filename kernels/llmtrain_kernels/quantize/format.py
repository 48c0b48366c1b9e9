"""The packed format of block quantization. All backends write and read it identically, bit for bit.

ZeRO++ (Wang et al., 2023, sections 3.1 and 3.3) gathers weights in 8 bits and reduces gradients in 4. A packed row is
one buffer: the payload, then one fp32 scale per block of elements. The last block may be shorter.

- scale = absmax * fp32(1 / max), max = 127 or 7; code = round(x * fp32(1 / scale)); value = code * scale. fp32.
- 8 bits: one signed byte an element. 4 bits: byte j of a block of n holds element j in its low half and element
  j + n/2 in its high half, each as two's complement.
- A block whose absmax is below 2^-118 has scale 0 and unpacks to zeros. A block that holds NaN or infinity has scale
  NaN and unpacks to NaNs.
- Rounding to nearest rounds ties to even. Stochastic rounding picks the code below or above; the nearer code is
  proportionally more likely. It uses a hash of seed, row and payload byte: the hash's high half, or its low half for a
  code in the high half of a byte.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

SMALLEST = 2.0**-118
GOLDEN = 0x9E3779B9
ELEMENT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)  # the C++ functions take the index in this tuple


class QuantizeBackend(NamedTuple):
    """The functions of `op.py` for one device. Arguments are already checked. `key`: None rounds to nearest."""

    quantize: Callable[[Tensor, int, int, Tensor, int | None], None]
    dequantize: Callable[[Tensor, int, int, Tensor], None]
    dequantize_sum: Callable[[Tensor, int, int, Tensor, bool], None]
