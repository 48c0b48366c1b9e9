"""Which tensors Triton kernels process, where they start, and what they write to. It does not import
Triton, which CPU builds may lack."""

import functools
from contextlib import AbstractContextManager
from importlib.util import find_spec

import torch
from torch import Tensor


@functools.cache
def triton_installed() -> bool:
    """Whether Triton can be imported. torch's GPU builds for Linux bring it."""
    return find_spec("triton") is not None


def takes_triton(x: Tensor) -> bool:
    """Whether a Triton kernel can process `x`: fp32, bf16 or fp16, on a GPU, and not traced by torch.compile, which
    sees plain operations and makes kernels of its own."""
    if torch.compiler.is_compiling():
        return False
    return x.is_cuda and x.dtype in (torch.float32, torch.bfloat16, torch.float16) and triton_installed()


def device_of(x: Tensor) -> AbstractContextManager[None]:
    """Return a context in which Triton launches on x's device: it takes the current one, whatever its arguments."""
    return torch.cuda.device(x.device if x.is_cuda else -1)


def ceil_div(dividend: int, divisor: int) -> int:
    """Return the quotient, rounded up. Triton's own function takes 4 us of the host, a sixth of a launch."""
    return -(-dividend // divisor)


def power_of_2_from(number: int) -> int:
    """Return the least power of 2 that is not below `number`, which is at least 1."""
    return 1 << (number - 1).bit_length()


def empty_joined(q: Tensor, k: Tensor) -> Tensor:
    """Return memory for queries, keys and values side by side. q, k: `[batch, sequence, heads, head_dim]`."""
    return q.new_empty(*q.shape[:2], q.shape[2] + 2 * k.shape[2], q.shape[3])
