"""Messages between pipeline stages over MPI, in ranks that mpirun (or srun --mpi) started."""

import shutil
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from llmtrain.comm.messages import Channel, Request
from llmtrain.errors import BadInputError
from llmtrain.plan.program.posted_receives import posting_of

SPIN_SECONDS, NAP_SECONDS = 1e-3, 1e-4
"""How long a rank tests for a message without a pause, and how long it sleeps between tests after that."""


class MpiMessages:
    """Isend and Irecv on a communicator of its own, with one tag for each channel (Singh and Bhatele 2022, section
    IV.A)."""

    def __init__(self, peers: Mapping[Channel, int], stages: int, world: int, device: torch.device, ahead: int) -> None:
        """peers: the rank at the other end of each channel. stages: number of stages of the pipeline. ahead: receives
        to post on each channel. Raises BadInputError if MPI has another number of ranks than `world`."""
        everyone = _mpi().COMM_WORLD
        if everyone.size != world:
            raise BadInputError(
                f"pipeline.transport is mpi, but MPI knows {everyone.size} of the run's {world} ranks; start them with "
                f"mpirun -n {world} llmtrain run RECIPE, or set pipeline.transport=torch"
            )
        self._world = everyone.Dup()
        self._peers, self._stages, self._memory = peers, stages, _memory_of(device)
        self.posting = posting_of("mpi", ahead)

    def receive(self, channel: Channel, values: Tensor) -> Request:
        """See Messages."""
        memory, finish = self._memory.incoming(values)
        return _Request(self._world.Irecv(memory, self._peers[channel], self._tag(channel)), memory, finish)

    def send(self, channel: Channel, values: Tensor) -> Request:
        """See Messages."""
        memory = self._memory.outgoing(values)
        return _Request(self._world.Isend(memory, self._peers[channel], self._tag(channel)), memory)

    def until(self, condition: Callable[[], bool]) -> None:
        """Return once `condition` holds."""
        _until(condition)

    @property
    def nbytes(self) -> int:
        """See Messages. The backend's own buffers do not count."""
        return 0

    def close(self) -> None:
        """Free the communicator. Collective."""
        self._world.Free()

    def _tag(self, channel: Channel) -> int:
        return channel.source * self._stages + channel.target


@dataclass
class _Request:
    """An MPI request, with the memory that MPI reads or writes. finish: called once a receive has completed."""

    request: Any
    memory: Any
    finish: Callable[[], object] = lambda: None

    def is_completed(self) -> bool:
        return bool(self.request.Test())

    def wait(self) -> None:
        _until(self.is_completed)
        self.finish()


class _Memory(Protocol):
    """What MPI reads and writes in the place of a tensor."""

    def outgoing(self, values: Tensor) -> Any:
        """Return memory that holds `values` now."""

    def incoming(self, values: Tensor) -> tuple[Any, Callable[[], object]]:
        """Return memory for a message, and what brings the message into `values`."""


class _HostMemory:
    """Tensors on the CPU."""

    def outgoing(self, values: Tensor) -> Any:
        return _host_bytes(values)

    def incoming(self, values: Tensor) -> tuple[Any, Callable[[], object]]:
        return _host_bytes(values), lambda: None


class _CudaMemory:
    """Tensors on a GPU, where MPI reads and writes GPU memory. It does so on no stream, so the host waits first."""

    def outgoing(self, values: Tensor) -> Any:
        torch.cuda.current_stream().synchronize()
        return values.view(torch.uint8)

    def incoming(self, values: Tensor) -> tuple[Any, Callable[[], object]]:
        # A queued kernel may still read what this memory held before.
        torch.cuda.current_stream().synchronize()
        return values.view(torch.uint8), lambda: None


class _StagedMemory:
    """Tensors on a GPU whose messages go through host memory."""

    def outgoing(self, values: Tensor) -> Any:
        return _host_bytes(values.cpu())

    def incoming(self, values: Tensor) -> tuple[Any, Callable[[], object]]:
        host = torch.empty_like(values, device="cpu", pin_memory=True)
        return _host_bytes(host), lambda: values.copy_(host, non_blocking=True)


def _memory_of(device: torch.device) -> _Memory:
    if device.type == "cpu":
        return _HostMemory()
    return _CudaMemory() if _mpi_supports_cuda() else _StagedMemory()


def _host_bytes(values: Tensor) -> Any:
    """Return the memory of a contiguous tensor as bytes: mpi4py does not know all dtypes."""
    return values.view(torch.uint8).numpy()


def _until(done: Callable[[], bool]) -> None:
    """Return when `done`. MPI's own wait spins, which takes the processor from ranks that share it."""
    began = time.perf_counter()
    while not done():
        if time.perf_counter() - began > SPIN_SECONDS:
            time.sleep(NAP_SECONDS)


def _mpi() -> Any:
    try:
        from mpi4py import MPI
    except ImportError as error:
        raise BadInputError(
            f"pipeline.transport is mpi, which needs mpi4py and an MPI library ({error}); install them (pip "
            "install mpi4py), or set pipeline.transport=torch"
        ) from error
    return MPI


def _mpi_supports_cuda() -> bool:
    """Return whether this machine's Open MPI was built to read and write CUDA memory."""
    if shutil.which("ompi_info") is None:
        return False
    about = subprocess.run(["ompi_info", "--parsable", "--all"], capture_output=True, text=True, check=False).stdout
    return "mpi_built_with_cuda_support:value:true" in about
