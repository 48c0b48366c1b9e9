"""Which tensors Triton kernels process, where they start, and what they write to. It does not import
Triton, which CPU builds may lack."""

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

# A compiled kernel with its grid, and the values of its constants in the order of its arguments.
Form = tuple[Callable[..., object], tuple[object, ...]]

# The most compiled forms of a kernel that are kept. Evaluation and generation bring sequences of many lengths.
FORMS = 1024


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


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
    """Launch a Triton kernel on the device of its first argument, a tensor.

    grid: the number of programs along one to three axes. arguments: the kernel's first arguments, in its order: tensors
    of that device, numbers, None, or tuples of these. constants: the values of all its `tl.constexpr` arguments, and
    Triton's options, by name.

    Triton finds the compiled form of each launch anew, which takes 10 to 20 us of the host. Here a form that it has
    found is called again, with addresses in place of tensors, for the same dtypes and the same values of integers: a
    finer distinction than Triton's. Triton itself launches where an address is no multiple of 16, which it compiles
    for, on a GPU that is not the current one, and for AMD's GPUs, where forms depend on the size of tensors too.
    """
    first, device = arguments[0], arguments[0].get_device()
    key: list[object] = [device, grid]
    passed, bits = _described(arguments, key)
    known, form_key = _forms(kernel.fn), (*key, *constants.items())
    usual = device >= 0 and bits % 16 == 0 and device == torch.cuda.current_device() and torch.version.hip is None
    if usual and (form := known.get(form_key)) is not None:
        form[0](*passed, *form[1])
        return
    with on_device_of(first):
        compiled = kernel[grid](*arguments, **constants)
    if usual:
        if len(known) == FORMS:
            known.clear()
        rest = tuple(constants[name] for name in kernel.arg_names[len(arguments) :])
        known[form_key] = compiled[(*grid, 1, 1)[:3]], rest


@functools.cache
def _forms(function: Callable[..., object]) -> dict[tuple[object, ...], Form]:
    """Return the compiled forms of a kernel, to which `launch` adds."""
    return {}


def _described(arguments: Sequence[Any], key: list[object]) -> tuple[tuple[object, ...], int]:
    """Append to `key` what decides for which arguments a kernel is compiled. Return the arguments with addresses in
    place of tensors, and the bitwise or of all addresses."""
    passed, bits = list[object](), 0
    for one in arguments:
        if isinstance(one, Tensor):
            address = one.data_ptr()
            bits |= address
            key.append(one.dtype)
            passed.append(address)
        elif isinstance(one, tuple):
            key.append(len(one))
            inner, more = _described(one, key)
            bits |= more
            passed.append(inner)
        else:
            key.append(float if isinstance(one, float) else one)
            passed.append(one)
    return tuple(passed), bits


def on_device_of(x: Tensor) -> AbstractContextManager[None]:
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
