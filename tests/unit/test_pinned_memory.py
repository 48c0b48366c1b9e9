"""Host memory that a GPU copies from and to, with a stand-in for CUDA that notes what is pinned."""

import ctypes
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest
import torch
from llmtrain.checkpoint import save, state_shard
from llmtrain.checkpoint.load import load
from llmtrain.checkpoint.save import Checkpointer
from llmtrain.checkpoint.state_shard import StateShard
from llmtrain.cluster.layout import Axis, Layout
from llmtrain.comm import device
from llmtrain.comm.device import HostCopies
from llmtrain.comm.pinned_memory import LARGE, aligned_host_bytes, host_zeros
from llmtrain.comm.ranks import Links, Ranks
from llmtrain.errors import RunFailedError
from llmtrain.model.tensors import TensorSpec, UnitSpec
from llmtrain.offload.activation_store import HostActivations
from llmtrain.offload.copies import ImmediateCopies
from llmtrain.offload.gradient_store import BucketedGradients
from llmtrain.offload.gradient_tiers import HostGradients
from llmtrain.offload.staging import Pinned
from llmtrain.offload.states import HostStates
from llmtrain.offload.weight_stores import FileWeights, HostWeights, Volumes
from llmtrain.plan.activation_offload import ActivationMoves
from llmtrain.plan.memory.checkpoint_copies import SHARD_FILE_BLOCK
from llmtrain.plan.offload import Bucket
from llmtrain.plan.program.gradient_buckets import UnitGradients
from llmtrain_kernels.direct_io.queue import FILE_ALIGNMENT

# Elements of more than LARGE bytes, whose number is no power of two.
NUMEL = LARGE // 4 + 3


class Registered(NamedTuple):
    """resident: bytes of the process then."""

    address: int
    nbytes: int
    resident: int


class Cuda:
    """Stands for CUDA's functions. error: what cudaHostRegister returns. unregistered: each address, and its float."""

    def __init__(self) -> None:
        self.error = 0
        self.registered = list[Registered]()
        self.unregistered = list[tuple[int, float]]()

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:  # noqa: N802
        assert flags == 0
        self.registered.append(Registered(address, nbytes, psutil.Process().memory_info().rss))
        return self.error

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        # The memory is there still.
        self.unregistered.append((address, ctypes.c_float.from_address(address).value))
        return 0

    def cudaGetErrorString(self, error: int) -> str:  # noqa: N802
        return f"error number {error}"


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    stands = Cuda()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: stands)
    return stands


def test_large_memory_is_pinned_as_it_is(cuda: Cuda) -> None:
    before = psutil.Process().memory_info().rss
    memory = host_zeros(NUMEL, torch.float32, pinned=True)
    found = cuda.registered[0]
    assert (found.address, found.nbytes) == (memory.data_ptr(), 4 * NUMEL)
    assert found.address % FILE_ALIGNMENT == 0
    # Its pages are mapped before.
    assert found.resident - before > 0.9 * found.nbytes
    assert memory.shape == (NUMEL,)
    assert not memory.any()


def test_it_is_unpinned_with_its_last_reference(cuda: Cuda) -> None:
    memory = host_zeros(NUMEL, torch.float32, pinned=True)
    memory[0] = 7
    address, part = memory.data_ptr(), memory.split(1000)[5].view(10, 100)
    del memory
    assert not cuda.unregistered
    del part
    assert cuda.unregistered == [(address, 7.0)]


def test_memory_that_cannot_be_pinned_ends_the_run(cuda: Cuda) -> None:
    cuda.error = 2
    with pytest.raises(RunFailedError, match=r"^16\.0 MiB of the host's memory could not be pinned .*number 2.*ulimit"):
        host_zeros(NUMEL, torch.float32, pinned=True)
    assert not cuda.unregistered


def test_on_a_cpu_nothing_is_pinned(cuda: Cuda) -> None:
    assert not host_zeros(NUMEL, torch.float32, pinned=False).any()
    assert aligned_host_bytes(LARGE, pinned=False).data_ptr() % FILE_ALIGNMENT == 0
    assert not cuda.registered


