"""Norms in Triton without a GPU: in the interpreter, and compiled for GPUs."""

from pathlib import Path

import pytest

from tests.triton_lab import AMD, NVIDIA, compiled, run_interpreted

pytest.importorskip("triton")

both_targets = pytest.mark.parametrize("target", [NVIDIA, AMD], ids=["sm_90", "gfx90a"])
widths = pytest.mark.parametrize("width", [768, 4096, 8192])
NUMBERS = {"statistics": "*fp32", "eps": "fp32", "rows": "i32", "width": "i32"}


def test_in_the_interpreter() -> None:
    run_interpreted(Path(__file__).with_name("interpreted_norm.py"))


@both_targets
@widths
@pytest.mark.parametrize("centered", [False, True])
def test_forward_compiles_for_gpus(centered: bool, width: int, target: tuple[str, int | str, int]) -> None:
    from llmtrain_kernels.norm import triton_backend as kernels

    tile = kernels.tile_constants(width)
    options = {"num_warps": tile.pop("num_warps")}
    pointers = dict.fromkeys(("x", "added", "weight", "total", "y"), "*bf16") | ({"bias": "*bf16"} if centered else {})
    constants: dict[str, int | None] = {**tile, **({} if centered else {"bias": None})}
    aligned = {*pointers, "statistics", "width"}
    found = compiled(kernels._forward, pointers | NUMBERS, constants, aligned, options, target)
    assert found.spilled == 0
    assert found.registers * options["num_warps"] * 32 <= 65536
    assert found.wide >= 4
    # Statistics of a few rows.
    assert found.narrow <= 4


@both_targets
@widths
@pytest.mark.parametrize("centered", [False, True])
def test_backward_compiles_for_gpus(centered: bool, width: int, target: tuple[str, int | str, int]) -> None:
    from llmtrain_kernels.norm import triton_backend as kernels

    constants = kernels.tile_constants(width)
    options = {"num_warps": constants.pop("num_warps")}
    pointers = dict.fromkeys(("total", "weight", "grad", "above", "grad_x"), "*bf16")
    types, aligned = pointers | NUMBERS | {"partial": "*fp32"}, {*pointers, "statistics", "partial", "width"}
    found = compiled(kernels._backward, types, constants | {"centered": centered}, aligned, options, target)
    assert found.spilled == 0
    # A thread has at most 128 of the multiprocessor's 65536, so that 512 threads fit.
    assert found.registers <= 128
    assert found.wide >= 4
