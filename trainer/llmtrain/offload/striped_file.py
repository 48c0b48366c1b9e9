"""Regions of bytes that are striped over files on several volumes."""

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial

import torch
from llmtrain_kernels.direct_io.queue import FILE_ALIGNMENT, DirectQueue, aligned_bytes
from torch import Tensor

from llmtrain.errors import RESUMES, RunFailedError
from llmtrain.offload.usage import TierUsage
from llmtrain.plan.direct_file import nameless_file, take_space
from llmtrain.plan.stripes import stripes


class StripedFile:
    """Regions in one file on each volume. The files have no names, so that they are gone when their process ends.

    paths: a folder on each volume. regions: bytes of each region, multiples of ALIGNMENT. bandwidths: relative ones
    of the volumes, by which bytes are shared out; equal by default. The files take their space immediately where the
    file system can reserve it: a later write cannot find the volume full. Raises RunFailedError.

    A transfer that fails ends all that come after it: what the file has there is not what was written, and whoever
    waited for the transfer, such as a checkpoint, may not be who reads it next.
    """

    def __init__(self, paths: Sequence[str], regions: Sequence[int], bandwidths: Sequence[float] = ()) -> None:
        self._paths, self._stripes = paths, stripes(regions, bandwidths or [1.0] * len(paths))
        self._files = [_opened(path) for path in paths]
        self._waited = [0.0] * len(paths)
        self._failure: RunFailedError | None = None
        # For `reading` and `writing`.
        self._queue: DirectQueue | None = None
        self._lock = threading.Lock()
        self.nbytes = [0] * len(paths)
        for stripe in (one for region in self._stripes for one in region):
            self.nbytes[stripe.volume] += stripe.nbytes
        for path, file, nbytes in zip(paths, self._files, self.nbytes, strict=True):
            if nbytes:
                with _failing(path, f"cannot take {nbytes} bytes"):
                    take_space(file, nbytes)

    def start_read(self, queue: DirectQueue, region: int, into: Tensor, start: int = 0) -> list[tuple[int, int]]:
        """Start to read bytes of a region from `start`, a multiple of ALIGNMENT; return the transfers for `finish`.
        into: uint8 `[nbytes]`, from `aligned_bytes`."""
        parts = self._parts(region, start, into)
        self._check()
        return [(volume, queue.read(self._files[volume], offset, own)) for volume, offset, own in parts]

    def start_write(self, queue: DirectQueue, region: int, values: Tensor, start: int = 0) -> list[tuple[int, int]]:
        """Start to write `values`, uint8 `[nbytes]`, to a region from `start`, a multiple of ALIGNMENT; return the
        transfers for `finish`."""
        parts = self._parts(region, start, values)
        self._check()
        return [(volume, queue.write(self._files[volume], offset, own)) for volume, offset, own in parts]

    def finish(self, queue: DirectQueue, transfers: Sequence[tuple[int, int]]) -> None:
        """Wait for transfers. Raises RunFailedError."""
        for volume, transfer in transfers:
            started = time.perf_counter()
            self._finish(queue, volume, transfer)
            self._waited[volume] += time.perf_counter() - started

    def reading(self, region: int, start: int, into: Tensor) -> Callable[[], None]:
        """Start to read bytes of a region from `start`, a multiple of ALIGNMENT, into uint8 `[nbytes]`, from
        `aligned_bytes`; return what waits for them and raises RunFailedError. Any thread may call both."""
        with self._lock:
            queue = self._queue = self._queue or DirectQueue()
            return partial(self._wait, queue, self.start_read(queue, region, into, start))

    def writing(self, region: int, start: int, values: Tensor) -> Callable[[], None]:
        """Start to write uint8 `[nbytes]`, which must not change until it is done, to a region from `start`. See
        `reading`."""
        with self._lock:
            queue = self._queue = self._queue or DirectQueue()
            return partial(self._wait, queue, self.start_write(queue, region, values, start))

    def _wait(self, queue: DirectQueue, transfers: Sequence[tuple[int, int]]) -> None:
        for volume, transfer in transfers:
            with self._lock:
                self._finish(queue, volume, transfer)

    def _finish(self, queue: DirectQueue, volume: int, transfer: int) -> None:
        self._check()
        try:
            with _failing(self._paths[volume], "failed", f"; {RESUMES}"):
                queue.finish(transfer)
        except RunFailedError as error:
            self._failure = error
            raise

    def _check(self) -> None:
        """Raise the error of a transfer that has failed."""
        if self._failure is not None:
            raise RunFailedError(str(self._failure)) from self._failure

    def elements(self, region: int, base: int, dtype: torch.dtype, start: int, end: int) -> Callable[[], Tensor]:
        """Start to read elements `[start, end)` of the array at byte `base` of a region, a multiple of ALIGNMENT.
        Return what waits for them and returns a copy, `[end - start]`. Any thread may call both."""
        size = dtype.itemsize
        first, last = start * size // FILE_ALIGNMENT * FILE_ALIGNMENT, -(-end * size // FILE_ALIGNMENT) * FILE_ALIGNMENT
        into = aligned_bytes(last - first)
        wait = self.reading(region, base + first, into)

        def read() -> Tensor:
            wait()
            return into.view(dtype)[start - first // size : end - first // size]

        return read

    def usage(self, *queues: DirectQueue) -> TierUsage:
        """Return what queues have read from and written to each volume, and the seconds that `finish` has waited for
        each, once the volumes before had what it asked."""
        read, written = (
            [sum(queue.moved[file, way] for queue in queues) for file in self._files] for way in ("read", "write")
        )
        return TierUsage(
            read=dict(zip(self._paths, read, strict=True)),
            written=dict(zip(self._paths, written, strict=True)),
            waited=sum(self._waited),
            waits=dict(zip(self._paths, self._waited, strict=True)),
        )

    def close(self) -> None:
        """Close the files, which frees their space. Waits for what `reading` and `writing` have started."""
        if self._queue is not None:
            self._queue.close()
            self._queue = None
        for file in self._files:
            with suppress(OSError):
                os.close(file)
        # What is open next may have their numbers.
        self._files = [-1] * len(self._files)

    def _parts(self, region: int, start: int, memory: Tensor) -> Iterator[tuple[int, int, Tensor]]:
        """Yield (volume, offset in its file, part of `memory`)."""
        for one in self._stripes[region]:
            first, last = max(start, one.first), min(start + memory.nbytes, one.first + one.nbytes)
            if first < last:
                yield one.volume, one.offset + first - one.first, memory[first - start : last - start]


def _opened(path: str) -> int:
    with _failing(path, "cannot hold offloaded states"):
        return nameless_file(path)


@contextmanager
def _failing(path: str, what: str, advice: str = "") -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise RunFailedError(f"offload.paths has {path}, which {what}: {error.strerror}{advice}") from error
