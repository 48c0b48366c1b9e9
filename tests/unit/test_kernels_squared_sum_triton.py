"""The sum of squares in Triton without a GPU: in its interpreter, and compiled for GPUs."""

from pathlib import Path

import pytest

from tests.triton_lab import AMD, NVIDIA, compiled, run_interpreted

pytest.importorskip("triton")


def test_in_the_interpreter() -> None:
    run_interpreted(Path(__file__).with_name("interpreted_squared_sum.py"))


@pytest.mark.parametrize("target", [NVIDIA, AMD], ids=["sm_90", "gfx90a"])
def test_compiles_for_gpus(target: tuple[str, int | str, int]) -> None:
    from llmtrain_kernels.squared_sum import triton_backend as kernels

    types = {"x": "*fp32", "sums": "*fp64"} | dict.fromkeys(("first", "numel", "blocks", "block"), "i32")
    constants = {"group": kernels.GROUP, "lanes": kernels.LANES, "ahead": kernels.AHEAD}
    found = compiled(kernels._squares, types, constants, {"x", "sums", "block"}, kernels.OPTIONS, target)
    assert found.spilled == 0
    # 16 programs of 128 threads fit an H100's multiprocessor with 32 registers each; 8 keep its memory busy.
    assert found.registers <= 64
