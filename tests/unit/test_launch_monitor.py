"""The launcher's monitor of its ranks' processes, and what it says of a run that failed."""

import subprocess
import time

import psutil
import pytest
from llmtrain.comm.crash_notes import CrashNotes
from llmtrain.launch.local import Restarts
from llmtrain.launch.monitor import Monitor


def test_a_rank_that_died_before_it_was_looked_at_has_died() -> None:
    process = subprocess.Popen(["true"])
    notes = CrashNotes(2)
    try:
        while psutil.Process(process.pid).status() != psutil.STATUS_ZOMBIE:
            time.sleep(0.01)
        monitor = Monitor(2, notes)
        end = time.monotonic() + 2
        while not monitor.died and time.monotonic() < end:
            time.sleep(0.01)
        monitor.close()
        assert process.pid in monitor.died
    finally:
        notes.close()
        process.wait()


@pytest.mark.parametrize(
    ("newest", "said"),
    [
        (None, "there is no checkpoint yet, so the same command starts again"),
        (20, "the same command resumes from step 20"),
    ],
)
def test_what_the_same_command_does(newest: int | None, said: str) -> None:
    assert Restarts(0, lambda: newest, lambda ranks: ranks).next_step == said
