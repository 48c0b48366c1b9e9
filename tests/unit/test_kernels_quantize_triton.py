"""Block quantization in Triton without a GPU: in its interpreter, and compiled for GPUs."""

from pathlib import Path
from typing import Any

import pytest
from llmtrain_kernels.quantize.packed_size import LARGEST_GPU_BLOCK

from tests.triton_lab import AMD, NVIDIA, compiled, run_interpreted

pytest.importorskip("triton")


def test_in_the_interpreter() -> None:
    run_interpreted(Path(__file__).with_name("interpreted_quantize.py"))


@pytest.mark.parametrize("target", [NVIDIA, AMD], ids=["sm_90", "gfx90a"])
@pytest.mark.parametrize("dtype", ["*fp32", "*bf16"])
@pytest.mark.parametrize("block", [256, 2048, LARGEST_GPU_BLOCK])
@pytest.mark.parametrize("bits", [8, 4])
def test_compiles_for_gpus(bits: int, block: int, dtype: str, target: tuple[str, int | str, int]) -> None:
    """Products and sums are rounded separately, and fp32 is loaded 16 bytes at a time."""
    from llmtrain_kernels.quantize import triton_backend as kernels

    pointers = {"x": dtype, "out": "*fp32", "payload": "*u8", "scales": "*fp32"}
    cases: list[tuple[Any, dict[str, Any]]] = [
        (kernels._quantize, kernels.tile_constants(bits, block) | kernels.format_constants(bits) | {"dither": True}),
        (kernels._unpack, kernels.tile_constants(bits, block) | {"add": True}),
    ]
    for kernel, constants in cases:
        types = {name: pointers.get(name, "i32") for name in kernel.arg_names if name not in constants}
        types |= {"reciprocal": "fp32"} if "reciprocal" in types else {}
        aligned = {name for name in types if name in (*pointers, "x_stride", "out_stride", "numel")}
        found = compiled(kernel, types, constants, aligned, dict(kernels.OPTIONS), target)
        assert found.spilled == 0
        assert found.registers <= (168 if block == LARGEST_GPU_BLOCK else 96)
        if target == NVIDIA:
            assert "fma" not in found.text
            assert found.wide > 0
