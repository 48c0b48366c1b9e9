"""Crash notes: what each rank did last. The launcher can read them after a rank was killed. Imports no torch."""

import mmap
import os
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum

# Set for ranks that `llmtrain run --nproc` started: the path of their notes.
CRASH_NOTES = "LLMTRAIN_NOTES"
_PAGE = mmap.ALLOCATIONGRANULARITY


class Ending(Enum):
    """How a rank ended by itself. reported: it printed the reason, and a restart cannot help. crashed: it printed a
    traceback, or what NCCL said, and a restart may help; so it may out of memory, for which no GPU is at fault. lost:
    it lost contact with another rank. well: it finished."""

    NONE = ""
    WELL = "well"
    REPORTED = "reported"
    CRASHED = "crashed"
    OUT_OF_MEMORY = "out of memory"
    LOST = "lost"


@dataclass(frozen=True)
class Last:
    """A rank's last note. step: steps done. doing: what it began last."""

    step: int = 0
    doing: str = "starting"
    ending: Ending = Ending.NONE

    def __str__(self) -> str:
        return f"after step {self.step}, in {self.doing}"


@dataclass(frozen=True)
class EndReason:
    """Why the run ends, empty if nobody has said. rank: the one that is named as the cause, None if none is."""

    sentence: str = ""
    rank: int | None = None


class CrashNote:
    """A rank's page of the launcher's notes. A write costs no system call, and the note outlives the process."""

    def __init__(self, path: str | None, rank: int) -> None:
        """path: of the launcher's notes. If it is None or cannot be opened, nothing is kept."""
        self._page: mmap.mmap | None = None
        if path is not None:
            with suppress(OSError), open(path, "r+b") as file:
                self._page = mmap.mmap(file.fileno(), _PAGE, offset=(rank + 1) * _PAGE)
                self._reason = mmap.mmap(file.fileno(), _PAGE, access=mmap.ACCESS_READ)

    def write(self, last: Last) -> None:
        """Replace the note."""
        if self._page is not None:
            text = f"{last.step}\n{last.ending.value}\n{last.doing}".encode()[: _PAGE - 1]
            self._page[: len(text) + 1] = text + b"\0"

    @property
    def over(self) -> bool:
        """Whether a rank has left a reason for the run's end."""
        return self._page is not None and self._reason[0] != 0


class CrashNotes:
    """The launcher's side: one page for the reason of the run's end, and one for each rank.

    The notes are a file in memory, which is gone when this process ends. Ranks open it as `path`, None on systems
    without such files.
    """

    def __init__(self, ranks: int) -> None:
        self.path: str | None = None
        if hasattr(os, "memfd_create"):
            self._fd = os.memfd_create("llmtrain-notes")
            os.ftruncate(self._fd, (ranks + 1) * _PAGE)
            self.path = f"/proc/{os.getpid()}/fd/{self._fd}"

    def last(self, rank: int) -> Last:
        """Return a rank's last note; without one, the rank has not begun its first step."""
        return Last() if self.path is None else read_note(self.path, rank)

    @property
    def reason(self) -> EndReason:
        """The reason that a rank left."""
        if self.path is None:
            return EndReason()
        rank, _, sentence = _read(self.path, 0).partition("\n")
        return EndReason(sentence, int(rank) if rank else None)

    def close(self) -> None:
        """Free the notes."""
        if self.path is not None:
            os.close(self._fd)


def read_note(path: str, rank: int) -> Last:
    """Return a rank's last note, or `Last()` if the rank has not written one. Raises OSError."""
    try:
        step, ending, doing = _read(path, rank + 1).split("\n", 2)
        return Last(int(step), doing, Ending(ending))
    except ValueError:
        return Last()


def write_reason(path: str, reason: EndReason) -> None:
    """Leave the reason for the run's end for the launcher."""
    rank = "" if reason.rank is None else reason.rank
    with open(path, "r+b") as file:
        file.write(f"{rank}\n{reason.sentence}".encode()[: _PAGE - 1] + b"\0")


def _read(path: str, page: int) -> str:
    with open(path, "rb") as file:
        file.seek(page * _PAGE)
        return file.read(_PAGE).partition(b"\0")[0].decode(errors="replace")
