"""Streams, which run jobs one after another, in parallel with the computation: CUDA streams, or threads on CPUs."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Protocol

import torch

from llmtrain.comm.activity import Activity
from llmtrain.comm.device import on_this_device
from llmtrain.comm.waits import AllOf, Ticket

Job = Callable[[], object]


class Stream(Protocol):
    """Runs jobs in the order of submission, each after what was computed before its submission.

    blocks: whether the host waits for a job of another stream that waits for one of this."""

    blocks: bool

    def submit(self, job: Job) -> Ticket:
        """Queue `job`, which runs without gradients."""

    def close(self) -> None:
        """Take no more jobs."""


def new_stream(device: torch.device, name: str, activity: Activity) -> Stream:
    """Return a new stream for work on `device`. activity: records the time spent waiting."""
    return CudaStream(device, activity) if device.type == "cuda" else ThreadStream(name, activity)


def waiting_stream(device: torch.device, name: str, activity: Activity) -> Stream:
    """Return a new stream for jobs in which the host waits, such as reads of files."""
    on_gpu = device.type == "cuda"
    return CudaThreadStream(device, name, activity) if on_gpu else ThreadStream(name, activity, of_others=False)


class ThreadStream:
    """Runs jobs in a thread. gloo and ctypes release the interpreter's lock, so the main thread computes meanwhile.

    Once a job has raised an error, later jobs do not run, and waiting for them raises the same error. Later jobs may
    rely on what the failed job should have done, and their own errors would hide the cause.
    """

    blocks = False

    def __init__(self, name: str, activity: Activity | None = None, of_others: bool = True) -> None:
        """of_others: whether who waits for a job waits for other ranks."""
        activity = activity or Activity()
        self._wait = activity.wait if of_others else activity.timed
        self._jobs: SimpleQueue[tuple[Job, Future[None]] | None] = SimpleQueue()
        # A daemon: a job that waits for a lost rank does not keep the process alive.
        threading.Thread(target=on_this_device(self._run), name=name, daemon=True).start()

    def submit(self, job: Job) -> Ticket:
        """Queue `job`."""
        future: Future[None] = Future()
        self._jobs.put((job, future))
        return _ThreadTicket(future, self._wait)

    def close(self) -> None:
        """End the thread after the queued jobs."""
        self._jobs.put(None)

    def _run(self) -> None:
        # Every thread has this setting of its own.
        torch.set_grad_enabled(False)
        failed: BaseException | None = None
        while (queued := self._jobs.get()) is not None:
            job, future = queued
            try:
                if failed is None:
                    job()
            except BaseException as error:
                failed = error
            if failed is None:
                future.set_result(None)
            else:
                future.set_exception(failed)
            # Without this, the last job's tensors would live until the next job.
            del job, future, queued


class _ThreadTicket:
    def __init__(self, future: "Future[None]", wait: Callable[[Callable[[], None]], None]) -> None:
        self._future, self._wait = future, wait

    def wait(self) -> None:
        self._wait(self._future.result)


# CUDA starts waiting thread blocks in the order of their streams' priorities. Blocks of the computation are always
# waiting, so collectives and copies have the higher priority.
_FIRST = -1


class CudaStream:
    """Queues jobs on a CUDA stream. Streams wait for each other's events; the host does not wait."""

    blocks = False

    def __init__(self, device: torch.device, activity: Activity | None = None) -> None:
        self._stream, self._activity = torch.cuda.Stream(device, priority=_FIRST), activity or Activity()

    @torch.no_grad()
    def submit(self, job: Job) -> Ticket:
        """Queue `job` on the stream, behind what the current stream holds so far."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            job()
        return _StreamTicket(self._stream.record_event(), self._activity)

    def close(self) -> None:
        """Do nothing: the stream is freed with its last reference."""


class CudaThreadStream:
    """Runs jobs in a thread, on a CUDA stream of their own: for jobs in which the host waits, such as reads of files.
    The thread that submits does not wait."""

    blocks = True

    def __init__(self, device: torch.device, name: str, activity: Activity | None = None) -> None:
        self._stream, self._activity = torch.cuda.Stream(device, priority=_FIRST), activity or Activity()
        self._thread = ThreadStream(name, activity, of_others=False)

    def submit(self, job: Job) -> Ticket:
        """Queue `job`, behind what the current stream holds so far."""
        before, stream = torch.cuda.current_stream().record_event(), self._stream
        done = torch.cuda.Event()

        def run() -> None:
            with torch.cuda.stream(stream):
                stream.wait_event(before)
                job()
                done.record()

        return AllOf([self._thread.submit(run), _StreamTicket(done, self._activity)])

    def close(self) -> None:
        """End the thread after the queued jobs."""
        self._thread.close()


class _StreamTicket:
    def __init__(self, event: torch.cuda.Event, activity: Activity) -> None:
        self._event, self._activity = event, activity

    def wait(self) -> None:
        self._activity.wait(lambda: torch.cuda.current_stream().wait_event(self._event))
