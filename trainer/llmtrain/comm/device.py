"""What differs between CPUs and GPUs, for code that runs on either."""

import ctypes
import os
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from llmtrain_kernels.direct_io.queue import aligned_bytes
from torch import Tensor

from llmtrain.comm.pinned_memory import host_zeros
from llmtrain.comm.waits import Done, Event
from llmtrain.errors import RunFailedError

# The number of glibc's option, as malloc.h has it.
_M_MMAP_THRESHOLD = -3


@dataclass(frozen=True)
class Gpu:
    """A GPU that this process sees. memory: in bytes. address: on the machine's PCI buses."""

    name: str
    memory: int
    uuid: str
    address: str


def gpu_count() -> int:
    """Return how many GPUs this process sees."""
    return torch.cuda.device_count()


def built_for_amd() -> bool:
    """Return whether this torch is built for AMD's GPUs. The version of one that a user has built may not say so."""
    return torch.version.hip is not None


def gpus() -> list[Gpu]:
    """Return the GPUs that this process sees, in torch's order. Raises RuntimeError if CUDA cannot start, or one of
    them."""
    # torch's type stubs lack some of these fields.
    try:
        cards: list[Any] = [torch.cuda.get_device_properties(index) for index in range(gpu_count())]
    except AssertionError as error:
        # torch counts a GPU that the driver has lost.
        raise RuntimeError(str(error)) from error
    return [
        Gpu(
            card.name,
            card.total_memory,
            str(card.uuid),
            f"{card.pci_domain_id:04x}:{card.pci_bus_id:02x}:{card.pci_device_id:02x}.0",
        )
        for card in cards
    ]


@contextmanager
def named_start() -> Iterator[None]:
    """Raise RunFailedError if CUDA cannot start in the block."""
    try:
        yield
    except RuntimeError as error:
        rank, reason = os.environ.get("RANK", "0"), str(error).partition("\n")[0]
        raise RunFailedError(
            f"rank {rank} on {socket.gethostname()} cannot use its GPU: {reason}; see llmtrain doctor there"
        ) from error


def nccl_version() -> str:
    """Return the version of torch's NCCL. This process sees a GPU."""
    return ".".join(map(str, torch.cuda.nccl.version()))


def device_of(local_rank: int) -> torch.device:
    """Return the GPU of a local rank, the only one if the rank sees no other, or the CPU without GPUs."""
    count = gpu_count()
    return torch.device("cuda", 0 if count == 1 else local_rank) if count else torch.device("cpu")


def take_deterministic_kernels() -> None:
    """Let torch take only kernels whose results have the same bits in every run on the same device. An operation that
    has none raises RuntimeError."""
    torch.use_deterministic_algorithms(True)
    # No result depends on memory that nothing has written, so there is no need to fill it.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    # The backward pass of this attention kernel adds with atomics, so its bits vary. torch then uses another kernel.
    torch.backends.cuda.enable_mem_efficient_sdp(False)


def gpu_memory(device: torch.device) -> int | None:
    """Return the bytes of memory of a GPU, None for the CPU."""
    return None if device.type == "cpu" else gpus()[device.index or 0].memory


def is_cpu(device: torch.device) -> bool:
    """Return whether `device` is the CPU."""
    return device.type == "cpu"


def device_name(device: torch.device) -> str:
    """Return the device's name, for a CPU with the number of threads that torch uses."""
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    threads = torch.get_num_threads()
    return f"CPU, {threads} thread{'s' if threads > 1 else ''}"


def synchronize(device: torch.device) -> None:
    """Wait until `device` has computed all that was queued on it. The CPU has no queue."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def own_generators(device: torch.device) -> list[torch.device]:
    """Return the devices, besides the CPU, whose random number generators computation on `device` uses."""
    return [device] if device.type == "cuda" else []


def allocated_memory(device: torch.device) -> dict[str, int]:
    """Return the bytes `allocated` and `reserved` on a GPU, and `peak_allocated`; nothing for the CPU."""
    if device.type != "cuda":
        return {}
    return {
        "allocated": torch.cuda.memory_allocated(device),
        "reserved": torch.cuda.memory_reserved(device),
        "peak_allocated": torch.cuda.max_memory_allocated(device),
    }


def forget_peak_memory(device: torch.device) -> None:
    """Give unused memory back to the GPU, and reset the measured peak."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def give_freed_memory_back() -> None:
    """Let glibc give each block of host memory of at least 1 MiB back to the system once it is freed.

    By default it keeps blocks of up to 32 MiB, and the holes between those that are in use fit no aligned block of the
    same size: a process then takes twice to three times what it uses. A block that comes from the system costs the
    faults of its pages.
    """
    with suppress(AttributeError):
        # Another C library has no such function.
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 2**20)


def in_host_memory(tensor: Tensor) -> bool:
    """Return whether the CPU can read `tensor`, of any shape and dtype, without a copy."""
    return not tensor.is_cuda


