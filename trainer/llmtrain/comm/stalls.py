"""How long the CUDA stream that computes waits."""

import threading
from collections import deque
from collections.abc import Callable
from typing import TypeVar

import torch

T = TypeVar("T")


class StreamStalls:
    """Measures waits of the CUDA stream that is current when this is made. On a CPU it measures nothing."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
        self._open: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()
        self._seconds, self._lock = 0.0, threading.Lock()
        self._thread = threading.get_ident()

    def timed(self, wait: Callable[[], T]) -> T:
        """Return the result of `wait`, which makes the stream, or the thread that fills it, wait. Where another thread
        lets another stream wait, nothing is measured."""
        if self._stream is None:
            return wait()
        # Autograd computes in a thread of its own, on the stream of the forward pass.
        if threading.get_ident() != self._thread and torch.cuda.current_stream() != self._stream:
            return wait()
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        before.record(self._stream)
        result = wait()
        after.record(self._stream)
        with self._lock:
            self._open.append((before, after))
        return result

    def seconds(self) -> float:
        """Return the seconds of all waits that the GPU has ended by now. The host does not wait."""
        with self._lock:
            while self._open and self._open[0][1].query():
                before, after = self._open.popleft()
                self._seconds += before.elapsed_time(after) / 1000
            return self._seconds
