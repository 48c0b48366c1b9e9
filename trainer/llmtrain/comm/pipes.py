"""Pipes between two processes of one machine. They carry small numbers and wake a process that waits for them."""

import os
from array import array

import torch.distributed as dist

from llmtrain.comm.mapped_memory import gather_objects

_TYPE, _READ_BYTES = "H", 4096


class Pipes:
    """One end of two pipes, one for each direction. A pipe ends when the process that writes to it does.

    A reader sees all memory that the writer has written before the number.
    """

    def __init__(self, reading: int, writing: int) -> None:
        """reading, writing: file descriptors; the first does not block."""
        self._reading, self._writing, self.ended = reading, writing, False

    def fileno(self) -> int:
        """Return the descriptor to poll: it is ready when a number has come or the other process has ended."""
        return self._reading

    def read(self) -> "array[int]":
        """Return the numbers that have come, without waiting. Sets `ended` after the last one."""
        try:
            found = os.read(self._reading, _READ_BYTES)
        except BlockingIOError:
            return array(_TYPE)
        self.ended = not found
        return array(_TYPE, found)

    def write(self, number: int) -> None:
        """Send a number. At most `MOST_SLOTS` of plan.per_rank.message_buffers may be unread. Raises BrokenPipeError
        if the other process has ended."""
        os.write(self._writing, array(_TYPE, [number]))

    def close(self) -> None:
        """Close this end."""
        os.close(self._reading)
        os.close(self._writing)


def connect_pipes(group: dist.ProcessGroup) -> Pipes | None:
    """Connect the two ranks of `group`, which are on one machine; None on both if that fails. Collective."""
    reading, writing = os.pipe()
    os.set_blocking(reading, False)
    process, descriptor = gather_objects(group, (os.getpid(), writing))[1 - group.rank()]
    try:
        # No other process may hold an end of the pipe, so this one does not pass it to a process that it starts.
        there = os.open(f"/proc/{process}/fd/{descriptor}", os.O_WRONLY)
    except OSError:
        there = None
    connected = all(gather_objects(group, there is not None))
    os.close(writing)
    if there is not None and connected:
        return Pipes(reading, there)
    for left in (reading, there):
        if left is not None:
            os.close(left)
    return None
