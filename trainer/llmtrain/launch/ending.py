"""End the ranks of a run together after an error, and let one of them report it."""

import atexit
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, NoReturn

from llmtrain_data.errors import DataError

from llmtrain.comm.crash_notes import Ending
from llmtrain.comm.environment import LAUNCHER_PID, Launched
from llmtrain.comm.nccl_failure import nccl_failure
from llmtrain.errors import (
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    RESUMES,
    BadInputError,
    CommandError,
    PreemptedError,
    RunFailedError,
    ran_out_of_memory,
)

if TYPE_CHECKING:
    from llmtrain.comm.ranks import Ranks

# Seconds that ranks leave the first one of their machine to report a bad recipe.
REPORT = 10.0


@contextmanager
def reported_once(launch: Launched | None) -> Iterator[None]:
    """Let only one rank of each machine report a bad recipe or cluster, because all of them find the same error."""
    try:
        yield
    except BadInputError as error:
        if launch is None or launch.local_rank == 0:
            raise
        # A launcher ends all ranks when one has ended: the rank that reports must end first.
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        time.sleep(REPORT)
        raise SystemExit(error.exit_code) from error


@contextmanager
def end_together(ranks: "Ranks") -> Iterator[None]:
    """After an error in the block on any rank, end all ranks; one of them reports the error."""
    try:
        yield
    except (CommandError, DataError) as error:
        if ranks.activity.over and not isinstance(error, PreemptedError):
            # A lost rank caused the error, and our launcher reports that rank.
            _skip_finalization(EXIT_FAILED)
            _end_lost(error, ranks)
        ranks.activity.ended(Ending.REPORTED)
        _skip_finalization(error.exit_code)
        if _already_reported(ranks):
            raise SystemExit(error.exit_code) from error
        if ranks.watchdog is not None:
            if not isinstance(error, PreemptedError):
                ranks.watchdog.leave_word()
            ranks.watchdog.end()
        raise
    except BaseException as error:
        _end_apart(error, ranks)
        raise


def _end_apart(error: BaseException, ranks: "Ranks") -> None:
    """End after an error of this rank alone: lost contact, which not every rank should report, or a crash."""
    _skip_finalization(EXIT_INTERRUPTED if isinstance(error, KeyboardInterrupt) else EXIT_FAILED)
    if ranks.watchdog is None:
        return
    if (failure := nccl_failure(error)) is not None:
        # It may be the fault of a GPU, which a restart can leave behind.
        ranks.activity.ended(Ending.CRASHED)
        ranks.watchdog.leave_word()
        ranks.watchdog.end()
        raise RunFailedError(
            f"NCCL failed on rank {ranks.rank} {ranks.activity.last}: {failure}; NCCL_DEBUG=INFO shows more"
        ) from error
    if not isinstance(error, RuntimeError) or not _lost_peer(error):
        ranks.activity.ended(_ending_of(error))
        ranks.watchdog.leave_word()
        ranks.watchdog.end()
        return
    # gloo and NCCL raise this when a peer is gone.
    _end_lost(error, ranks)


def _ending_of(error: BaseException) -> Ending:
    if isinstance(error, OSError):
        # The command line reports it in one sentence.
        return Ending.REPORTED
    return Ending.OUT_OF_MEMORY if ran_out_of_memory(error) else Ending.CRASHED


def _end_lost(error: Exception, ranks: "Ranks") -> NoReturn:
    """End after losing contact with another rank."""
    ranks.activity.ended(Ending.LOST)
    if LAUNCHER_PID in os.environ:
        # Our launcher sees which rank is gone, and reports it once.
        raise SystemExit(EXIT_FAILED) from error
    if ranks.watchdog is not None:
        ranks.watchdog.find_lost()
    sentence = f"rank {ranks.rank} lost contact with another rank {ranks.activity.last}, so the run stopped; {RESUMES}"
    raise RunFailedError(sentence) from error


def _already_reported(ranks: "Ranks") -> bool:
    """Return whether another rank has reported why the run ends: the ranks' errors may differ, and one is enough."""
    try:
        return ranks.store is not None and ranks.store.add("said", 1) > 1
    except RuntimeError:
        # Rank 0, which hosts the store, is gone, and it reported before it ended.
        return True


def _skip_finalization(code: int) -> None:
    """End the process right after its last message: a thread that waits inside gloo would abort a regular exit, and
    Ctrl-C would print a traceback."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    def end() -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)

    atexit.register(end)


def _lost_peer(error: RuntimeError) -> bool:
    import torch.distributed as dist

    return isinstance(error, dist.DistError) or "Connection" in str(error) or "gloo" in str(error)
