"""Monitor the processes of this machine's ranks from their launcher, in addition to torch's agent. No torch in here."""

import os
import signal
import threading
from contextlib import suppress

import psutil

from llmtrain.comm.crash_notes import CrashNotes, Ending, EndReason, write_reason

# Seconds between polls of the processes.
_POLL = 0.05
# Seconds that the other ranks have to end by themselves after a rank died.
PATIENCE = 3.0


class Monitor:
    """Kills the ranks that remain after a rank died without a report: they may wait for it forever, and torch's agent
    would wait half a minute.

    died: pids of the ranks that died first. reason: the reason that the ranks had found by then. killed: pids of the
    ranks that this monitor killed.
    """

    def __init__(self, ranks: int, notes: CrashNotes) -> None:
        self.died: list[int] = []
        self.reason = EndReason()
        self.killed: set[int] = set()
        self._ranks, self._notes = ranks, notes
        # As process 1 of a container, the launcher adopts what the ranks of an earlier attempt have started.
        self._earlier = set(psutil.Process().children())
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="monitor", daemon=True)
        # Without crash notes, a rank that has succeeded looks like one that died.
        if notes.path is not None:
            self._thread.start()

    def close(self) -> None:
        """Stop monitoring."""
        self._over.set()
        if self._notes.path is not None:
            self._thread.join()

    def _watch(self) -> None:
        processes: dict[int, psutil.Process] = {}
        while not self.died and not self._over.wait(_POLL):
            unseen: list[int] = []
            if len(processes) < self._ranks:
                children = self._children()
                processes |= _by_rank(children)
                seen = {process.pid for process in processes.values()}
                # These died before their environment, which holds the rank, could be read.
                unseen = [child.pid for child in children if child.pid not in seen and _has_ended(child)]
            gone = [rank for rank, process in processes.items() if _has_ended(process)]
            self.died = [processes[rank].pid for rank in gone if self._notes.last(rank).ending == Ending.NONE] + unseen
        if not self.died:
            return
        self.reason = self._notes.reason
        if not self.reason.sentence and self._notes.path is not None:
            # Ranks that wait in a save check for a reason.
            write_reason(self._notes.path, EndReason("a rank died"))
        if self._over.wait(PATIENCE):
            return
        for process in (processes | _by_rank(self._children())).values():
            if not _has_ended(process):
                self.killed.add(process.pid)
                with suppress(ProcessLookupError):
                    # Each rank leads a process group with its own children.
                    os.killpg(process.pid, signal.SIGKILL)

    def _children(self) -> list[psutil.Process]:
        return [child for child in psutil.Process().children() if child not in self._earlier]


def _by_rank(children: list[psutil.Process]) -> dict[int, psutil.Process]:
    """Return the processes of the ranks that have started, by local rank."""
    found = {}
    for child in children:
        # Before exec, a child still has the launcher's environment.
        with suppress(psutil.Error, KeyError):
            found[int(child.environ()["LOCAL_RANK"])] = child
    return found


def _has_ended(process: psutil.Process) -> bool:
    try:
        return bool(process.status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True