def test_pinned_memory_for_files_begins_at_a_page(cuda: Cuda) -> None:
    memory = aligned_host_bytes(LARGE + FILE_ALIGNMENT, pinned=True)
    assert memory.data_ptr() % FILE_ALIGNMENT == 0
    assert memory.nbytes == LARGE + FILE_ALIGNMENT
    assert [one.nbytes for one in cuda.registered] == [LARGE + 2 * FILE_ALIGNMENT]


def _copies(folder: Path) -> object:
    return HostCopies([torch.zeros(1), torch.zeros(NUMEL - 1)])


def _slots(folder: Path) -> object:
    return Pinned(ImmediateCopies(), NUMEL, torch.float32, torch.float32)


def _coming(folder: Path) -> object:
    buckets = [Bucket("a", 0, NUMEL, 1)]
    units = {"a": UnitGradients(0, buckets, [True], resident=0, hops_after_sum=False)}
    return BucketedGradients(HostGradients(buckets, pinned=False), units, {}, {}, pinned=True)


def _file_weights(folder: Path) -> object:
    return FileWeights({"a": NUMEL}, torch.float32, True, Volumes((str(folder),), (1.0,)), direct=False)


PAGES = -(-4 * NUMEL // FILE_ALIGNMENT) * FILE_ALIGNMENT + FILE_ALIGNMENT
MAKERS: dict[str, tuple[Callable[[Path], object], list[int]]] = {
    "states": (lambda folder: HostStates([Bucket("a", 0, NUMEL, 3)], pinned=True), [12 * NUMEL]),
    "gradients": (lambda folder: HostGradients([Bucket("a", 0, NUMEL, 1)], pinned=True), [4 * NUMEL]),
    "weights": (lambda folder: HostWeights({"a": 9, "b": 2 * NUMEL}, torch.bfloat16, pinned=True), [18 + 4 * NUMEL]),
    "activations": (
        lambda folder: HostActivations(ActivationMoves(regions=3), (NUMEL,), torch.float32, pinned=True),
        [12 * NUMEL],
    ),
    "slots of gradients and weights": (_slots, [4 * NUMEL, 4 * NUMEL]),
    "slot of gradients to be added": (_coming, [4 * NUMEL]),
    "copies for checkpoints": (_copies, [4 * NUMEL]),
    "weights in files": (_file_weights, [PAGES, PAGES]),
}


@pytest.mark.parametrize("name", MAKERS)
def test_stores_pin_what_the_plan_counts(
    name: str, cuda: Cuda, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """To the byte: torch's allocator would take up to twice as much."""
    monkeypatch.setattr(device, "in_host_memory", lambda tensor: False)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: None)
    make, nbytes = MAKERS[name]
    store = make(tmp_path)
    assert [one.nbytes for one in cuda.registered] == nbytes
    assert not cuda.unregistered
    del store
    assert len(cuda.unregistered) == len(nbytes)


def test_a_save_in_the_foreground_copies_a_block_at_most(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of states on a GPU; `to_host` stands for what copies them."""
    unit = UnitSpec("u", (TensorSpec(name="u.a", parameter="a", shape=(3, 3_000_000), decay=True),))
    values, copied = torch.arange(unit.numel, dtype=torch.float32), list[int]()
    assert values.nbytes > 2 * SHARD_FILE_BLOCK

    def to_host(part: torch.Tensor) -> torch.Tensor:
        copied.append(part.nbytes)
        return part.clone()

    def refused(states: Sequence[torch.Tensor]) -> None:
        raise AssertionError("it copies all states")

    monkeypatch.setattr(state_shard, "to_host", to_host)
    monkeypatch.setattr(save, "HostCopies", refused)
    ranks = Ranks(0, 0, Layout({Axis.DATA: 1}), torch.device("cpu"), Links())
    checkpointer = Checkpointer(tmp_path, ranks, 1, asynchronous=False)
    shard = StateShard(unit, 0, unit.numel, {"master": values})
    checkpointer.reserve([shard])
    assert not copied
    assert checkpointer.save(1, [shard], {}, {"recipe": {}, "model": {}}) is None
    assert sum(copied) == values.nbytes
    assert max(copied) == SHARD_FILE_BLOCK
    found = StateShard(unit, 0, unit.numel, {"master": torch.zeros(unit.numel)})
    load(tmp_path / "step-00000001", [found], ranks)
    assert torch.equal(found.states["master"], values)
