"""The main rank's console output: a live line on a terminal, plain lines anywhere else."""

import time
from collections.abc import Callable, Iterable

from llmtrain_data import units
from llmtrain_data.output import Terminal
from llmtrain_data.waiting import Waiting, is_live
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from llmtrain.telemetry.metrics import Row


class RunConsole:
    """Prints a run's progress on stdout, or on the given console.

    A separate thread draws the live line twice a second, so that a slow step never looks hung. Other output appears
    above the line.
    """

    def __init__(self, steps: int, console: Terminal | None = None, doing: Callable[[], str] = lambda: "") -> None:
        """doing: returns the run's current activity, empty while it trains."""
        self._steps = steps
        self._console = console or Terminal()
        self._live: Live | None = None
        self._line = _LiveLine(steps, doing)
        self._waiting = Waiting(doing, self._console)

    def start(
        self, name: str, facts: Iterable[tuple[str, str]], decisions: list[str], step: int = 0, elapsed: float = 0.0
    ) -> None:
        """Print the run's facts and the decisions that were made for it; then show the live line. step: after which the
        run continues. elapsed: seconds until then."""
        self._line.move(step, elapsed, None)
        rows = [*facts, *(("decided" if index == 0 else "", text) for index, text in enumerate(decisions))]
        if not is_live(self._console):
            self._console.log_line(f"run {name}")
            for key, value in rows:
                self._console.log_line(f"  {key:<16}{value}")
            self._waiting.start()
            return
        self._console.print(Panel(_grid(rows), title=Text(name), title_align="left", expand=False))
        self._live = Live(self._line, console=self._console, refresh_per_second=2, transient=True)
        self._live.start()

    def progress(self, step: int, elapsed: float, left: float | None) -> None:
        """Move the live line to `step`; elapsed and left are seconds. Without a terminal, prints nothing."""
        self._waiting.stop()
        self._line.move(step, elapsed, left)

    def logged(self, row: Row, left: float | None) -> None:
        """Show a logged step in the live line, or print it as a line."""
        self._line.row = row
        if self._live is None:
            left_text = "" if left is None else f"  left {units.duration(left)}"
            elapsed = units.duration(row["elapsed_s"])
            self._console.log_line(f"step {row['step']}/{self._steps}  {step_text(row)}  elapsed {elapsed}{left_text}")

    def evaluation(self, step: int, split: str, loss: float, perplexity: float) -> None:
        """Print an evaluation."""
        text = f"step {step}/{self._steps}  {split} loss {loss:.4f}  perplexity {units.number(perplexity)}"
        self._console.log_line(text, "bold cyan")

    def warn(self, sentence: str) -> None:
        """Print a warning."""
        self._console.log_line(f"warning: {sentence}", "yellow")

    def end(self, facts: Iterable[tuple[str, str]]) -> None:
        """Remove the live line and print the summary."""
        self.close()
        rows = list(facts)
        if is_live(self._console):
            self._console.print(Panel(_grid(rows), title="done", title_align="left", expand=False))
            return
        self._console.log_line("done")
        for key, value in rows:
            self._console.log_line(f"  {key:<22}{value}")

    def close(self) -> None:
        """Remove the live line; closing twice is harmless."""
        self._waiting.stop()
        if self._live is not None:
            self._live.stop()
            self._live = None


class _LiveLine:
    """The line that Live draws: a bar, the step, any activity other than training, the time and the last logged
    numbers. A narrow terminal cuts its end."""

    def __init__(self, steps: int, doing: Callable[[], str]) -> None:
        self._steps, self._doing = steps, doing
        self.row: Row | None = None
        self.move(0, 0.0, None)

    def move(self, step: int, elapsed: float, left: float | None) -> None:
        self._step, self._elapsed, self._left, self._moved = step, elapsed, left, time.monotonic()

    def __rich__(self) -> Table:
        # Count the time since the last step too.
        since = time.monotonic() - self._moved
        left = "" if self._left is None else f", left {units.duration(max(self._left - since, 0.0))}"
        numbers = "" if self.row is None else f"  {step_text(self.row)}"
        doing = f"  {doing}" if (doing := self._doing()) else ""
        text = f"{self._step}/{self._steps}{doing}  elapsed {units.duration(self._elapsed + since)}{left}{numbers}"
        line = Table.grid(padding=(0, 1))
        bar = ProgressBar(total=self._steps, completed=self._step, width=20)
        line.add_row(bar, Text(text, no_wrap=True, overflow="ellipsis"))
        return line


def step_text(row: Row) -> str:
    """Return the numbers of a logged step for people."""
    parts = [
        f"loss {row['loss']:.4f}",
        f"lr {row['lr']:.2e}",
        f"grad norm {row['grad_norm']:.2f}",
        f"{units.number(float(row['tokens_per_s']))} tokens/s",
    ]
    # MFU refers to the data sheet's peak.
    if row["mfu"] is not None:
        parts.append(f"MFU {row['mfu']:.1%}")
    elif row["mfu_measured"] is not None:
        parts.append(f"{row['mfu_measured']:.0%} of measured peak")
    if row["skipped_steps"]:
        parts.append(f"skipped {row['skipped_steps']}")
    return "  ".join(parts)


def _grid(rows: Iterable[tuple[str, str]]) -> Table:
    grid = Table.grid(padding=(0, 2))
    for key, value in rows:
        grid.add_row(Text(key, style="bold"), Text(value))
    return grid
