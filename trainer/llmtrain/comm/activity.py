"""What this rank does, and how long it waits for others. It explains which rank the others wait for, and which is
slow."""

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

import torch

from llmtrain.comm.crash_notes import CrashNote, Ending, Last
from llmtrain.comm.stalls import StreamStalls

T = TypeVar("T")

# Seconds after which the share of a step that is done is shown.
LONG = 1.0


class Activity:
    """The activity of one rank.

    phase: of the run, empty during training; `show` sets it. last: the newest record. moved: time of the newest record
    or call of `moving`, in seconds since the epoch. writing: whether the rank writes its part of a checkpoint. waiting:
    whether the thread that computes waits for others. lost: whether it has lost contact with others.
    """

    def __init__(self, rank: int = 0, path: str | None = None) -> None:
        """path: of the launcher's crash notes, None without them."""
        self.rank = rank
        self._note = CrashNote(path, rank)
        self.phase = ""
        self._share: float | None = None
        self._step_began = time.monotonic()
        self.last, self.moved = Last(), time.time()
        self.writing = self.waiting = self.lost = False
        self._timing, self._began, self._waited = False, 0.0, 0.0
        self._stalls: StreamStalls | None = None
        self._thread = threading.get_ident()

    def record(self, doing: str, step: int | None = None) -> None:
        """Record what this rank begins. step: steps done, None if as before."""
        self.last = Last(self.last.step if step is None else step, doing)
        self.moved = time.time()
        self._note.write(self.last)

    def begin(self, phase: str) -> None:
        """Record a long phase, which the user is shown until the next one begins."""
        self.show(phase)
        self.record(phase)

    def begin_step(self, step: int) -> None:
        """Record that a step begins. step: steps done."""
        self._share, self._step_began = None, time.monotonic()
        self.record("computing", step)

    def show(self, phase: str) -> None:
        """Show the user a phase, of which nothing is done yet; empty during training."""
        self.phase, self._share = phase, None

    def moving(self, share: float | None = None) -> None:
        """Record that the phase, or the step, moves on. share: how much of it is done, 0 to 1, None if as before."""
        self.moved = time.time()
        if share is not None:
            self._share = share

    def doing(self) -> str:
        """Return the phase, and how much of it is done if that is known; of a step without a phase, the share that is
        done, once it takes long."""
        phase, share = self.phase, self._share
        if not phase and share is not None and time.monotonic() - self._step_began > LONG:
            phase = "this step"
        return phase if share is None or not phase else f"{phase}: {share:.0%}"

    def ended(self, how: Ending) -> None:
        """Record how this rank is about to end by itself."""
        self.lost = how == Ending.LOST
        self._note.write(replace(self.last, ending=how))

    @property
    def over(self) -> bool:
        """Whether another rank or the launcher has found that the run cannot continue."""
        return self._note.over

    def start_timing(self) -> None:
        """Measure the time spent waiting until `own_seconds` is called."""
        self._timing, self._began, self._waited = True, time.perf_counter(), 0.0
        self._stalls = StreamStalls(torch.device("cuda")) if torch.cuda.is_initialized() else None

    def wait(self, wait: Callable[[], T]) -> T:
        """Return the result of `wait`, which makes the thread or the current CUDA stream wait for other ranks."""
        if self.waiting or threading.get_ident() != self._thread:
            return self.timed(wait)
        self.waiting = True
        try:
            return self.timed(wait)
        finally:
            self.waiting = False

    def timed(self, wait: Callable[[], T]) -> T:
        """Return the result of `wait`, which waits for other ranks, or for what this rank reads or writes."""
        if not self._timing:
            return wait()
        if self._stalls is not None:
            return self._stalls.timed(wait)
        if threading.get_ident() != self._thread:
            # The computation does not wait for another thread's wait.
            return wait()
        begin = time.perf_counter()
        try:
            return wait()
        finally:
            self._waited += time.perf_counter() - begin

    def own_seconds(self) -> float:
        """Return the seconds since `start_timing` in which this rank did not wait for others."""
        self._timing = False
        if self._stalls is not None:
            torch.cuda.synchronize()
            self._waited = self._stalls.seconds()
        return time.perf_counter() - self._began - self._waited
