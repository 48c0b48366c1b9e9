"""Handle requests to stop: remember a request until the current step is done."""

import _thread
import os
import signal
import threading
from types import FrameType, TracebackType
from typing import NoReturn, Self

from llmtrain_data.output import leave_terminal, say, show_cursor

from llmtrain.comm.environment import LAUNCHER_PID
from llmtrain.errors import EXIT_INTERRUPTED, EXIT_PREEMPTED

# These ask a run to stop: Ctrl-C, a scheduler's or user's kill, Slurm's warning before a job's end, and the end of the
# terminal.
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
# Variables in which launchers give a process its rank.
_RANK = ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK")
# The message if the run has not begun to train.
STOPPED_EARLY = "told to stop before anything was done; the same command starts again"
# Seconds that the main thread has to heed a second Ctrl-C: a long call of a kernel does not return before its end.
GRACE = 2.0
# Ends the thread that reads the numbers of signals; no signal has this one.
_OVER = b"\0"


class StopRequest:
    """In a `with` block, takes each of STOP_SIGNALS as a request to stop. A second SIGINT stops immediately.

    asked: whether a request has arrived; interrupted: whether it was a SIGINT. agreed: whether ranks have agreed that
    one was asked; `interrupted` is then the same on all of them. A thread notes both immediately, because
    Python calls a handler only between two calls of the main thread, which may take minutes. After the block SIGUSR1 is
    ignored, as the process is about to end.
    """

    def __init__(self) -> None:
        self.asked = self.interrupted = self.agreed = False
        self._twice = False
        self._heeded = threading.Event()
        self._before: dict[int, signal._HANDLER] = {}
        self._arrived: tuple[int, int] | None = None
        self._watch = threading.Thread(target=self._note, name="stop", daemon=True)

    def with_request(self, doing: str) -> str:
        """Return what the user is shown while this rank does something."""
        return f"told to stop, finishing this step or batch first; {doing}".removesuffix("; ") if self.asked else doing

    def __enter__(self) -> Self:
        # Python calls a handler once for all signals that arrive during one C call, but writes a byte for each.
        self._arrived = os.pipe()
        os.set_blocking(self._arrived[1], False)
        self._watch.start()
        signal.set_wakeup_fd(self._arrived[1], warn_on_full_buffer=False)
        self._before = {number: signal.signal(number, self._ask) for number in stop_signals()}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(-1)
        assert self._arrived is not None
        os.write(self._arrived[1], _OVER)
        self._watch.join()
        for end in self._arrived:
            os.close(end)
        # A late SIGUSR1 must not kill a finished run: its exit code would ask for another start.
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        self.asked = True
        if number == signal.SIGINT:
            self.interrupted = True
            signal.signal(signal.SIGINT, self._interrupt)
            if self._twice:
                self._interrupt(number, frame)

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        if not self._heeded.is_set():
            self._heeded.set()
            raise KeyboardInterrupt

    def _note(self) -> None:
        """Record the signals that arrive, until the block ends."""
        assert self._arrived is not None
        interrupts = 0
        while _OVER not in (arrived := os.read(self._arrived[0], 4096)):
            self.asked = True
            if signal.SIGHUP in arrived:
                leave_terminal()
            interrupts += arrived.count(signal.SIGINT)
            self.interrupted = interrupts > 0
            if interrupts > 1 and not self._twice:
                self._twice = True
                # Both may have arrived during one call, after which Python calls its handler once.
                _thread.interrupt_main()
                if not self._heeded.wait(GRACE):
                    show_cursor()
                    _end(signal.SIGINT, None)


def stop_signals() -> list[signal.Signals]:
    """Return the stop signals that this process heeds: with `nohup` the end of the terminal is ignored."""
    return [number for number in STOP_SIGNALS if (number, signal.getsignal(number)) != (signal.SIGHUP, signal.SIG_IGN)]


def end_early() -> None:
    """End this process immediately on a stop signal, until `restore_handlers`: it has nothing to save yet, and an
    import may swallow an exception. In ranks that `llmtrain run` started, does nothing: their launcher handles the
    signal."""
    if LAUNCHER_PID not in os.environ:
        for number in stop_signals():
            signal.signal(number, _end)


def restore_handlers() -> None:
    """Restore Python's default handlers: from here on this process may wait for other ranks outside Python."""
    for number in STOP_SIGNALS:
        if signal.getsignal(number) == _end:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)


def _end(number: int, frame: FrameType | None) -> NoReturn:
    interrupted = number == signal.SIGINT
    if number == signal.SIGHUP:
        leave_terminal()
    # One rank reports for all, or our launcher.
    if LAUNCHER_PID not in os.environ and {os.environ.get(name, "0") for name in _RANK} == {"0"}:
        say(f"llmtrain: {'interrupted' if interrupted else STOPPED_EARLY}", err=True)
    os._exit(EXIT_INTERRUPTED if interrupted else EXIT_PREEMPTED)
