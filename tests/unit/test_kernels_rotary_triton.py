"""The rotary embedding in Triton without a GPU: in the interpreter, and compiled for GPUs."""

import re
from pathlib import Path

import pytest

from tests.triton_lab import AMD, NVIDIA, compiled, run_interpreted

pytest.importorskip("triton")

both_targets = pytest.mark.parametrize("target", [NVIDIA, AMD], ids=["sm_90", "gfx90a"])
# Heads, and channels of a head; the last one rotates a quarter of them.
heads = pytest.mark.parametrize(("heads", "dim", "half"), [(32, 64, 32), (32, 128, 64), (40, 128, 16)])


def test_in_the_interpreter() -> None:
    run_interpreted(Path(__file__).with_name("interpreted_rotary.py"))


@both_targets
@heads
@pytest.mark.parametrize("name", ["_rotate", "_collect"])
def test_compiles_for_gpus(name: str, heads: int, dim: int, half: int, target: tuple[str, int | str, int]) -> None:
    """Eight programs of 128 threads fit an H100's multiprocessor; all accesses take vectors."""
    from llmtrain_kernels.rotary import triton_backend as kernels

    kernel = getattr(kernels, name)
    constants = kernels.tile_constants(heads, half, dim if name == "_collect" else 2 * half)
    constants |= {"dim": dim, "whole": dim} if name == "_collect" else {}
    tensors = {one: "*bf16" for one in ("x", "grad_q", "grad_k", "grad_v", "grad") if one in kernel.arg_names}
    types = tensors | {"cos": "*fp32", "sin": "*fp32"}
    strides = {one for one in kernel.arg_names if one.endswith(("_stride", "_batch", "_token", "_head"))}
    numbers = dict.fromkeys((*strides, "sequence", "heads", "kv_heads"), "i32")
    found = compiled(kernel, types | numbers, constants, {*types, *strides}, kernels.OPTIONS, target)
    assert found.spilled == 0
    assert found.registers <= 64
    # AMD's programs have twice the threads, and the few rotated channels of a quarter are spread over all threads.
    bits = 16 if half < 32 else 64 if target == AMD else 128
    assert narrowest(found.text) >= bits
    if target == NVIDIA:
        assert "fma" not in found.text


def narrowest(text: str) -> int:
    """Return the bits of the narrowest access to memory."""
    sizes = {"ushort": 16, "short": 16, "short_d16": 16, "dword": 32, "dwordx2": 64, "dwordx3": 96, "dwordx4": 128}
    nvidia = re.findall(r"(?:ld|st)\.global[\w.:]*?(?:\.v(\d))?\.b(\d+)", text)
    amd = re.findall(r"(?:global|buffer)_(?:load|store)_(\w+)", text)
    return min([int(count or 1) * int(bits) for count, bits in nvidia] + [sizes[one] for one in amd])
