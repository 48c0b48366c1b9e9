"""NCCL registers memory of its allocator with a communicator, and uses it."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from llmtrain.comm.registered_memory import RegisteredMemory
from llmtrain.errors import RunFailedError

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[dist.ProcessGroup]:
    """A communicator of this process alone."""
    store, device = dist.FileStore(str(tmp_path / "store"), 1), torch.device("cuda", torch.cuda.current_device())
    dist.init_process_group("nccl", store=store, rank=0, world_size=1, device_id=device)
    assert dist.group.WORLD is not None
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_registered_memory_is_used(alone: dist.ProcessGroup) -> None:
    try:
        memory = RegisteredMemory(alone, torch.device("cuda", torch.cuda.current_device()))
    except RunFailedError as error:
        pytest.skip(str(error))
    with memory.allocating():
        x = torch.ones(2**20, device="cuda")
    memory.register([alone])
    dist.all_reduce(x)
    assert bool((x == 1).all())
    # What follows lies elsewhere.
    assert torch.ones(2**20, device="cuda").data_ptr() != x.data_ptr()
    memory.deregister()
    dist.all_reduce(x)
    assert bool((x == 1).all())
