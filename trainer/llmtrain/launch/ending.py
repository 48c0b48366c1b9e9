"""How the ranks of a run end together, and which of them reports why."""

import atexit
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, NoReturn

from llmtrain_data.errors import DataError

from llmtrain.comm.crash_notes import Ending
from llmtrain.comm.environment import LAUNCHER_PID
from llmtrain.errors import (
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    CommandError,
    PreemptedError,
    RunFailedError,
)

if TYPE_CHECKING:
    from llmtrain.comm.ranks import Ranks


@contextmanager
def ending_as_one(ranks: "Ranks") -> Iterator[None]:
    """Have one rank say what the block raises on any of them, and all end after an error on one of them."""
    try:
        yield
    except (CommandError, DataError) as error:
        if ranks.activity.over and not isinstance(error, PreemptedError):
            # It is of a rank that was lost, whom our launcher names.
            _skip_finalization(EXIT_FAILED)
            _end_lost(error, ranks)
        ranks.activity.ended(Ending.TOLD)
        _skip_finalization(error.exit_code)
        if _has_spoken(ranks):
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
    """End after an error that is this rank's alone: lost contact, of which not every rank is to speak, or a crash."""
    _skip_finalization(EXIT_INTERRUPTED if isinstance(error, KeyboardInterrupt) else EXIT_FAILED)
    if ranks.watchdog is None:
        return
    if not isinstance(error, RuntimeError) or not _lost_peer(error):
        # Of a file that cannot be read or written the command line makes a sentence.
        ranks.activity.ended(Ending.TOLD if isinstance(error, OSError) else Ending.CRASHED)
        ranks.watchdog.leave_word()
        ranks.watchdog.end()
        return
    # What gloo and NCCL raise when a peer is gone.
    _end_lost(error, ranks)


def _end_lost(error: Exception, ranks: "Ranks") -> NoReturn:
    """End after having lost contact."""
    ranks.activity.ended(Ending.LOST)
    if LAUNCHER_PID in os.environ:
        # Our launcher sees which rank is gone, and says so for all.
        raise SystemExit(EXIT_FAILED) from error
    if ranks.watchdog is not None:
        ranks.watchdog.find_lost()
    raise RunFailedError(f"rank {ranks.rank} lost contact with another rank {ranks.activity.last}") from error


def _has_spoken(ranks: "Ranks") -> bool:
    """Whether another rank has said why the run ends: what each of them has found may differ, and one sentence will
    do."""
    try:
        return ranks.store is not None and ranks.store.add("said", 1) > 1
    except RuntimeError:
        # The first rank, which has the store, is gone: not without a word.
        return True


def _skip_finalization(code: int) -> None:
    """Have the process end as soon as all is said: a thread that waits for other ranks inside gloo would abort it, and
    Ctrl-C would have it say more."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    def end() -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)

    atexit.register(end)


def _lost_peer(error: RuntimeError) -> bool:
    import torch.distributed as dist

    return isinstance(error, dist.DistError) or "Connection" in str(error) or "gloo" in str(error)
