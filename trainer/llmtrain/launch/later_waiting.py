"""How OpenMP's threads wait for each other once a run has started, as other programs come and go.

libgomp reads its variables once. But where a process has more OpenMP threads than cores, it lets them spin for 100 or
1000 rounds in place of 300,000 (its manual, GOMP_SPINCOUNT). So a second team, which does nothing, ends long spins.
"""

import ctypes
import os
import threading
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil

from llmtrain.launch.waiting import CHOSEN, in_words, taken_cores

# Seconds between two looks at the cores.
_PERIOD = 2.0


class SecondTeam:
    """A second team of OpenMP threads, which sleeps. size: of its threads, with the one that holds it."""

    def __init__(self, gomp: ctypes.CDLL, size: int) -> None:
        self._gomp, self._size = gomp, size
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._hold, name="second team", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """End the team's threads."""
        self._ended.set()
        self._thread.join()

    def _hold(self) -> None:
        # A team lives as long as the thread that called it. Each of its threads frees a null pointer: nothing.
        nothing = ctypes.cast(ctypes.CDLL(None).free, ctypes.c_void_p)
        self._gomp.GOMP_parallel(nothing, None, self._size, 0)
        self._ended.wait()


class LaterWaiting:
    """Watches the cores of a run on CPUs, and lets its threads spin only briefly while other programs use them."""

    def __init__(self, threads: int, ranks: int, warn: Callable[[str], None]) -> None:
        """threads: of this rank. ranks: on this machine, which work alike. warn: called once with a sentence, in
        another thread. Nothing is watched if one thread computes, if the user has decided, or without libgomp."""
        self._threads, self._ranks, self._warn = threads, ranks, warn
        self._over = threading.Event()
        chosen = any(name in os.environ for name in CHOSEN)
        self._gomp = None if threads == 1 or chosen else loaded_gomp()
        self._thread = threading.Thread(target=self._watch, name="waiting", daemon=True)
        self._team: SecondTeam | None = None
        self._said = False

    def __enter__(self) -> Self:
        if self._gomp is not None:
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        if self._gomp is not None:
            self._thread.join()

    def _watch(self) -> None:
        process = psutil.Process()
        own = _seconds(process)
        psutil.cpu_percent(None, percpu=True)
        while not self._over.wait(_PERIOD):
            shares = psutil.cpu_percent(None, percpu=True)
            before, own = own, _seconds(process)
            self.look(shares, (own - before) / _PERIOD * self._ranks)
        if self._team is not None:
            self._team.end()

    def look(self, shares: list[float], own: float) -> None:
        """Decide by the percent that each core of the machine was used, of which the ranks used `own` cores."""
        cores = sorted(os.sched_getaffinity(0))
        used = [shares[core] / 100 for core in cores if core < len(shares)]
        taken = taken_cores(self._ranks * self._threads, used, own)
        if taken and self._team is None and self._gomp is not None:
            # With this rank's own team, that is one more thread than cores.
            self._team = SecondTeam(self._gomp, max(len(cores) - self._threads, 0) + 2)
            if not self._said:
                self._warn(in_words(taken, len(cores)))
            self._said = True
        elif not taken and self._team is not None:
            self._team.end()
            self._team = None


def loaded_gomp() -> ctypes.CDLL | None:
    """Return the libgomp that this process has loaded, None if it has none."""
    paths = {line.split(maxsplit=5)[-1].strip() for line in Path("/proc/self/maps").read_text().splitlines()}
    found = [path for path in paths if Path(path).name.startswith("libgomp")]
    return ctypes.CDLL(found[0]) if len(found) == 1 else None


def _seconds(process: psutil.Process) -> float:
    """Return the CPU seconds that a process has used."""
    times = process.cpu_times()
    return float(times.user + times.system)
