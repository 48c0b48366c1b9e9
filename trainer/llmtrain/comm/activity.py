"""What this rank does and for how long it waits for others: noted for those who ask why the run stands still, or who
slows it."""

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

import torch

from llmtrain.comm.crash_notes import CrashNote, Ending, Last

T = TypeVar("T")


class Activity:
    """Notes of one rank.

    phase: of the run, empty in the middle of training. last: the newest note. moved: when that was, seconds since the
    epoch. writing: whether it writes its part of a checkpoint. lost: whether it has lost contact with others.
    """

    def __init__(self, rank: int = 0, path: str | None = None) -> None:
        """path: of the launcher's notes, None where nobody keeps any."""
        self.rank = rank
        self._note = CrashNote(path, rank)
        self.phase = ""
        self._share: float | None = None
        self.last, self.moved, self.writing, self.lost = Last(), time.time(), False, False
        self._timing, self._began, self._waited = False, 0.0, 0.0
        self._stalls: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._stream: torch.cuda.Stream | None = None
        self._thread = threading.get_ident()

    def record(self, doing: str, step: int | None = None) -> None:
        """Note what this rank begins. step: steps done, where that has changed."""
        self.last = Last(self.last.step if step is None else step, doing)
        self.moved = time.time()
        self._note.write(self.last)

    def begin(self, phase: str) -> None:
        """Note a phase that takes its time, and which the person who watches is told of until the next one begins."""
        self.phase, self._share = phase, None
        self.record(phase)

    def moving(self, share: float | None = None) -> None:
        """Note that what was begun goes on. share: how much of the phase is done, 0 to 1, None if as before."""
        self.moved = time.time()
        if share is not None:
            self._share = share

    def doing(self) -> str:
        """Return the phase, and how much of it is done where that is known."""
        share = self._share
        return self.phase if share is None or not self.phase else f"{self.phase}: {share:.0%}"

    def ended(self, how: Ending) -> None:
        """Note that this rank is about to end by itself, and how."""
        self.lost = how == Ending.LOST
        self._note.write(replace(self.last, ending=how))

    @property
    def over(self) -> bool:
        """Whether another rank, or the launcher, has found that the run cannot go on."""
        return self._note.over

    def start_timing(self) -> None:
        """Tell work from waiting until `own_seconds` is asked for."""
        self._timing, self._began, self._waited = True, time.perf_counter(), 0.0
        self._stream = torch.cuda.current_stream() if torch.cuda.is_initialized() else None

    def wait(self, wait: Callable[[], T]) -> T:
        """Return what `wait` returns, which waits for other ranks: the thread does, or the current CUDA stream."""
        if not self._timing:
            return wait()
        if self._stream is not None:
            if torch.cuda.current_stream() != self._stream:
                # Another stream's wait holds up no computation.
                return wait()
            before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            before.record()
            result = wait()
            after.record()
            self._stalls.append((before, after))
            return result
        if threading.get_ident() != self._thread:
            # Another thread's wait holds up no computation.
            return wait()
        begin = time.perf_counter()
        try:
            return wait()
        finally:
            self._waited += time.perf_counter() - begin

    def own_seconds(self) -> float:
        """Return the seconds since `start_timing` in which this rank did not wait for others."""
        self._timing = False
        if self._stream is not None:
            torch.cuda.synchronize()
            self._waited = sum(before.elapsed_time(after) for before, after in self._stalls) / 1000
            self._stalls.clear()
        return time.perf_counter() - self._began - self._waited
