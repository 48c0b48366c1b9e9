"""Being asked to stop: remembered until the step at hand is done."""

import signal
from dataclasses import dataclass
from types import FrameType


@dataclass
class StopRequest:
    """Which signal asked this rank to stop, if any. A second SIGINT stops at once."""

    signal_name: str | None = None

    def listen(self) -> "StopRequest":
        """Take SIGINT and SIGTERM as requests from now on."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._asked)
        return self

    def _asked(self, number: int, frame: FrameType | None) -> None:
        self.signal_name = signal.Signals(number).name
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.default_int_handler)
