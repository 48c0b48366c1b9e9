"""Threads that wait for posted receives, where a backend reports an arrival only to a thread that waits for it."""

from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from threading import Condition, Thread

from llmtrain.comm.device import on_this_device
from llmtrain.comm.messages import Channel

Wait = Callable[[], object]


class Arrivals:
    """One thread for each channel that is asked about, which waits for its receives one after another.

    The threads are daemons, so that a message that never comes does not keep the process alive.
    """

    def __init__(self, on_arrival: Callable[[], object]) -> None:
        """on_arrival: called by a thread after each arrival."""
        self._queues: dict[Channel, SimpleQueue[tuple[Wait, Future[None]] | None]] = {}
        self._changed, self._on_arrival = Condition(), on_arrival

    def watch(self, channel: Channel, wait: Wait) -> "Future[None]":
        """Have the channel's thread call `wait`; return a future that completes when `wait` returns or raises
        RuntimeError."""
        if channel not in self._queues:
            self._queues[channel] = SimpleQueue()
            work = on_this_device(self._run)
            Thread(target=work, args=[self._queues[channel]], name="pipeline", daemon=True).start()
        future: Future[None] = Future()
        self._queues[channel].put((wait, future))
        return future

    def until(self, condition: Callable[[], bool]) -> None:
        """Return once `condition`, which depends on the futures of `watch`, holds. The thread sleeps meanwhile."""
        with self._changed:
            self._changed.wait_for(condition)

    def close(self) -> None:
        """End each thread once the receives that it watches have completed."""
        for queue in self._queues.values():
            queue.put(None)

    def _run(self, queue: "SimpleQueue[tuple[Wait, Future[None]] | None]") -> None:
        while (item := queue.get()) is not None:
            wait, future = item
            try:
                wait()
            except RuntimeError as error:
                future.set_exception(error)
            else:
                future.set_result(None)
            # Otherwise the message's memory would live until the next message.
            del item, wait, future
            with self._changed:
                self._changed.notify_all()
            self._on_arrival()