def to_device(values: Tensor, device: torch.device) -> Tensor:
    """Return values, of any shape and dtype, on `device`: themselves if they are there. The host does not wait: a GPU
    copies host values from pinned memory, in the order of its current stream."""
    there = is_cpu(device) or not in_host_memory(values)
    return values if there else values.pin_memory().to(device, non_blocking=True)


def on_this_device(work: Callable[..., object]) -> Callable[..., object]:
    """Return `work` for another thread, where it has the GPU that is current here. A new thread has the first one: its
    events and streams would be of that, and CUDA would take memory there."""
    if not torch.cuda.is_initialized():
        return work
    device = torch.cuda.current_device()

    def run(*arguments: object) -> None:
        torch.cuda.set_device(device)
        work(*arguments)

    return run


def stays_for_stream(values: Tensor) -> None:
    """Keep the memory of a GPU's tensor, of any shape and dtype, until the current stream has done what is queued on it
    now. The tensor itself may be freed before."""
    if values.is_cuda:
        values.record_stream(torch.cuda.current_stream())


def to_host(values: Tensor) -> Tensor:
    """Return values, of any shape and dtype, in the host's memory. The host waits once, until a GPU has computed and
    copied them."""
    return start_to_host(values)()


def start_to_host(values: Tensor) -> Callable[[], Tensor]:
    """Start to copy values, of any shape and dtype, to the host's memory, in the order of a GPU's current stream.
    Return a function that waits for that copy, but for nothing that is queued later, and returns it."""
    if in_host_memory(values):
        return lambda: values
    host = torch.empty_like(values, device="cpu", pin_memory=True)
    host.copy_(values, non_blocking=True)
    copied = torch.cuda.Event()
    copied.record()

    def wait() -> Tensor:
        copied.synchronize()
        return host

    return wait


class HostCopies:
    """Host memory for copies of tensors, fp32. It is pinned if one of them is on a GPU, and a stream of its own then
    copies, beside the computation."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        """tensors: those that will be copied, or others of the same shapes, `[n]` each, on the same devices."""
        self._sizes = [tensor.numel() for tensor in tensors]
        gpu = next((tensor.device for tensor in tensors if not in_host_memory(tensor)), None)
        # Zeros touch every page, so that the kernel maps the memory now and not during the first copy.
        memory = host_zeros(sum(self._sizes), torch.float32, gpu is not None)
        self.copies: list[Tensor] = list(memory.split(self._sizes))
        self._stream = None if gpu is None else torch.cuda.Stream(gpu)

    def fits(self, tensors: Sequence[Tensor]) -> bool:
        """Return whether `tensors`, `[n]` each, are as large as those that the memory was made for."""
        return self._sizes == [tensor.numel() for tensor in tensors]

    def copy(self, tensors: Sequence[Tensor]) -> Event:
        """Copy tensors, `[n]` of any float dtype each, to `copies`, in fp32, as the current stream leaves them. Return
        a ticket, for which a stream waits before it changes the tensors, and a thread before it reads the copies.

        Copies from a GPU are queued, and the host continues.
        """
        if self._stream is None:
            self._copy(tensors)
            return Done()
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            self._copy(tensors)
        return self._stream.record_event()

    def _copy(self, tensors: Sequence[Tensor]) -> None:
        for copy, tensor in zip(self.copies, tensors, strict=True):
            copy.copy_(tensor, non_blocking=True)
            stays_for_stream(tensor)


class DeviceCopies:
    """Copies host values of one shape and dtype to a device, one after another. On a GPU: from pinned memory, into two
    buffers in turn."""

    def __init__(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> None:
        self._on_cpu, self._at = is_cpu(device), 0
        if not self._on_cpu:
            self._pinned = torch.empty(shape, dtype=dtype, pin_memory=True)
            self._buffers = [torch.empty(shape, dtype=dtype, device=device) for _ in range(2)]
            self._copied = torch.cuda.Event()

    def copy(self, values: Tensor) -> Tensor:
        """Return `values`, of the shape and dtype given before, on the device: on the CPU themselves; on a GPU a buffer
        that the call after the next one overwrites.

        The copy is queued on the current stream. The host waits only for the copy of the call before.
        """
        if self._on_cpu:
            return values
        self._copied.synchronize()
        self._pinned.copy_(values)
        self._at = 1 - self._at
        self._buffers[self._at].copy_(self._pinned, non_blocking=True)
        self._copied.record()
        return self._buffers[self._at]


def new_buffer_pool(elements: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return zeros, `[elements]` of `dtype`. On a CPU they begin at a page, so that files are read into them
    directly."""
    if not is_cpu(device):
        return torch.zeros(elements, dtype=dtype, device=device)
    return aligned_bytes(elements * dtype.itemsize).view(dtype).zero_()
