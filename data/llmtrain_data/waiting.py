"""What a start waits for, until the run says more itself: no pause of more than some seconds without a word."""

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

# Seconds that one thing takes before a line says so, where there is no terminal.
PATIENCE = 5.0


class Waiting:
    """Shows what `doing` returns, and for how long it has been doing it: a live line on a terminal; elsewhere a line
    once it has taken 5 seconds, and again when it has taken 3 times as long as when the last line was printed.

    doing: called by a thread of its own. What comes before its first colon names what is done, and the rest how far it
    is; empty for nothing that is worth a word.
    """

    def __init__(self, doing: Callable[[], str], console: Terminal | None = None, enabled: bool = True) -> None:
        """enabled: whether anything is shown at all."""
        self.doing = doing
        self._console, self._enabled = console or Terminal(), enabled
        self._what, self._since, self._next = "", time.monotonic(), PATIENCE
        self._live: Live | None = None
        self._stopped = threading.Event()
        self._spinner = Spinner("dots")

    def start(self) -> Self:
        """Begin to show."""
        if not self._enabled:
            return self
        if is_live(self._console):
            self._live = Live(self, console=self._console, refresh_per_second=4, transient=True)
            self._live.start()
        else:
            threading.Thread(target=self._lines, daemon=True).start()
        return self

    def stop(self) -> None:
        """Show nothing from now on; stopping twice is harmless."""
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
                self._console.print(f"{text}  ({units.duration(seconds)} so far)", soft_wrap=True)

    def _look(self) -> tuple[str, float]:
        """Return what is done and for how many seconds."""
        text = self.doing()
        if (what := text.partition(":")[0]) != self._what:
            self._what, self._since, self._next = what, time.monotonic(), PATIENCE
        return text, time.monotonic() - self._since


def loading(what: str, enabled: bool = True) -> Waiting:
    """Return what says on a terminal that something is being loaded; a log has no use for that."""
    console = Terminal(stderr=True)
    return Waiting(lambda: f"loading {what}", console, enabled and is_live(console))


def is_live(console: Terminal) -> bool:
    """Whether lines can be drawn anew on a console."""
    return console.is_terminal and not console.is_dumb_terminal
