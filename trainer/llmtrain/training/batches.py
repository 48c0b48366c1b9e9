"""Reads the training data one global batch ahead."""

from contextlib import suppress
from dataclasses import dataclass, field

import torch
from llmtrain_data.dataset import Samples
from torch import Tensor

from llmtrain.cluster.layout import Axis, even_share
from llmtrain.comm.activity import Activity
from llmtrain.comm.device import DeviceCopies
from llmtrain.comm.ranks import Ranks
from llmtrain.comm.stream import waiting_stream
from llmtrain.comm.waits import Ticket
from llmtrain.plan.plan import Plan


@dataclass
class _Read:
    """A read that has begun. first: position of its global batch. rows: its result, one tensor once it has ended."""

    first: int
    rows: list[Tensor] = field(default_factory=list)
    ticket: Ticket | None = None

    def wait(self) -> Tensor:
        """Return the result, which what is computed next on this thread may use. Raises what the read raised."""
        assert self.ticket is not None
        self.ticket.wait()
        return self.rows[0]


class BatchReader:
    """Reads this rank's part of each global batch in a thread, while the batch before is computed.

    On a GPU the thread also queues the copy to the device, from pinned memory and on a stream of its own. The
    computation waits there for the copy; the host waits only for the read.
    """

    def __init__(self, samples: Samples, plan: Plan, ranks: Ranks) -> None:
        layout = ranks.layout
        degree, data_rank = layout.degree(Axis.DATA), layout.coordinate(ranks.rank, Axis.DATA)
        self._samples, self._seed, self._sequences = samples, plan.seed, plan.batch.sequences
        self._start, self._end = even_share(self._sequences, degree, data_rank)
        shape = self._end - self._start, plan.batch.sequence_length + 1
        self._copies = DeviceCopies(shape, torch.int64, ranks.device)
        # A rank that waits for its own data is slow itself; it does not wait for others. So this is not timed.
        self._stream = waiting_stream(ranks.device, "batches", Activity())
        self._ahead: _Read | None = None

    def take(self, first: int, more: bool) -> Tensor:
        """Return this rank's samples of the global batch at position `first` of the order of samples.

        int64 `[sequences, tokens + 1]` on the device, until the call after the next one. more: whether to begin to read
        the batch after it. Raises DataError if data of this batch is damaged; for that of the batch after it, the call
        that takes it does.
        """
        read, self._ahead = self._ahead, None
        if read is None or read.first != first:
            read = self._begin(first)
        rows = read.wait()
        if more:
            self._ahead = self._begin(first + self._sequences)
        return rows

    def close(self) -> None:
        """End the thread, after the read that has begun. Nobody takes its batch, so its error is of no interest."""
        self._stream.close()
        if self._ahead is not None:
            with suppress(Exception):
                self._ahead.wait()

    def _begin(self, first: int) -> _Read:
        read = _Read(first)
        read.ticket = self._stream.submit(lambda: read.rows.append(self._copies.copy(self._rows(first))))
        return read

    def _rows(self, first: int) -> Tensor:
        return torch.from_numpy(self._samples.batch(self._seed, first + self._start, self._end - self._start))
