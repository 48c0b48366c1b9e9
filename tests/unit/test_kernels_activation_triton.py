"""Activations in Triton without a GPU: in the interpreter, and compiled for GPUs."""

from pathlib import Path

import pytest

from tests.triton_lab import AMD, NVIDIA, compiled, run_interpreted

pytest.importorskip("triton")


def test_in_the_interpreter() -> None:
    run_interpreted(Path(__file__).with_name("interpreted_activation.py"))


@pytest.mark.parametrize("target", [NVIDIA, AMD], ids=["sm_90", "gfx90a"])
@pytest.mark.parametrize("kind", ["gelu", "gelu_tanh", "swiglu"])
@pytest.mark.parametrize("name", ["_forward", "_backward"])
def test_compiles_for_gpus(name: str, kind: str, target: tuple[str, int | str, int]) -> None:
    """Eight programs of 128 threads fit an H100's multiprocessor, and all accesses are wide."""
    from llmtrain_kernels.activation import triton_backend as kernels

    kernel = getattr(kernels, name)
    pointers = {one: "*bf16" for one in ("x", "y", "grad", "grad_x") if one in kernel.arg_names}
    constants = {"kind": kind, "tile": kernels.TILE}
    found = compiled(kernel, pointers | {"width": "i32"}, constants, {*pointers, "width"}, kernels.OPTIONS, target)
    assert found.spilled == 0
    assert found.registers <= 64
    # A thread moves several times eight numbers of each range.
    ranges = (2 if name == "_forward" else 3) + (kind == "swiglu") * (1 if name == "_forward" else 2)
    assert found.wide == ranges * kernels.TILE // (8 * kernels.OPTIONS["num_warps"] * target[2])
    assert found.narrow == 0


@pytest.mark.parametrize("target", [NVIDIA, AMD], ids=["sm_90", "gfx90a"])
@pytest.mark.parametrize("kind", ["gelu", "gelu_tanh"])
def test_sums_compile_for_gpus(kind: str, target: tuple[int, str | int, int]) -> None:
    from llmtrain_kernels.activation import triton_backend as kernels

    pointers, numbers = dict.fromkeys(("x", "grad", "grad_x"), "*bf16"), {"rows": "i32", "width": "i32"}
    found = compiled(
        kernels._backward_and_sums, pointers | {"partial": "*fp32"} | numbers, {"kind": kind, **kernels.SUMMED},
        {*pointers, "partial", "width"}, kernels.OPTIONS, target,
    )  # fmt: skip
    assert found.spilled == 0
    # Eight programs fit a multiprocessor of an H100, and seven a compute unit of an MI250X.
    assert found.registers <= (64 if target == NVIDIA else 72)
    # A thread moves twice eight numbers of each of three ranges, as one access each.
    assert found.wide >= 3
