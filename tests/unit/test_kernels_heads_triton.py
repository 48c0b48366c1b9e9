"""The joined gradient of queries, keys and values in Triton without a GPU."""

from pathlib import Path

import pytest

from tests.triton_lab import AMD, NVIDIA, compiled, run_interpreted

pytest.importorskip("triton")


def test_in_the_interpreter() -> None:
    run_interpreted(Path(__file__).with_name("interpreted_heads.py"))


@pytest.mark.parametrize("target", [NVIDIA, AMD], ids=["sm_90", "gfx90a"])
@pytest.mark.parametrize("dim", [64, 128])
def test_compiles_for_gpus(dim: int, target: tuple[str, int | str, int]) -> None:
    from llmtrain_kernels.heads import triton_backend as kernels

    tensors = dict.fromkeys(("grad_q", "grad_k", "grad_v", "joined"), "*bf16") | {"partial": "*fp32"}
    strides = {one for one in kernels._join.arg_names if one.endswith(("_batch", "_token", "_head"))}
    numbers = dict.fromkeys((*strides, "tokens", "sequence", "heads", "kv_heads"), "i32")
    found = compiled(
        kernels._join, tensors | numbers, {"dim": dim, **kernels.CONSTANTS}, {*tensors, *strides}, kernels.OPTIONS,
        target,
    )  # fmt: skip
    assert found.spilled == 0
    assert found.registers <= 64
    # A load and a store of each of the three.
    assert found.wide >= 6
