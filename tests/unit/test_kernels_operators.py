"""Operators that are called directly, except where a dispatch mode looks."""

import threading
from typing import Any

import pytest
import torch
from llmtrain_kernels.operators import fake, operator
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode


class Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen = list[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> object:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.fixture(scope="module")
def doubled() -> Any:
    @operator("doubled_in_a_test", writes=("out",))
    def double(x: Tensor, out: Tensor) -> None:
        """Write twice `x` to `out`."""
        out.copy_(x * 2)

    @fake("doubled_in_a_test")
    def _(x: Tensor, out: Tensor) -> None:
        return None

    return double


def test_a_recorder_sees_one_call(doubled: Any) -> None:
    x, out = torch.arange(3.0), torch.empty(3)
    with Recorder() as recorder:
        doubled(x, out)
    # torch shows what runs inside to no mode.
    assert recorder.seen == ["llmtrain.doubled_in_a_test.default"]
    assert out.tolist() == [0, 2, 4]


def test_without_one_the_function_is_called(doubled: Any) -> None:
    x, out = torch.arange(3.0), torch.empty(3)
    with torch.profiler.profile() as profiled:
        doubled(x, out=out)
    assert out.tolist() == [0, 2, 4]
    assert "llmtrain::doubled_in_a_test" not in {event.name for event in profiled.events() or ()}
    assert doubled.__doc__ == "Write twice `x` to `out`."


def test_modes_of_other_threads_do_not_count(doubled: Any) -> None:
    """Two threads leave their modes in the order in which they entered them. torch's own flag then stays set."""
    first, second = Recorder(), Recorder()
    turns = [threading.Event() for _ in range(3)]

    def one() -> None:
        with first:
            turns[0].set()
            turns[1].wait()
        turns[2].set()

    def two() -> None:
        turns[0].wait()
        with second:
            turns[1].set()
            turns[2].wait()

    flag = torch.utils._python_dispatch._is_in_torch_dispatch_mode
    threads = [threading.Thread(target=target) for target in (one, two)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    try:
        assert torch.utils._python_dispatch.is_in_torch_dispatch_mode()
        test_without_one_the_function_is_called(doubled)
    finally:
        torch.utils._python_dispatch._is_in_torch_dispatch_mode = flag


def test_fake_tensors_run_nothing(doubled: Any) -> None:
    """The function itself would complain of the shape."""
    with FakeTensorMode():
        x, out = torch.empty(3), torch.empty(4)
        assert doubled(x, out) is None
        with pytest.raises(RuntimeError, match="size"):
            doubled.__wrapped__(x, out)
