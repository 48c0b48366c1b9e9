"""Measure how fast volumes are read and written past the page cache, by block size and queue depth."""

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, closing
from itertools import product
from typing import Literal

from llmtrain_kernels.direct_io.queue import DirectQueue, aligned_bytes
from torch import Tensor

from llmtrain.launch.measure.memory_result import TOGETHER, WAYS, VolumeRate, Way
from llmtrain.offload.striped_file import StripedFile

BLOCKS, DEPTHS = (2**17, 2**20, 2**22), (1, 8, 64)
"""Bytes of a transfer, and transfers of a volume at the same time."""

FILE = 2**28
"""Bytes of the file on each volume. They are written before they are read: a disk is not read where nothing was."""

_REGION = 2**24
# Regions of the memory. At least as many are started before the first of them is waited for.
_AHEAD = 4
_LEAST_SECONDS = 0.1


SocketBinding = tuple[Literal["near", "far"], AbstractContextManager[None]]
"""A socket, as a volume sees it, and what binds this process to it."""


class Volume:
    """A file on one volume. path: its folder. Raises RunFailedError."""

    def __init__(self, path: str) -> None:
        self.path, self.regions = path, FILE // _REGION
        self.file = StripedFile([path], [_REGION] * self.regions)
        self.close = self.file.close

    def fill(self, memory: Tensor) -> None:
        """Write all of the file once. memory: uint8, of a region."""
        with closing(DirectQueue()) as queue:
            started = [self.file.start_write(queue, region, memory) for region in range(self.regions)]
            for transfers in started:
                self.file.finish(queue, transfers)


def measure_volumes(
    paths: Sequence[str], seconds: float, sockets: Callable[[str], Sequence[SocketBinding]]
) -> Iterator[VolumeRate]:
    """Yield the rates of each volume, and of all together. seconds: time for all measurements. sockets: returns the
    sockets from which a volume is measured; none where there is only one. Raises RunFailedError."""
    with ExitStack() as stack:
        volumes = [stack.enter_context(closing(Volume(path))) for path in paths]
        memory = aligned_bytes(_AHEAD * _REGION).fill_(1)
        for volume in volumes:
            volume.fill(memory[:_REGION])
        cells = list(product(BLOCKS, DEPTHS))
        each = max(_LEAST_SECONDS, seconds / (len(WAYS) * (len(cells) * len(volumes) + 3 * len(volumes) + 1)))
        best: list[tuple[int, int]] = []
        for volume in volumes:
            own = [
                VolumeRate(volume.path, way, block, depth, rate([volume], way, (block, depth), each, memory))
                for block, depth in cells
                for way in WAYS
            ]
            yield from own
            fastest = max((one for one in own if one.way == "mixed"), key=lambda one: one.rate)
            best.append((fastest.block, fastest.depth))
            for socket, bound in sockets(volume.path):
                with bound:
                    # The memory lies on the socket that touches it first.
                    fresh = aligned_bytes(_AHEAD * _REGION).fill_(1)
                    for way in WAYS:
                        found = rate([volume], way, best[-1], each, fresh)
                        yield VolumeRate(volume.path, way, *best[-1], found, socket)
        if len(volumes) > 1:
            block, depth = max(best)
            for way in WAYS:
                yield VolumeRate(TOGETHER, way, block, depth, rate(volumes, way, (block, depth), each, memory))


def rate(volumes: Sequence[Volume], way: Way, cell: tuple[int, int], seconds: float, memory: Tensor) -> float:
    """Return the bytes per second of transfers on all volumes at the same time. cell: bytes of a block, and depth of
    each volume's queue. memory: uint8, which regions share: their contents do not matter."""
    block, depth = cell
    parts = memory.split(_REGION)
    # One region more than the queues hold, so that they are never empty.
    ahead = max(len(parts), block * depth * len(volumes) // _REGION + 1)
    started: deque[tuple[Volume, list[tuple[int, int]]]] = deque()
    with closing(DirectQueue(depth=depth * len(volumes), piece=block)) as queue:
        begun, number = time.perf_counter(), 0

        def finish() -> None:
            volume, transfers = started.popleft()
            volume.file.finish(queue, transfers)

        while time.perf_counter() - begun < seconds:
            # Neighbouring regions are of different volumes and, in a mix, of both ways.
            volume, turn = volumes[number % len(volumes)], number // len(volumes)
            writes = way == "write" or (way == "mixed" and turn % 2 == 1)
            start = volume.file.start_write if writes else volume.file.start_read
            started.append((volume, start(queue, turn * 5 % volume.regions, parts[number % len(parts)])))
            number += 1
            if len(started) == ahead:
                finish()
        while started:
            finish()
        return number * _REGION / (time.perf_counter() - begun)
