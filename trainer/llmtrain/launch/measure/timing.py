"""Measure how long collectives and messages take over a link.

Every rank goes through the same measurements at the same time, so that all agree on the next one; ranks that take no
part in a measurement wait for it. The time of a measurement is that of the slowest rank.
"""

from collections.abc import Callable
from datetime import timedelta
from statistics import linear_regression, median
from time import perf_counter

import torch
import torch.distributed as dist

from llmtrain.cluster.description import Cluster
from llmtrain.comm.collectives import ALL_GATHER, REDUCE_SCATTER
from llmtrain.comm.device import gpu_count, synchronize
from llmtrain.comm.groups import group_over
from llmtrain.comm.ranks import Ranks
from llmtrain.errors import RunFailedError
from llmtrain.launch.measure.links import Link
from llmtrain.launch.measure.result import OPERATIONS, Measured, Timing

TimedCall = Callable[[], object]

# Bytes of a rank's message: it quadruples until one takes LONG seconds.
SMALLEST, LARGEST_ON_CPU, LARGEST_ON_CUDA = 2**10, 2**24, 2**28
LONG = 0.05
# An operation's time is the median of its repeats. A link's latency and bandwidth come from the shortest repeat,
# because other load on the machines only adds time. A bandwidth is the slope of the time over the largest sizes, so
# that fixed costs, such as the latency or a traffic shaper's burst, do not count. These messages take up to STREAM
# seconds, and have LARGE_MESSAGE bytes or more.
STREAM, LARGE_MESSAGE = 0.3, 2**20
# A repeat makes a short call again and again for BATCH seconds, so that different start times of ranks average out.
BATCH, MOST_CALLS, REPEATS = 0.02, 100, 5
# Time for ranks to connect over a card. Cards that cannot reach each other must not stall the run.
CONNECT_TIMEOUT = timedelta(minutes=1)


def measure(link: Link, cluster: Cluster, ranks: Ranks) -> Measured:
    """Measure a link; the result is the same on every rank. Collective over all ranks.

    For a link between ranks on given CPU sockets, measures only messages. Raises RunFailedError if the link's ranks
    cannot reach each other.
    """
    with _LinkTimer(link, cluster, ranks) as timer:
        latency = timer.latency()
        operations = OPERATIONS if link.sockets is None else OPERATIONS[-1:]
        timings = tuple(timing for operation in operations for timing in timer.sizes(operation))
        largest = max((each for each in timings if each.operation == OPERATIONS[-1]), key=lambda each: each.size)
        return Measured(link, latency, timer.bandwidth(largest), timings)


