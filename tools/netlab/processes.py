"""Runs one command on many ranks: starts them, collects their output, and stops all when one fails."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from threading import Event, Thread

TIMED_OUT = 124
# Seconds from the failure of one rank to SIGTERM for the others.
SETTLE = 5.0
# Seconds from SIGTERM to SIGKILL, and from a forwarded signal to SIGKILL.
GRACE, PASSED_ON_GRACE = 10.0, 60.0
# A slowed rank stops once in this many seconds. It is short relative to a microbatch, so that passes slow down evenly.
PERIOD = 0.003


class Ranks:
    """The processes of one run. Each leads its own process group.

    commands: command and environment of each rank. echo: also write each line to stdout, with the rank in front.
    speeds: for a rank, the share of the time that it runs. output: the lines of each rank, stdout and stderr combined.
    """

    def __init__(
        self,
        commands: Sequence[tuple[Sequence[str], Mapping[str, str]]],
        echo: bool,
        speeds: Mapping[int, float] | None = None,
    ) -> None:
        self.output: list[list[str]] = [[] for _ in commands]
        self._echo = echo
        self._due: list[tuple[float, int]] = []
        self._started = time.monotonic()
        self._processes: list[subprocess.Popen[str]] = []
        try:
            for command, environment in commands:
                self._processes.append(_start(command, environment))
        except BaseException:
            self._signal(signal.SIGKILL)
            raise
        self._listeners = [Thread(target=self._listen, args=(rank,), daemon=True) for rank in range(len(commands))]
        self._over = Event()
        self._brakes = [Thread(target=self._brake, args=item, daemon=True) for item in (speeds or {}).items()]
        for brake in self._brakes:
            brake.start()

    def wait(self, timeout: float | None) -> tuple[int, float]:
        """Wait until all have ended. Return (exit code, seconds); the code is 0, or that of the rank that failed first.

        If one fails, this stops the others. A negative code is the signal that killed a rank. Code 124: the run took
        longer than `timeout` seconds and was killed.
        """
        failure = 0
        # Start listening only now: a reader of the output may send a signal, which needs this object.
        for listener in self._listeners:
            listener.start()
        try:
            while True:
                codes = [_exit_code(process.pid) for process in self._processes]
                now = time.monotonic()
                if not failure and any(codes):
                    failure = next(code for code in codes if code)
                    self._due += [(now + SETTLE, signal.SIGTERM), (now + SETTLE + GRACE, signal.SIGKILL)]
                if None not in codes:
                    return failure, now - self._started
                if timeout is not None and now > self._started + timeout:
                    return TIMED_OUT, now - self._started
                for entry in [entry for entry in self._due if entry[0] <= now]:
                    self._due.remove(entry)
                    self._signal(entry[1])
                time.sleep(0.02)
        finally:
            # Stop the brakes before waiting for the ranks: afterwards, their process ids may be reused.
            self._over.set()
            for brake in self._brakes:
                brake.join()
            self._signal(signal.SIGKILL)
            for process, listener in zip(self._processes, self._listeners, strict=True):
                process.wait()
                # A process that left its rank's group may keep the pipe open. It ends with the lab.
                listener.join(timeout=2)

    def pass_on(self, number: int) -> None:
        """Send a signal to every rank. Kill ranks that have not ended a minute later."""
        self._signal(number)
        self._due.append((time.monotonic() + PASSED_ON_GRACE, signal.SIGKILL))

    def _signal(self, number: int) -> None:
        for process in self._processes:
            _signal_group(process.pid, number)

    def _brake(self, rank: int, speed: float) -> None:
        """Let a rank run for a share of each period. All periods count from one start, which keeps the share exact."""
        group, begin = self._processes[rank].pid, self._started
        with contextlib.suppress(OSError):
            # Real-time priority: this thread must wake on time although the ranks use all cores.
            os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
        while not self._over.is_set():
            begin += PERIOD * (1 + max(0, (time.monotonic() - begin) // PERIOD))
            self._over.wait(begin - time.monotonic())
            _signal_group(group, signal.SIGSTOP)
            self._over.wait(begin + PERIOD * (1 - speed) - time.monotonic())
            _signal_group(group, signal.SIGCONT)

    def _listen(self, rank: int) -> None:
        stream = self._processes[rank].stdout
        assert stream is not None
        for line in stream:
            self.output[rank].append(line.rstrip("\n"))
            if self._echo:
                sys.stdout.write(f"[{rank}] {line.rstrip()}\n")
                sys.stdout.flush()


def _signal_group(pid: int, number: int) -> None:
    # The group id cannot be reused: its leader stays a zombie until the end of the run.
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, number)


def _exit_code(pid: int) -> int | None:
    """Return a child's exit code, negative for a signal, None while it runs. The child stays a zombie."""
    ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    if ended is None:
        return None
    return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status


def _start(command: Sequence[str], environment: Mapping[str, str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
