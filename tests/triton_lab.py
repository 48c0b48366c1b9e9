"""What tests of Triton kernels share: bytes that a kernel moves in the interpreter, and what a compiler makes of it."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import pytest

NVIDIA, AMD = ("cuda", 90, 32), ("hip", "gfx90a", 64)


def run_interpreted(tests: Path) -> None:
    """Run a file of tests in a process of its own, because TRITON_INTERPRET takes effect at import."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tests)]
    done = subprocess.run(
        command, env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-4000:]


@dataclass
class Moved:
    """Bytes that kernels loaded and stored; lanes that a mask excludes move none."""

    loaded: int = 0
    stored: int = 0


@contextmanager
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[Moved]:
    """Count what kernels in the interpreter load and store."""
    from triton.runtime.interpreter import interpreter_builder as builder

    moved = Moved()
    load, store = builder.create_masked_load, builder.create_masked_store

    def counting_load(pointers: Any, mask: Any, *rest: Any) -> Any:
        moved.loaded += int(mask.data.sum()) * pointers.get_element_ty().primitive_bitwidth // 8
        return load(pointers, mask, *rest)

    def counting_store(pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        moved.stored += int(mask.data.sum()) * pointers.get_element_ty().primitive_bitwidth // 8
        return store(pointers, value, mask, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(builder, "create_masked_load", counting_load)
        patch.setattr(builder, "create_masked_store", counting_store)
        yield moved


@contextmanager
def rounded(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Round to bf16 as a GPU does: to nearest, ties to even. The interpreter cuts digits off."""
    import torch
    import triton.language as tl
    from triton.runtime.interpreter import TensorHandle, interpreter_builder

    kind = type(interpreter_builder)
    cast = kind.cast_impl

    def rounding_cast(self: Any, source: Any, to: Any) -> Any:
        if (source.dtype.scalar, to.scalar) != (tl.float32, tl.bfloat16):
            return cast(self, source, to)
        bits = torch.from_numpy(source.data.copy()).bfloat16().view(torch.int16).numpy()
        return TensorHandle(bits.view("uint16"), tl.bfloat16)

    with monkeypatch.context() as patch:
        patch.setattr(kind, "cast_impl", rounding_cast)
        yield


@dataclass(frozen=True)
class Compiled:
    """registers: of a thread. spilled: bytes that a thread keeps in memory for want of registers. text: PTX or AMD
    assembly."""

    registers: int
    spilled: int
    text: str

    @property
    def wide(self) -> int:
        """Count accesses to memory of 16 bytes."""
        return sum("v4.b32" in one or "dwordx4" in one for one in self._accesses())

    @property
    def narrow(self) -> int:
        """Count accesses to memory of fewer bytes."""
        return len(self._accesses()) - self.wide

    def _accesses(self) -> list[str]:
        return re.findall(r"(?:ld|st)\.global[\w.:]*|(?:global|buffer)_(?:load|store)_\w+", self.text)


def compiled(
    kernel: Any, types: dict[str, Any], constants: dict[str, Any], aligned: set[str], options: dict[str, Any],
    target: tuple[Any, ...] = NVIDIA,
) -> Compiled:  # fmt: skip
    """Compile a kernel. types: of the arguments, by name. aligned: those that are multiples of 16, or point to one, or
    tuples of such."""
    from triton import compile as triton_compile
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = kernel.arg_names
    places = [
        (names.index(name), *within)
        for name in aligned
        for within in ([()] if isinstance(types[name], str) else [(one,) for one in range(len(types[name]))])
    ]
    source = ASTSource(
        fn=kernel,
        signature={name: "constexpr" if name in constants else types[name] for name in names},
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={place: [["tt.divisibility", 16]] for place in places},
    )
    found = triton_compile(source, target=GPUTarget(*target), options=dict(options))
    return _of_nvidia(found.asm) if target[0] == "cuda" else _of_amd(found.asm["amdgcn"])


def _of_nvidia(asm: dict[str, Any]) -> Compiled:
    from triton import knobs

    # The resources of each function in the cubin: "REG:32 STACK:0 SHARED:64 LOCAL:0".
    with NamedTemporaryFile(suffix=".cubin") as file:
        file.write(asm["cubin"])
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        listed = subprocess.run(command, capture_output=True, check=True, text=True).stdout
    used = {name: int(number) for name, number in re.findall(r"(REG|STACK|LOCAL):(\d+)", listed)}
    return Compiled(used["REG"], used["STACK"] + used["LOCAL"], asm["ptx"])


def _of_amd(text: str) -> Compiled:
    used = re.findall(r"\.(vgpr_count|private_segment_fixed_size): +(\d+)", text)
    counts = {name: int(number) for name, number in used}
    return Compiled(counts["vgpr_count"], counts["private_segment_fixed_size"], text)