class _LinkTimer:
    """Measures one link, in a `with` block."""

    def __init__(self, link: Link, cluster: Cluster, ranks: Ranks) -> None:
        self._link, self._ranks = link, ranks
        self._largest = LARGEST_ON_CUDA if gpu_count() else LARGEST_ON_CPU
        self._members = next((group for group in link.groups if ranks.rank in group), None)
        self._touched = torch.zeros(1, device=ranks.device)
        card = link.nic(cluster, ranks.rank)
        try:
            self._group = group_over(cluster, card, link.groups, timeout=CONNECT_TIMEOUT)
            if self._members:
                # The first use makes the connections.
                self._touch()
        except RuntimeError as error:
            over = f" over {card.interface}" if card and card.interface else ""
            members = " and ".join(map(str, self._members or ()))
            raise RunFailedError(
                f"ranks {members} do not reach each other{over}; leave the card out of the description, or correct it"
            ) from error

    def __enter__(self) -> "_LinkTimer":
        return self

    def __exit__(self, *_: object) -> None:
        if self._members:
            dist.destroy_process_group(self._group)

    def latency(self) -> float:
        """Return the seconds of one message: half the round trip of a short message on an idle link."""
        pair, rank = self._link.groups[0][:2], self._ranks.rank
        message = torch.zeros(1, device=self._ranks.device)

        def there() -> None:
            dist.send(message, pair[1], group=self._group)
            dist.recv(message, pair[1], group=self._group)

        def back() -> None:
            dist.recv(message, pair[0], group=self._group)
            dist.send(message, pair[0], group=self._group)

        call = {pair[0]: there, pair[1]: back}.get(rank)
        return min(self._repeated(call, call)) / 2

    def sizes(self, operation: str) -> list[Timing]:
        """Time an operation on messages of growing size."""
        found: list[Timing] = []
        size = SMALLEST
        while size <= self._largest and (not found or found[-1].seconds < LONG):
            call, numel = self._call(operation, size)
            found.append(Timing(operation, numel * 4, median(self._repeated(call))))
            size *= 4
        return found

    def bandwidth(self, largest: Timing) -> float:
        """Return the bytes per second that each rank sends while all send. largest: timing of the largest message."""
        size = LARGE_MESSAGE
        while size * 2 <= min(self._largest, largest.size / largest.seconds * STREAM):
            size *= 2
        calls = {each: self._exchange(each) for each in (size // 4, size // 2, size)}
        # Send the smallest message before each call, to use up a traffic shaper's burst.
        smallest = calls[size // 4]
        repeats = [[self._seconds(call, 1, smallest) for call in calls.values()] for _ in range(REPEATS)]
        slope = linear_regression(list(calls), [min(times) for times in zip(*repeats, strict=True)]).slope
        # On a very fast link the times of these sizes do not differ.
        return 1 / slope if slope > 0 else largest.size / largest.seconds

    def _call(self, operation: str, size: int) -> tuple[TimedCall | None, int]:
        """Return a call of the operation, None on ranks that take no part, and the elements of its larger buffer."""
        members = len(self._link.groups[0])
        numel = -(-size // 4 // members) * members
        if operation == OPERATIONS[-1]:
            return self._exchange(size), size // 4
        if not self._members:
            return None, numel
        full, shard = self._buffers(numel, numel // members)
        other, group = (self._buffers(numel)[0] if operation == "all-to-all" else full), self._group
        calls: dict[str, TimedCall] = {
            "all-reduce": lambda: dist.all_reduce(full, group=group),
            "all-gather": lambda: ALL_GATHER(full, shard, group=group),
            "reduce-scatter": lambda: REDUCE_SCATTER(shard, full, group=group),
            "all-to-all": lambda: dist.all_to_all_single(other, full, group=group),
        }
        return calls[operation], numel

    def _exchange(self, size: int) -> TimedCall | None:
        """Return a call that sends `size` bytes to the next rank of the group and receives as many from the previous
        one."""
        if not self._members:
            return None
        index = self._members.index(self._ranks.rank)
        after, before = self._members[(index + 1) % len(self._members)], self._members[index - 1]
        sent, received = self._buffers(size // 4, size // 4)

        def exchange() -> None:
            # Receive first: otherwise gloo's go-ahead to the sender would queue behind the data that this rank sends.
            messages = [
                dist.P2POp(dist.irecv, received, before, self._group),
                dist.P2POp(dist.isend, sent, after, self._group),
            ]
            for work in dist.batch_isend_irecv(messages):
                work.wait()

        return exchange

    def _buffers(self, *numels: int) -> list[torch.Tensor]:
        # Sums of zeros stay zero, however often they repeat.
        return [torch.zeros(numel, device=self._ranks.device) for numel in numels]

    def _repeated(self, call: TimedCall | None, before: TimedCall | None = None) -> list[float]:
        """Return the times of a call; for a short call, each is the mean of several in a row.

        before: a call that makes all participants start together; None: the call itself if it is short, else a small
        all-reduce over the group.
        """
        # The first call makes connections and buffers.
        first = self._seconds(call, 1, call)
        times = min(max(int(BATCH / first), 1), MOST_CALLS)
        before = before or (call if times > 1 else self._touch)
        return [self._seconds(call, times, before) for _ in range(REPEATS)]

    def _touch(self) -> None:
        dist.all_reduce(self._touched, group=self._group)

    def _seconds(self, call: TimedCall | None, times: int, before: TimedCall | None) -> float:
        """Return the mean seconds of `times` calls in a row on the slowest rank. Collective.

        before: a call that runs first and makes the participants start together.
        """
        self._ranks.activity.record(f"measuring {self._link.tier}")
        self._slowest(0.0)
        if call is None or before is None:
            return self._slowest(0.0)
        before()
        synchronize(self._ranks.device)
        begin = perf_counter()
        for _ in range(times):
            call()
        synchronize(self._ranks.device)
        return self._slowest((perf_counter() - begin) / times)

    def _slowest(self, seconds: float) -> float:
        found = torch.tensor(seconds, dtype=torch.float64, device=self._ranks.device)
        dist.all_reduce(found, dist.ReduceOp.MAX)
        return float(found)
