"""Triton launches whose compiled form is kept, on a stand-in for a kernel and for a GPU's tensors."""

from typing import Any

import pytest
import torch
from llmtrain_kernels import triton_launch
from llmtrain_kernels.triton_launch import FORMS, launch
from torch import Tensor

Call = tuple[object, ...]


class OnGPU(Tensor):
    """A tensor that says it is on GPU 0."""

    def get_device(self) -> int:
        return 0


class Kernel:
    """A kernel of Triton: notes what Triton looks up and compiles (`searched`) and what runs at once (`called`)."""

    arg_names = ("x", "parts", "count", "rate", "tile", "kind")

    def __init__(self) -> None:
        self.searched, self.called = list[Call](), list[Call]()

    def fn(self) -> None: ...

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def compile_and_run(*arguments: object, **constants: object) -> "Compiled":
            self.searched.append((grid, arguments, constants))
            return Compiled(self)

        return compile_and_run


class Compiled:
    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel

    def __getitem__(self, grid: tuple[int, int, int]) -> Any:
        return lambda *arguments: self._kernel.called.append((grid, *arguments))


def on_gpu(elements: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.zeros(elements, dtype=dtype).as_subclass(OnGPU)


@pytest.fixture(autouse=True)
def first_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.version, "hip", None)


def run(kernel: Kernel, x: Tensor, parts: tuple[Any, ...], count: int | None = 3, rate: float = 0.5) -> None:
    launch(kernel, (2, 5), x, parts, count, rate, tile=64, kind="gelu", num_warps=4)


def test_the_second_launch_runs_what_the_first_compiled() -> None:
    kernel, x, other = Kernel(), on_gpu(64), on_gpu(64)
    run(kernel, x, (other, None))
    run(kernel, other, (x, None), rate=0.25)
    (searched,) = kernel.searched
    assert searched[0] == (2, 5)
    assert searched[2] == {"tile": 64, "kind": "gelu", "num_warps": 4}
    assert kernel.called == [((2, 5, 1), other.data_ptr(), (x.data_ptr(), None), 3, 0.25, 64, "gelu")]


@pytest.mark.parametrize(
    "other",
    [
        pytest.param(lambda x, y: (x, (y, None), 4), id="an integer"),
        pytest.param(lambda x, y: (x, (y, None), None), id="none for a number"),
        pytest.param(lambda x, y: (x, (y, y), 3), id="a tensor for none"),
        pytest.param(lambda x, y: (x, (y,), 3), id="a shorter tuple"),
        pytest.param(lambda x, y: (on_gpu(64, torch.bfloat16), (y, None), 3), id="a dtype"),
        pytest.param(lambda x, y: (x, (on_gpu(64, torch.float16), None), 3), id="a dtype in a tuple"),
    ],
)
def test_another_form_is_looked_up(other: Any) -> None:
    kernel, x, y = Kernel(), on_gpu(64), on_gpu(64)
    run(kernel, x, (y, None))
    run(kernel, *other(x, y))
    assert len(kernel.searched) == 2
    assert not kernel.called


def test_other_grids_and_constants_are_looked_up() -> None:
    kernel, x = Kernel(), on_gpu(64)
    for grid, tile in ((2, 64), (3, 64), (2, 32)):
        launch(kernel, (grid,), x, (), 1, 0.5, tile=tile, kind="gelu")
    assert len(kernel.searched) == 3


def test_an_address_that_is_no_multiple_of_16_bytes_is_left_to_triton() -> None:
    kernel, x = Kernel(), on_gpu(64)
    for _ in range(2):
        run(kernel, x[1:], (x,))
        run(kernel, x, (x[2:],))
    assert len(kernel.searched) == 4
    run(kernel, x[4:], (x,))
    run(kernel, x[8:], (x,))
    assert (len(kernel.searched), len(kernel.called)) == (5, 1)


@pytest.mark.parametrize(
    "machine",
    [
        pytest.param({"current_device": lambda: 1}, id="another GPU is the current one"),
        pytest.param({"hip": "7.0"}, id="AMD"),
    ],
)
def test_unusual_machines_are_left_to_triton(machine: dict[str, object], monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, x = Kernel(), on_gpu(64)
    for name, value in machine.items():
        monkeypatch.setattr(torch.version if name == "hip" else torch.cuda, name, value)
    run(kernel, x, ())
    run(kernel, x, ())
    assert len(kernel.searched) == 2


def test_tensors_on_the_cpu_are_left_to_triton() -> None:
    kernel, x = Kernel(), torch.zeros(64)
    run(kernel, x, ())
    run(kernel, x, ())
    assert len(kernel.searched) == 2


def test_forms_are_bounded() -> None:
    kernel, x = Kernel(), on_gpu(64)
    for count in range(FORMS + 1):
        run(kernel, x, (), count)
    assert len(triton_launch._forms(kernel.fn)) == 1
