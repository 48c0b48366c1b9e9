"""Being asked to stop: remembered until the step at hand is done."""

import signal
from types import FrameType, TracebackType
from typing import Self

# What asks a run to stop: Ctrl-C, schedulers and people, and Slurm some time before a job's end.
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
# What is said of it where a run has not begun to train.
TOLD_EARLY = "told to stop before anything was done; the same command starts again"


class StopRequest:
    """In a `with` block, takes SIGINT, SIGTERM and SIGUSR1 as requests to stop. A second SIGINT stops at once.

    After the block SIGUSR1 is ignored, as the process is about to end.
    """

    def __init__(self) -> None:
        self.asked = False
        self._before: dict[int, signal._HANDLER] = {}

    def __enter__(self) -> Self:
        self._before = {number: signal.signal(number, self._ask) for number in STOP_SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        # What has ended must not die of being asked to: its exit code would tell that it has to be run again.
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        self.asked = True
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.default_int_handler)
