"""Shows what a program is waiting for, so that it is never silent for more than some seconds."""

import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

from rich.live import Live
from rich.spinner import Spinner
from rich.table import Table

from llmtrain_data import units
from llmtrain_data.output import Terminal

# Without a terminal, seconds of one activity before the first line about it.
PATIENCE = 5.0


class Waiting:
    """Shows the current activity and its duration. On a terminal it updates a live line. Elsewhere it prints a line
    after 5 seconds, and another whenever the duration is 3 times that of the last line.

    doing: returns the activity; another thread calls it. The text before the first colon names the activity, the rest
    its progress. An empty string shows nothing.
    """

    def __init__(self, doing: Callable[[], str], console: Terminal | None = None, enabled: bool = True) -> None:
        """enabled: if False, show nothing."""
        self.doing = doing
        self._console, self._enabled = console or Terminal(), enabled
        self._what, self._since, self._next = "", time.monotonic(), PATIENCE
        self._live: Live | None = None
        self._stopped = threading.Event()
        self._spinner = Spinner("dots")

    def start(self) -> Self:
        """Start showing."""
        if not self._enabled:
            return self
        if is_live(self._console):
            self._live = Live(self, console=self._console, refresh_per_second=4, transient=True)
            self._live.start(refresh=True)
        else:
            threading.Thread(target=self._lines, daemon=True).start()
        return self

    def stop(self) -> None:
        """Stop showing. A second call has no effect."""
        self._stopped.set()
        if self._live is not None:
            self._live.stop()
            self._live = None

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def __rich__(self) -> Table:
        text, seconds = self._look()
        line = Table.grid(padding=(0, 1))
        if text:
            line.add_row(self._spinner, f"{text}  {units.duration(seconds)}")
        return line

    def _lines(self) -> None:
        while not self._stopped.wait(PATIENCE / 20):
            text, seconds = self._look()
            if text and seconds >= self._next and not self._stopped.is_set():
                self._next = 3 * seconds
                self._console.log_line(f"{text}  ({units.duration(seconds)} so far)")

    def _look(self) -> tuple[str, float]:
        """Return the activity and its duration in seconds."""
        text = self.doing()
        if (what := text.partition(":")[0]) != self._what:
            self._what, self._since, self._next = what, time.monotonic(), PATIENCE
        return text, time.monotonic() - self._since


def loading(what: str, enabled: bool = True) -> Waiting:
    """Return a `Waiting` that shows on a terminal that `what` is loading. It shows nothing in a log."""
    console = Terminal(stderr=True)
    return Waiting(lambda: f"loading {what}", console, enabled and is_live(console))


def is_live(console: Terminal) -> bool:
    """Whether a console can redraw lines."""
    return console.is_terminal and not console.is_dumb_terminal
