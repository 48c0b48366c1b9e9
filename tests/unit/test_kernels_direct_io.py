"""Transfers past the page cache: contents, counts, errors."""

import errno
import os
import resource
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from llmtrain_kernels.direct_io.queue import FILE_ALIGNMENT, DirectQueue, Interface, aligned_bytes


@pytest.fixture
def file(tmp_path: Path) -> Iterator[int]:
    opened = os.open(tmp_path / "states", os.O_CREAT | os.O_RDWR | os.O_DIRECT)
    os.posix_fallocate(opened, 0, 2**22)
    yield opened
    os.close(opened)


def random_bytes(nbytes: int, seed: int) -> torch.Tensor:
    memory = aligned_bytes(nbytes)
    return memory.random_(0, 256, generator=torch.Generator().manual_seed(seed))


def opened(interface: Interface, depth: int = 64, piece: int = 2**20) -> DirectQueue:
    try:
        return DirectQueue(interface, depth, piece)
    except OSError as error:
        pytest.skip(f"this machine forbids it: {error}")


@pytest.mark.parametrize("interface", ["io_uring", "aio"])
@pytest.mark.parametrize(("depth", "piece"), [(1, FILE_ALIGNMENT), (4, 3 * FILE_ALIGNMENT), (64, 2**20)])
def test_what_is_written_is_read(file: int, interface: Interface, depth: int, piece: int) -> None:
    """More transfers than the kernel takes at once, of sizes that are no multiples of the pieces."""
    queue = opened(interface, depth, piece)
    sizes = [FILE_ALIGNMENT * pages for pages in (1, 7, 64, 3, 128)]
    starts = [sum(sizes[:place]) for place in range(len(sizes))]
    sent = [random_bytes(size, size) for size in sizes]
    writes = [queue.write(file, start, values) for start, values in zip(starts, sent, strict=True)]
    for transfer in reversed(writes):
        queue.finish(transfer)
    received = [aligned_bytes(size) for size in sizes]
    reads = [queue.read(file, start, into) for start, into in zip(starts, received, strict=True)]
    for transfer in reads:
        queue.finish(transfer)
    assert all(map(torch.equal, sent, received))
    assert queue.moved == {(file, "read"): sum(sizes), (file, "write"): sum(sizes)}
    queue.close()


@pytest.mark.parametrize("interface", ["io_uring", "aio"])
def test_errors_name_themselves(file: int, interface: Interface) -> None:
    queue, memory = opened(interface), aligned_bytes(FILE_ALIGNMENT)
    with pytest.raises(OSError, match="Bad file descriptor"):
        queue.finish(queue.read(10_000, 0, memory))
    # Behind the end of the file there is nothing to read.
    with pytest.raises(OSError, match="Input/output error"):
        queue.finish(queue.read(file, 2**22, memory))
    # The queue still works.
    queue.finish(queue.read(file, 0, memory))
    queue.close()


def test_without_both_interfaces_both_reasons_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(queue: DirectQueue, interface: Interface, depth: int, piece: int) -> int:
        code = {"io_uring": errno.EPERM, "aio": errno.EAGAIN}[interface]
        raise OSError(code, f"{interface}: {os.strerror(code)}")

    monkeypatch.setattr(DirectQueue, "_open", refuse)
    with pytest.raises(OSError, match="io_uring: Operation not permitted; aio: Resource temporarily unavailable"):
        DirectQueue()
    with pytest.raises(OSError, match=r"\] io_uring: Operation not permitted$"):
        DirectQueue("io_uring")


def test_a_queue_that_cannot_be_opened_keeps_no_descriptor() -> None:
    """There is no room in the process for the queue's 3 MiB."""
    DirectQueue().close()
    before, limits = len(os.listdir("/proc/self/fd")), resource.getrlimit(resource.RLIMIT_AS)
    taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    try:
        resource.setrlimit(resource.RLIMIT_AS, (taken + 2**20, limits[1]))
        with pytest.raises(OSError, match="io_uring: "):
            DirectQueue("io_uring", depth=2**15)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_full_file_system(tmp_path: Path) -> None:
    """A file may not grow past the limit of its process: as on a full disk, the write is cut short and then fails."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    opened = os.open(tmp_path / "full", os.O_CREAT | os.O_RDWR | os.O_DIRECT)
    queue = DirectQueue()
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2 * FILE_ALIGNMENT, limits[1]))
        with pytest.raises(OSError, match="File too large"):
            queue.finish(queue.write(opened, 0, random_bytes(4 * FILE_ALIGNMENT, 0)))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, before)
        queue.close()
        os.close(opened)
    assert os.path.getsize(tmp_path / "full") == 2 * FILE_ALIGNMENT


def test_unaligned_transfers_are_refused(file: int) -> None:
    queue, memory = DirectQueue(), aligned_bytes(2 * FILE_ALIGNMENT)
    for offset, part in ((512, memory), (0, memory[:512]), (0, memory[512 : 512 + FILE_ALIGNMENT])):
        with pytest.raises(ValueError, match="not aligned to 4096 bytes"):
            queue.read(file, offset, part)
    queue.close()


def test_closing_waits_for_what_runs(file: int) -> None:
    queue, values = DirectQueue(), random_bytes(2**22, 1)
    queue.write(file, 0, values)
    queue.close()
    queue, into = DirectQueue(), aligned_bytes(2**22)
    queue.finish(queue.read(file, 0, into))
    queue.close()
    assert torch.equal(values, into)
