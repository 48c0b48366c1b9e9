"""A lane runs jobs one after another beside the computation: a CUDA stream, or a thread on a CPU."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Protocol

import torch

from llmtrain.comm.activity import Watch

Job = Callable[[], object]


class Ticket(Protocol):
    """What a submitted job is waited for with."""

    def wait(self) -> None:
        """Have what this thread computes next come after the job. Raises what the job raised."""


class Lane(Protocol):
    """Where jobs run in the order in which they were submitted, each after what was computed before its submission."""

    def submit(self, job: Job) -> Ticket:
        """Queue `job`, which runs without gradients."""

    def close(self) -> None:
        """Take no more jobs."""


def lane(device: torch.device, name: str, watch: Watch) -> Lane:
    """Return a new lane for work on `device`. watch: told of waiting."""
    return StreamLane(device, watch) if device.type == "cuda" else ThreadLane(name, watch)


class ThreadLane:
    """Jobs run in a thread: gloo and ctypes release the interpreter's lock, so a CPU computes meanwhile."""

    def __init__(self, name: str, watch: Watch | None = None) -> None:
        self._watch = watch or Watch()
        self._jobs: SimpleQueue[tuple[Job, Future[None]] | None] = SimpleQueue()
        # A daemon, so that a job that waits for a lost rank does not keep the process alive.
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def submit(self, job: Job) -> Ticket:
        """Queue `job`."""
        future: Future[None] = Future()
        self._jobs.put((job, future))
        return _ThreadTicket(future, self._watch)

    def close(self) -> None:
        """End the thread when it has done what is queued."""
        self._jobs.put(None)

    def _run(self) -> None:
        torch.set_grad_enabled(False)  # a setting of each thread
        while (queued := self._jobs.get()) is not None:
            job, future = queued
            try:
                job()
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(None)
            # Else the last job's tensors would live until the next one comes.
            del job, future, queued


class _ThreadTicket:
    def __init__(self, future: "Future[None]", watch: Watch) -> None:
        self._future, self._watch = future, watch

    def wait(self) -> None:
        self._watch.wait(self._future.result)


class StreamLane:
    """Jobs are queued on a stream of their own; streams wait for each other's events, and the host for neither."""

    def __init__(self, device: torch.device, watch: Watch | None = None) -> None:
        self._stream, self._watch = torch.cuda.Stream(device), watch or Watch()

    @torch.no_grad()
    def submit(self, job: Job) -> Ticket:
        """Queue `job` on the stream, behind what the current stream holds so far."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            job()
        return _StreamTicket(self._stream.record_event(), self._watch)

    def close(self) -> None:
        """Nothing to end: a stream goes with its last reference."""


class _StreamTicket:
    def __init__(self, event: torch.cuda.Event, watch: Watch) -> None:
        self._event, self._watch = event, watch

    def wait(self) -> None:
        self._watch.wait(lambda: torch.cuda.current_stream().wait_event(self._event))
