"""The kernel that adds gradients to a flat sum, in Triton without a GPU: in its interpreter, and compiled for GPUs."""

from pathlib import Path

import pytest

from tests.triton_lab import AMD, NVIDIA, compiled, run_interpreted

pytest.importorskip("triton")


def test_in_the_interpreter() -> None:
    run_interpreted(Path(__file__).with_name("interpreted_accumulate.py"))


@pytest.mark.parametrize("target", [NVIDIA, AMD], ids=["sm_90", "gfx90a"])
@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("summed", ["fp32", "bf16"])
def test_compiles_for_gpus(summed: str, overwrite: bool, target: tuple[str, int | str, int]) -> None:
    """16 programs of 128 threads fit an H100's multiprocessor with 32 registers each; 8 keep its memory busy. All
    accesses are of 16 bytes if the parameters begin at multiples of 16 elements."""
    from llmtrain_kernels.accumulate import triton_backend as kernels

    parameters = 12
    types = {"flat": f"*{summed}", "gradients": ("*bf16",) * parameters, "first": "i32"}
    types |= {"starts": ("i32",) * parameters, "sizes": ("i32",) * parameters}
    constants = {"overwrite": overwrite, "tile": kernels.TILE}
    aligned = {"flat", "gradients", "starts", "sizes"}
    found = compiled(kernels._accumulate, types, constants, aligned, kernels.OPTIONS, target)
    assert found.spilled == 0
    assert found.registers <= 64
    assert found.narrow == 0
