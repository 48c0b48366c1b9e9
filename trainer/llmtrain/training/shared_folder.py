"""Whether all ranks see the run's folder: each writes its part of every checkpoint there."""

import os
import time
from contextlib import suppress
from pathlib import Path

from llmtrain.comm.ranks import Ranks
from llmtrain.errors import PreemptedError, RunFailedError
from llmtrain.launch.run_lock import LOOK, RunLock
from llmtrain.launch.stop import STOPPED_EARLY, StopRequest

# The most looks for the folder: for a minute, a client of NFS may believe that a new file is not there.
LOOKS = 60
_SEEN, _UNSEEN, _STOPPED = range(3)


def check_shared(folder: Path, lock: RunLock, ranks: Ranks, stop: StopRequest) -> None:
    """Check that every rank sees the folder that the main rank has locked, with its `checkpoints`. Collective.

    Waits only where a rank does not see it at once. Raises RunFailedError on all ranks, PreemptedError when asked to
    stop while waiting.
    """
    ranks.activity.begin("waiting until all ranks see the run's folder")
    content = ranks.from_main(f"lock of {folder.name}", lock.content)
    found = _SEEN if ranks.is_main else _look(folder, content, ranks, stop)
    states = [state for [state] in ranks.gather_all([found])]
    if _STOPPED in states:
        raise PreemptedError(STOPPED_EARLY)
    if _UNSEEN in states:
        rank = states.index(_UNSEEN)
        raise RunFailedError(
            f"rank {rank} on {ranks.host_of(rank)} does not see the run's folder {folder.absolute()} of rank 0 on "
            f"{ranks.host_of(0)}; all ranks must share logging.dir"
        )


def _look(folder: Path, content: str, ranks: Ranks, stop: StopRequest) -> int:
    for look in range(LOOKS):
        if look:
            if stop.asked:
                return _STOPPED
            ranks.activity.record("waiting to see the run's folder")
            time.sleep(LOOK)
        if _sees(folder, content):
            return _SEEN
    return _UNSEEN


def _sees(folder: Path, content: str) -> bool:
    with suppress(OSError):
        # Opening a folder makes a client of NFS ask the server whether the folder has changed.
        for opened in (folder.parent, folder, folder / "checkpoints"):
            os.close(os.open(opened, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
        return RunLock(folder).shows(content)
    return False
