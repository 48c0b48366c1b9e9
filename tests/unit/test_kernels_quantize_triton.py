"""Block quantization in Triton without a GPU: in its interpreter, and compiled for a GPU."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")


def test_in_the_interpreter() -> None:
    tests = Path(__file__).with_name("interpreted_quantize.py")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tests)]
    done = subprocess.run(
        command, env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-4000:]


@pytest.mark.parametrize("bits", [8, 4])
def test_compiles_for_a_gpu(bits: int) -> None:
    """The target is an H100 or H200: products and sums are rounded separately, and loads take 16 bytes at a time."""
    from llmtrain_kernels.quantize import triton_backend as kernels
    from triton import compile as triton_compile
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    pointers = {"x": "*fp32", "out": "*fp32", "payload": "*u8", "scales": "*fp32"}
    compiled: dict[Any, dict[str, Any]] = {
        kernels._quantize: kernels.tile_constants(bits, 2048) | kernels.format_constants(bits) | {"dither": True},
        kernels._unpack: kernels.tile_constants(bits, 2048) | {"add": True},
    }
    for kernel, constants in compiled.items():
        names = kernel.arg_names
        signature = {name: "constexpr" if name in constants else pointers.get(name, "i32") for name in names}
        signature |= {"reciprocal": "fp32"} if "reciprocal" in names else {}
        aligned = [name for name in names if name in (*pointers, "x_stride", "out_stride", "numel")]
        source = ASTSource(
            fn=kernel,
            signature=signature,
            constexprs={(names.index(name),): value for name, value in constants.items()},
            attrs={(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
        )
        text = triton_compile(source, target=GPUTarget("cuda", 90, 32), options=dict(kernels.OPTIONS)).asm["ptx"]
        assert "fma" not in text
        assert "v4.b32" in text
