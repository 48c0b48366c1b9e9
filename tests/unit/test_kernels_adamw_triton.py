"""AdamW in Triton without a GPU: in its interpreter, and compiled for GPUs."""

from pathlib import Path

import pytest

from tests.triton_lab import AMD, NVIDIA, compiled, run_interpreted

pytest.importorskip("triton")

STATES = ("master", "m", "v", "new_master", "new_m", "new_v", "gradient")
NUMBERS = ("divisor", "m_share", "v_share", "v_kept", "eps", "rate", "kept")


def test_in_the_interpreter() -> None:
    run_interpreted(Path(__file__).with_name("interpreted_adamw.py"))


@pytest.mark.parametrize("target", [NVIDIA, AMD], ids=["sm_90", "gfx90a"])
@pytest.mark.parametrize("given", ["*fp32", None])
@pytest.mark.parametrize("weight", ["*bf16", "*fp32", None])
def test_compiles_for_gpus(weight: str | None, given: str | None, target: tuple[str, int | str, int]) -> None:
    """Eight programs of 128 threads fit an H100's multiprocessor; products and sums are rounded separately; with any
    number of elements, whole tiles are moved in accesses of four. given: the divisor on the device."""
    from llmtrain_kernels.adamw import triton_backend as kernels

    pointers = dict.fromkeys(STATES, "*fp32") | ({} if weight is None else {"weight": weight})
    types = pointers | {"numel": "i32", "places": ("i64",) * kernels.PLACES}
    types |= {} if given is None else {"given": given}
    types |= dict.fromkeys(NUMBERS, "fp32")
    constants: dict[str, int | None] = {"first": kernels.FIRST, "tile": kernels.TILE}
    constants |= {name: None for name, kind in (("weight", weight), ("given", given)) if kind is None}
    found = compiled(kernels._adamw, types, constants, {*pointers}, kernels.OPTIONS, target)
    assert found.spilled == 0
    assert found.registers <= 64
    # A thread has several fours of each range on NVIDIA's GPUs, one on AMD's, whose programs have twice the threads.
    fours = kernels.TILE // (4 * kernels.OPTIONS["num_warps"] * target[2])
    assert found.wide == fours * (7 + (weight == "*fp32"))
    if target == NVIDIA:
        assert "fma" not in found.text
        assert ".ftz" not in found.text
        # No exchange between threads.
        assert "bar.sync" not in found.text
