"""Cross-entropy in Triton without a GPU: in its interpreter, and compiled for GPUs."""

from pathlib import Path

import pytest

from tests.triton_lab import AMD, NVIDIA, compiled, run_interpreted

pytest.importorskip("triton")

POINTERS = {"targets": "*i64", "losses": "*fp32", "found": "*fp32", "tops": "*fp32", "normalizers": "*fp32"}
KERNELS = {"_rows": {"needs_grad": True}, "_statistics": {}, "_gradient": {}}


def test_in_the_interpreter() -> None:
    run_interpreted(Path(__file__).with_name("interpreted_cross_entropy.py"))


@pytest.mark.parametrize("target", [NVIDIA, AMD], ids=["sm_90", "gfx90a"])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("name", KERNELS)
def test_compiles_for_gpus(name: str, dtype: str, target: tuple[str, int | str, int]) -> None:
    """Four programs of 256 threads fit an H100's multiprocessor, whose 65536 registers give each thread 64; whole
    vectors of 16 bytes are moved with GPT-2's odd vocabulary."""
    from llmtrain_kernels.cross_entropy import triton_backend as kernels

    types = POINTERS | {"apart": "i32", "end": "i32", "vocab": "i32"} | {"logits": f"*{dtype}"}
    constants = KERNELS[name] | {"tile": kernels.TILE}
    kernel = getattr(kernels, name)
    aligned = {*kernel.arg_names} - {*constants, "vocab"}
    found = compiled(kernel, types, constants, aligned, kernels.OPTIONS, target)
    assert found.spilled == 0
    assert found.registers <= 64
    # Narrow are the few numbers of the row itself.
    assert found.wide >= 1
    assert found.narrow <= 5
    # With an odd number of logits in memory, most accesses are narrow.
    odd = compiled(kernel, types, constants, aligned - {"end", "apart"}, kernels.OPTIONS, target)
    assert odd.narrow > 5
